"""The interface of tree policies, their options, and the ranking by path probability that several of them share.

A policy decides depth, width and end of a draft tree from probabilities and its history. It sees no token, except which
candidates end the answer, and takes no part in acceptance. A poor policy makes decoding slow, never wrong.

Ranking is by the probability of the path, descending; ties go to the node that comes first in the tree. A parent always ranks
before its children: it comes first, and its probability is at least theirs (a factor never exceeds 1, and rounding is monotone,
so fl(x * p) <= x). Every prefix of the order is therefore a tree, with or without ties.

Shapes: F frontier nodes, K candidates per node, M selected.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from typing import Any, ClassVar

from sage.costs.tables import Costs
from sage.io.ranges import FieldError, check_fields, field_types
from sage.planning.tree import Frontier, NextLevel, RoundOutcome


class Policy(ABC):
    """Shapes the draft trees of one request at a time; `reset` starts a new request.

    A policy with options is a `dataclass(eq=False, kw_only=True)` whose fields are the options;
    `__post_init__` checks them and sets the attributes below.

    Attributes:
        name: name of the policy and of its module.
        num_candidates: K, candidates per node that the policy needs; 0 = it never drafts.
        tree_capacity: upper bound of the nodes verified or expanded in one round, root included; sizes the caches.
        needs_costs: whether it plans with measured costs and learns from its rounds.
        costs: cost tables of this machine; read from disk or measured when the first request starts if `needs_costs`.
        fresh_costs: whether to measure them although they are on disk.
    """

    name: ClassVar[str]
    num_candidates: int
    tree_capacity: int
    needs_costs: ClassVar[bool] = False
    costs: Costs | None = None
    fresh_costs: bool = False

    def __post_init__(self) -> None:
        check_values(self)

    def reset(self, is_coupled: bool = False) -> None:  # noqa: B027 (optional hook)
        """Clears the state of the last request.

        Args:
            is_coupled: whether the candidates of the next request are scored with the noise of the target's draws: their
                numbers are then scores, not acceptance probabilities (`sage.decoding.verify`).
        """

    def for_request(self) -> Policy:
        """Returns a policy with the same options for one of several requests that are decoded at the same time."""
        return copy.deepcopy(self)

    def share(self, rows: int, requests: int) -> None:  # noqa: B027 (optional hook)
        """Announces that the next round shares its passes with those of other requests.

        Args:
            rows: nodes that the other requests verify in a round.
            requests: number of requests, this one included.
        """

    def observe_together(self, requests: int, tokens: int, seconds: float) -> None:  # noqa: B027 (optional hook)
        """Learns from a whole round of requests that all have policies of this class; called for one of them."""

    def begin(self) -> None:  # noqa: B027 (optional hook)
        """Starts a round."""

    def should_draft(self) -> bool:
        """Returns whether the draft should run in this round."""
        return self.num_candidates > 0

    def num_candidates_at(self, level: int) -> int:
        """Returns the candidates per node that the policy needs at a level (1 = below the root) of this round: at most
        `num_candidates`, and no more than at the level before.
        """
        return self.num_candidates

    @abstractmethod
    def next_level(self, frontier: Frontier) -> NextLevel | None:
        """Chooses the nodes of the next level; None ends the drafting without a level."""

    def select(self) -> Sequence[int] | None:
        """Returns the indices of the drafted nodes to verify; None = all.

        Nodes are numbered as they were picked, the root is 0. Any order is allowed that begins with the root and has parents
        before children; keeping an accepted path in the cache is cheaper the earlier its nodes are.
        """
        return None

    def explain(self, entry: dict[str, float]) -> str:
        """Returns the reason for the shape of a round's tree in a few words; `entry` is its entry of `Stats.rounds_log`."""
        return ""

    def calibration(self) -> Callable[[list[float], int], list[float]] | None:
        """Returns the function by which this round is planned: from the draft's probabilities below a node, descending, and the
        depth of the candidates to their acceptance probabilities; None if the draft's own are used. Later learning does not
        change it.
        """
        return None

    def needs_feedback(self) -> bool:
        """Returns whether `observe` uses labels and timings of this round, which take time to collect."""
        return self.needs_costs

    def observe(self, outcome: RoundOutcome) -> dict[str, float]:
        """Learns from a verified round; returns figures of its plan for `Stats.rounds_log`."""
        return {}


class OptionError(ValueError):
    """An option that is unknown or has a value that is not allowed; `problem` holds value, what is allowed and remedy."""

    def __init__(self, policy: str, option: str, problem: str) -> None:
        super().__init__(f"policy.{policy}.{option}: {problem}")
        self.policy, self.option, self.problem = policy, option, problem

    def under(self, prefix: str) -> str:
        """Returns the message with the option's dotted key under `prefix`, for example `decode.options`."""
        return f"{prefix}.{self.policy}.{self.option}: {self.problem}"


def defaults(kind: type) -> dict[str, Any]:
    """Returns the options of a policy class with their default values."""
    if not is_dataclass(kind):
        return {}
    values = {field.name: field.default for field in fields(kind) if field.init}
    assert MISSING not in values.values(), f"every option of {kind.__name__} needs a default"
    return values


def check_names(kind: Any, options: Sequence[str]) -> None:
    """Raises OptionError with the first of `options` that a policy class does not have, and the known ones."""
    known = defaults(kind)
    for option in options:
        if option not in known:
            raise OptionError(kind.name, option, f"unknown option; choose from {', '.join(known) or 'none'}")


def check_values(policy: Any) -> None:
    """Checks every option of a policy against its annotation; text becomes the member of an enum. Raises OptionError with the
    option, the value and what is allowed.
    """
    if not is_dataclass(type(policy)):
        return
    try:
        check_fields(policy)
    except FieldError as error:
        raise OptionError(policy.name, error.key, f"{error.value!r} is not allowed; {error.allowed}") from None
    for option in defaults(type(policy)):
        hint = field_types(type(policy))[option]
        if isinstance(hint, type) and issubclass(hint, StrEnum):
            setattr(policy, option, hint(getattr(policy, option)))


def best(probs: Sequence[float], count: int) -> list[int]:
    """Returns the indices of the `count` largest numbers, increasing."""
    indices = range(len(probs))
    if count >= len(probs):
        return list(indices)
    return sorted(sorted(indices, key=probs.__getitem__, reverse=True)[:count])  # stable: ties keep their order


def best_children(
    rows: Sequence[Sequence[float]], paths: Sequence[float], count: int, above: float = -1.0
) -> tuple[list[int], list[float]]:
    """Returns the `count` most probable paths among the children of the frontier nodes.

    Args:
        rows: [F, K], as in `Frontier`.
        paths: [F], path probabilities of the frontier nodes.
        above: paths that are not more probable are left out.

    Returns:
        `NextLevel.picks` [M], increasing, and their path probabilities [M]; M <= min(count, F * K).
    """
    picks: list[int] = []
    children: list[float] = []
    first = 0
    for path, probs in zip(paths, rows, strict=True):
        for pick, prob in enumerate(probs, first):
            child = path * prob
            if child <= above:  # as are all further ones
                break
            picks.append(pick)
            children.append(child)
        first += len(probs)
    if len(children) > count:
        kept = best(children, count)
        picks, children = [picks[i] for i in kept], [children[i] for i in kept]
    return picks, children
