"""The interface of a draft of any kind, and the sessions that draft for one request."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from sage.drafts.registry import DraftKind, draft_kind
from sage.drafts.session import DraftSession
from sage.targets import Target


class Draft(Protocol):
    """A draft for one target. A kind of draft is a class with this interface, listed in `sage.drafts.registry`.

    With a target on the meta device, `new` and `load` return a draft without weights, as in the plan of a run.
    """

    @property
    def kind(self) -> str:
        """Name of its row in `sage.drafts.registry.KINDS`."""

    @property
    def network(self) -> Any:
        """The module that has the weights; trained, cast and saved as a whole."""

    @property
    def levels(self) -> tuple[int, ...]:
        """Indices k of the target's hidden_states[k] that it reads in addition to the last."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""

    @property
    def reads_features(self) -> bool:
        """Whether it reads the target's features, whose dtype it must have, instead of the target's inputs."""

    @property
    def has_own_lm_head(self) -> bool:
        """Whether an lm_head of its own is trained; else it uses the target's."""

    @property
    def compressor_kind(self) -> str | None:
        """Kind of its visual compressor; None if it reads every visual token."""

    @property
    def assistant(self) -> Any:
        """The model of transformers that can assist in `generate`; None if there is none."""

    def options(self) -> dict[str, Any]:
        """Returns the options of its kind that its weights depend on and a configuration may contradict."""

    def describe(self) -> dict[str, Any]:
        """Returns what the cost of its passes depends on."""

    def check(self, target: Target) -> None:
        """Raises ValueError, naming both, if it was made for another target."""

    @classmethod
    def new(cls, target: Target, kind: DraftKind, vocabulary: Tensor | None, **config: Any) -> Self:
        """Creates a draft with fresh weights; arguments as of `sage.new_draft`."""

    @classmethod
    def load(cls, folder: Path, target: Target, dtype: torch.dtype) -> Self:
        """Loads a draft; ValueError for corrupt files, or a draft for another target (names both)."""


def new_session(draft: Draft, target: Target, capacity: int) -> DraftSession:
    """Starts a session of one request of at most `capacity` tokens, in the target's pass mode."""
    session: DraftSession = draft_kind(draft.kind).session_class()(draft, target, capacity)
    return session
