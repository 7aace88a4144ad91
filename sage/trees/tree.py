"""The draft tree as flat arrays, and what policies see of it.

Shapes: N tree nodes (node 0 is the root), F frontier nodes, K candidates per node, E rows of candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sage.stats import RoundTimes

_NOT_ASKED, _NOTHING_SAID = torch.empty(0, dtype=torch.long), torch.empty(0, 0)


@dataclass
class Tree:
    """A draft tree; parents stand before children.

    Attributes:
        tokens: LongTensor [N].
        parents: LongTensor [N]; -1 for the root.
        depths: LongTensor [N]; 0 for the root.
        num_levels: levels drafted; the tree is at most this deep.
        drafted: LongTensor [N], the node's row in `candidates`, -1 where the draft was not asked. This and the next two are
            empty for a policy that does not look back.
        candidates: [E, K], the draft's K largest probabilities below each drafted node, descending; rows that no node names
            mean nothing.
        candidate_tokens: LongTensor [E, K], their tokens.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    num_levels: int = 0
    drafted: Tensor = _NOT_ASKED
    candidates: Tensor = _NOTHING_SAID
    candidate_tokens: Tensor = _NOTHING_SAID

    @classmethod
    def of_root(cls, token: Tensor) -> Tree:
        """The tree of one node. `token`: LongTensor [1]."""
        minus_one = torch.full_like(token, -1)
        return cls(token, minus_one, minus_one + 1, drafted=minus_one)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return int(self.depths[-1])

    def said_so(self, chosen: Tensor) -> Tensor:
        """[N, K], 1 where a candidate below a node is the token `chosen` [N] there, else 0; for nodes that were asked about."""
        return (self.candidate_tokens[self.drafted] == chosen[:, None]).float()

    @property
    def ancestors(self) -> Tensor:
        """BoolTensor [N, N], row n True at n and its ancestors.

        Paths of up to 2^i steps are those of up to 2^(i-1) steps, twice: a few small products instead of a walk per level.
        """
        if len(self) == 1:
            return torch.ones(1, 1, dtype=torch.bool, device=self.tokens.device)
        reach = torch.eye(len(self), device=self.tokens.device)
        reach.scatter_(1, self.parents.clamp(min=0)[:, None], 1.0)
        for _ in range(max(self.num_levels - 1, 0).bit_length()):
            reach = (reach @ reach).clamp_(max=1.0)
        return reach > 0


class Frontier:
    """What a policy sees before a level is added.

    Args:
        level: depth of the nodes to be chosen; 1 = below the root.
        probs: [F, K], the draft's K largest probabilities below each frontier node, descending.
        path_probs: [F], or how to compute it: not every policy looks at it.
        find_ends: how to find the candidates that end the answer, row * K + rank each; None where nothing does.
    """

    def __init__(
        self,
        level: int,
        probs: Tensor,
        path_probs: Tensor | Callable[[], Tensor],
        find_ends: Callable[[], Collection[int]] | None = None,
    ) -> None:
        self.level, self.probs = level, probs
        self._path_probs, self._find_ends = path_probs, find_ends

    @cached_property
    def path_probs(self) -> Tensor:
        """[F], the product of probabilities down to each frontier node."""
        return self._path_probs if isinstance(self._path_probs, Tensor) else self._path_probs()

    @cached_property
    def ends(self) -> Collection[int]:
        """Candidates, row * K + rank, that end the answer: nothing below them is ever emitted. Waits for the device."""
        return self._find_ends() if self._find_ends else ()


@dataclass
class Growth:
    """A policy's answer: which candidates become nodes, and which of those the draft is asked about next.

    Both name candidates as row * K + rank: a frontier row, and the rank among that row's K candidates.

    Attributes:
        picks: LongTensor [M], increasing, the new nodes.
        expand: LongTensor [X], increasing, some of `picks`; empty ends the drafting.
    """

    picks: Tensor
    expand: Tensor


class HostGrowth(NamedTuple):
    """`Growth` as numbers, from a policy that plans on the host; all levels of one round come in the same way."""

    picks: Sequence[int]
    expand: Sequence[int]


def numbers(chosen: Tensor | Sequence[int]) -> Sequence[int]:
    """What a policy chose, on the device or on the host, as numbers."""
    return chosen.tolist() if isinstance(chosen, Tensor) else chosen


class Drafted(Protocol):
    """What a policy sees once all levels are there: how many nodes, and how probable each path is.

    Attributes:
        path_probs: [N], the product of the draft's probabilities from the root down; 1 for the root.
    """

    @property
    def path_probs(self) -> Tensor: ...

    def __len__(self) -> int: ...


@dataclass
class Outcome:
    """What a policy learns after a round.

    Attributes:
        accepted: number of drafted tokens accepted (without the bonus token).
        tree: the verified tree.
        path: LongTensor [accepted + 1], the accepted nodes, the root first.
        context: tokens the target had cached before the round.
        labels: for policies that learn, and to be called when they do: [N, K], the target's verdict on what the draft said
            below each verified node; greedy 1 or 0, sampling the candidate's target probability. Rows of nodes that the draft
            was not asked about mean nothing. None where it was not asked at all.
        times: for policies that learn: this round's timings.
    """

    accepted: int
    tree: Tree
    path: Tensor
    context: int = 0
    labels: Callable[[], Tensor] | None = None
    times: RoundTimes = field(default_factory=RoundTimes)
