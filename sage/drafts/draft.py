"""The interface of a draft of any kind and of its sessions, one per request; creation and loading of drafts of every kind.

Shapes: F frontier nodes of one tree level, M tokens committed, U draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from sage.drafts.location import find_draft
from sage.drafts.pruning import KEEP_ALL, Pruning
from sage.drafts.registry import KINDS, DraftKind, draft_kind, head_kind, importer, resolve
from sage.io.manifest import refuse_corrupt_draft
from sage.io.model_files import read_config
from sage.runtime.cache import TreeCache
from sage.runtime.cpu import use_huge_pages
from sage.runtime.host_tensors import Tokens
from sage.runtime.packing import Pass, run_passes
from sage.targets import Features, Prompt, Target, is_target_folder


class Draft(Protocol):
    """A draft for one target. A kind of draft is a class with this interface, listed in `sage.drafts.registry`.

    With a target on the meta device, `new` and `load` return a draft without weights, as in the plan of a run.

    Attributes:
        kind: name of its row in `sage.drafts.registry.KINDS`.
        network: the module that has the weights; trained, cast and saved as a whole.
        levels: indices k of the target's hidden_states[k] that it reads in addition to the last.
        dtype: of the weights.
        reads_features: whether it reads the target's features, whose dtype it must have, instead of the target's inputs.
        has_own_lm_head: whether an lm_head of its own is trained; else it uses the target's.
        compressor_kind: kind of its visual compressor; None if it reads every visual token.
        assistant: the model of transformers that can assist in `generate`; None if there is none.
    """

    @property
    def kind(self) -> str: ...
    @property
    def network(self) -> Any: ...
    @property
    def levels(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def reads_features(self) -> bool: ...
    @property
    def has_own_lm_head(self) -> bool: ...
    @property
    def compressor_kind(self) -> str | None: ...
    @property
    def assistant(self) -> Any: ...

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
        """Loads a draft; ValueError for corrupt files, or a draft for another target than this or another form of it."""


def new_session(draft: Draft, target: Target, capacity: int) -> DraftSession:
    """Starts a session of one request of at most `capacity` tokens, in the target's pass mode."""
    session: DraftSession = resolve(draft_kind(draft.kind).session)(draft, target, capacity)
    return session


class Candidates(NamedTuple):
    """The draft's best next tokens below each node of a level, [F, K], in descending order.

    Attributes:
        probs: float32, the softmax of the scores: the draft's probability of a token, or with noise a confidence that the token
            is the target's draw.
        tokens: LongTensor, target ids.
    """

    probs: Tensor
    tokens: Tensor


class DraftSession(ABC):
    """Interface of the decoder to a draft of any kind, for one request.

    Attributes:
        levels: as of `Draft`.
        token_map: LongTensor [U], draft id -> target id; None when the draft vocabulary is the target's (U = V).
        max_depth: levels that a round can draft; None for any.
        cache: of the draft; a row of a shared one if requests are decoded together. None for a draft without one.
    """

    levels: tuple[int, ...] = ()
    token_map: Tensor | None = None
    max_depth: int | None = None
    cache: TreeCache | None = None

    @property
    @abstractmethod
    def context(self) -> int:
        """Committed rows in the draft's cache; drafted nodes are not counted."""

    @abstractmethod
    def prefill(self, prompt: Prompt, features: Features, root: Tensor) -> Tensor:
        """Reads the prompt and the first token `root` [1]; returns the logits below it, [1, U]."""

    @abstractmethod
    def expand_pass(self, rows: Tensor, tokens: Tokens) -> Pass | Tensor:
        """Drafts one level deeper: nodes with `tokens` [F], whose parents are the `rows` [F] of the previous call's result.
        Returns the logits [F, U] below each node, or the pass that gives them, which several requests can share.
        """

    @abstractmethod
    def commit_pass(self, features: Features, tokens: Tokens) -> Pass | Tensor:
        """Drops the tree and reads the tokens that the target accepted since the last call.

        Args:
            features: the target's features [1, M, D] of the old root and the accepted tokens, without the next root.
            tokens: [M], the token after each of them, the next root last; the logits [1, U] are those below it.
        """

    @torch.no_grad()
    def expand(self, rows: Tensor, tokens: Tokens) -> Tensor:
        """Runs `expand_pass` of this request alone."""
        logits: Tensor = run_passes([self.expand_pass(rows, tokens)])[0]
        return logits

    @torch.no_grad()
    def commit(self, features: Features, tokens: Tokens) -> Tensor:
        """Runs `commit_pass` of this request alone."""
        logits: Tensor = run_passes([self.commit_pass(features, tokens)])[0]
        return logits

    def propose(self, scores: Tensor, num_candidates: int) -> Candidates:
        """Selects the K best next tokens, at most U, by `scores` [F, U]: logits, or `TargetSampler.coupled` of them."""
        probs, tokens = scores.float().softmax(-1).topk(min(num_candidates, scores.shape[-1]))
        return Candidates(probs, tokens if self.token_map is None else self.token_map.take(tokens))

    def set_synthetic_state(self, context: int, width: int) -> None:
        """Sets a context of `context` rows and a frontier of `width` nodes, both of zeros, for timings."""
        raise NotImplementedError


