"""The interface of tree policies. A policy answers "how deep, how wide, stop?" from probabilities and its own history.

Of tokens it sees no more than which of them would end the answer, and it never takes part in acceptance, so a bad policy makes
decoding slow, never wrong.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from sage.costs.tables import Costs
from sage.trees.tree import Drafted, Frontier, Growth, HostGrowth, Outcome


class Policy(ABC):
    """One way to shape draft trees. Policies keep state within a request; `reset` starts a new one.

    Attributes:
        name: the policy's public name.
        candidates: K, how many candidates per node the policy wants to see; 0 = it never drafts.
        max_nodes: the most nodes it verifies, or asks the draft about, in one round, the root included; sizes the caches.
        learns: whether it plans by costs and what comes of its rounds.
        on_host: whether it answers in numbers (`HostGrowth`, and a sequence from `select`), which takes one wait for the device
            per level; else in tensors (`Growth`), and the host never waits.
        costs: what passes and levels cost here; measured when the first request of a policy that learns starts.
    """

    name: ClassVar[str]
    candidates: int
    max_nodes: int
    learns: ClassVar[bool] = False
    on_host: ClassVar[bool] = False
    costs: Costs | None = None

    def reset(self) -> None:  # noqa: B027 (optional hook)
        """Forgets the last request."""

    def begin(self) -> dict[str, float]:
        """Plans a round; returns figures worth logging (`alpha`, `planned_depth`, `width`), which `grow` may add to.

        A new dict for every round: it becomes that round's line of `Stats.rounds_log`.
        """
        return {}

    def wants_draft(self) -> bool:
        """Whether the draft is worth asking in the round just begun."""
        return self.candidates > 0

    @abstractmethod
    def grow(self, frontier: Frontier) -> Growth | HostGrowth | None:
        """Chooses the next level; None ends the drafting without one."""

    def select(self, drafted: Drafted) -> Tensor | Sequence[int] | None:
        """Indices of the drafted nodes to verify, ancestors included; None = all.

        Increasing, or, from a policy on the host, in any order that begins with the root and has parents before children. A
        path that stands first in the tree is kept for less.
        """
        return None

    def explain(self, entry: dict[str, float]) -> str:
        """Why a round was shaped as it was, in a few words; `entry` is that round's line of `Stats.rounds_log`."""
        return ""

    def studies(self) -> bool:
        """Whether `observe` wants this round's labels and timings, which take a little to collect."""
        return self.learns

    def observe(self, outcome: Outcome) -> None:  # noqa: B027 (optional hook)
        """Learns from a verified round."""