def check_probabilities(rows: Sequence[Sequence[float]], level: int, num_new: int) -> None:
    """Raises ValueError if one of the draft's probabilities [F, K] is NaN: one NaN logit makes the softmax of its row NaN."""
    for row in rows:
        if row[0] != row[0]:
            where = f"level {level} after {num_new} new tokens"
            raise ValueError(f"draft: its pass over {where} gave NaN; check its weights and dtype")


def new_draft(
    target: Target, kind: str = "eagle", *, seed: int | None = None, vocabulary: Tensor | None = None, **config: Any
) -> Draft:
    """Creates a draft with fresh weights and the target's sizes.

    Args:
        kind: a name of `sage.drafts.registry.KINDS`.
        seed: seed of the weights; None draws from torch's global generator.
        vocabulary: LongTensor [U], increasing target ids of the draft vocabulary, for kinds that have one; None = all.
        config: the kind's options (`DraftKind.keys`); for a head also any size of its configuration class.

    Returns:
        the draft, in the target's dtype and on its device.

    Raises:
        ValueError: unknown kind or config key, or sizes that do not fit the target.
    """
    row = draft_kind(kind)
    if vocabulary is not None and not row.has_vocabulary:
        raise ValueError(f"draft: {kind} has no vocabulary of its own; drop vocabulary, or choose a kind that has one")
    with torch.random.fork_rng(devices=[], enabled=seed is not None):  # weights are drawn on the CPU
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        with torch.device("meta") if target.is_meta else nullcontext():
            draft: Draft = resolve(row.draft).new(target, row, vocabulary, **config)
    return draft


def load_draft(path: str | Path, target: Target, dtype: torch.dtype | None = None) -> Draft:
    """Loads a draft for a target: a trained head, an export of one, or a smaller target of the same family.

    Args:
        path: a run (its best draft), a draft of a run, or the folder of any draft; see `find_draft`.
        dtype: dtype of a smaller target; None = the target's, the only one for a head, which reads the target's features.

    Raises:
        ValueError: no draft there, a corrupt one, a head in another dtype, or one for another target (names both).
    """
    draft = open_draft(path, target, dtype or target.dtype)
    draft.check(target)
    if draft.reads_features and draft.dtype != target.dtype:
        raise ValueError(
            f"draft: {path}: in {draft.dtype}, but it reads the features of a target in {target.dtype}; leave dtype out"
        )
    if draft.reads_features:  # a smaller target is there since `load_target`
        use_huge_pages(draft.network)
    return draft


def open_draft(path: str | Path, target: Target, dtype: torch.dtype) -> Draft:
    """`load_draft` for training, which keeps a head in float32 beside a target in bfloat16: in any dtype, also for another
    form of the target (quantized at load, with an adapter).
    """
    folder = find_draft(path)
    if not target.is_meta:
        refuse_corrupt_draft(folder)
    kind = kind_of_folder(folder)
    if kind is None:
        exported: Draft = importer().load_export(folder, target)
        exported.network.to(dtype=dtype)
        return exported
    with torch.device("meta") if target.is_meta else nullcontext():
        draft: Draft = resolve(kind.draft).load(folder, target, dtype)
    return draft


def kind_of_folder(folder: Path) -> DraftKind | None:
    """Returns the kind of the draft in a folder, `model` for that of a target; None for an export or a third-party draft.
    Raises ValueError if it is none of these.
    """
    stored = read_config(folder)
    if is_target_folder(folder):
        return next(kind for kind in KINDS.values() if kind.is_target)
    kind = head_kind(stored.get("model_type"))
    if kind is not None and stored.get("target"):
        return kind
    if not importer().is_export(folder):
        raise ValueError(
            f"draft: {folder}: model_type {stored.get('model_type')!r} is neither a draft of this package nor an EAGLE-3 draft"
        )
    return None


def check_draft(draft: Draft, target: Target, pruning: Pruning = KEEP_ALL) -> None:
    """Raises ValueError if the draft was made for another target, naming both, or cannot read a pruned prompt."""
    draft.check(target)
    if pruning.ratio and draft.compressor_kind is not None:
        raise ValueError(
            f"pruning.ratio: {pruning.ratio}; allowed: 0 for a draft with a compressor ({draft.compressor_kind}), which was "
            f"trained on unpruned images; drop it"
        )
