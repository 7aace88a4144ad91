"""Counterfactual replay: what would other policies have achieved on the same drafts?

The output of a decode does not depend on the policy. So one decode with a wide policy, recorded, judges every other one: at
each of its rounds the other policy grows a tree from the recorded candidates, and the answer, which is known by now, says how
much of that tree the target would have accepted. Neither model runs.

A policy may ask about nodes that the recording did not. There it is told that the draft has no idea, which can only make it
look worse; how often that happened is part of the result.

Owns: replaying, and the figures of a replay. Does not own: recording (sage.replay.recording), what a round costs (sage.costs).

Shapes: F frontier nodes, K candidates.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sage.costs.tables import Costs
from sage.costs.timing import RoundTimes
from sage.host_tensors import CPU
from sage.replay.recording import Candidates, Path, RecordedRound, Recording
from sage.trees import Policy, RoundOutcome, Tree, new_builder
from sage.verify import Verdict

NO_TOKEN = -1  # matches no drafted token


@dataclass
class ReplayedRound:
    """What one policy would have done in one round.

    Attributes:
        accepted: drafted tokens that the target would have kept.
        emitted: tokens of the round, the bonus token included where the answer goes on.
        nodes, depth: of the verified tree, the root not counted.
        widths: nodes of each draft pass, the re-synchronisation (1) included.
        asked, unknown: nodes the draft was asked about, and how many of them were not recorded.
        is_cut: the accepted path ended at a node that was asked about and not recorded, so `accepted` is a lower bound.
    """

    accepted: int
    emitted: int
    nodes: int
    depth: int
    widths: list[int]
    asked: int
    unknown: int
    is_cut: bool


@dataclass
class Replayed:
    """One policy over all rounds of some recordings; `seconds` is None without cost tables."""

    policy: str
    rounds: list[ReplayedRound] = field(default_factory=list)
    seconds: float | None = None

    def summary(self) -> dict[str, float]:
        """Figures for a report, on the recorded rounds' starts.

        `coverage` is the share of the nodes asked about that were recorded, `cut` the share of rounds whose accepted length
        is a lower bound; `tokens_per_s` follows from the cost tables and is left out without them.
        """
        count = max(len(self.rounds), 1)
        emitted = sum(one.emitted for one in self.rounds)
        asked = sum(one.asked for one in self.rounds)
        figures = {
            "rounds": len(self.rounds),
            "mean_accepted_draft": sum(one.accepted for one in self.rounds) / count,
            "tokens_per_target_pass": emitted / count,
            "nodes_per_round": sum(one.nodes for one in self.rounds) / count,
            "depth": sum(one.depth for one in self.rounds) / count,
            "draft_steps_per_round": sum(len(one.widths) for one in self.rounds) / count,
            "coverage": 1 - sum(one.unknown for one in self.rounds) / asked if asked else 1.0,
            "cut": sum(one.is_cut for one in self.rounds) / count,
        }
        return figures if self.seconds is None else figures | {"tokens_per_s": emitted / self.seconds if emitted else 0.0}


def replay(recordings: Sequence[Recording], policy: Policy, costs: Costs | None = None) -> Replayed:
    """Lets a policy shape the trees of recorded decodes.

    Args:
        recordings: in the order in which a policy that learns is to see them.
        policy: fresh; it keeps what it learns. One that plans by costs gets a copy of `costs`.
        costs: predict times; None leaves them out.

    Raises:
        ValueError: a policy that plans by costs, and none are given.
    """
    if policy.needs_costs:
        if costs is None:
            raise ValueError(f"replay: the policy {policy.name!r} plans by costs; give the cost tables of the machine")
        policy.costs = copy.deepcopy(costs)
    found = Replayed(policy.name, seconds=None if costs is None else 0.0)
    for recording in recordings:
        policy.reset()
        unread = 0
        for recorded in recording.rounds:
            one, unread = _Round(recording, recorded, policy, costs).run(unread)
            found.rounds.append(one)
            if costs is not None and found.seconds is not None:
                found.seconds += _seconds(one, costs, recording.prompt_tokens + recorded.position - 1)
    return found


def _seconds(one: ReplayedRound, costs: Costs, context: int) -> float:
    return costs.verify_s(one.nodes + 1, context) + sum(costs.draft(width) for width in one.widths) + costs.overhead


class _Round:
    """One recorded round under another policy: the decoder's round with tables in place of models."""

    def __init__(self, recording: Recording, recorded: RecordedRound, policy: Policy, costs: Costs | None) -> None:
        self.answer = recording.tokens[recorded.position :]  # what the target says from here on
        self.root = recording.tokens[recorded.position - 1]
        self.room = recording.max_new_tokens - recorded.position
        self.context = recording.prompt_tokens + recorded.position - 1
        self.said, self.vocabulary, self.eos = recorded.said, recording.vocabulary, recording.eos
        self.policy, self.costs = policy, costs
        self.widths: list[int] = []
        self.asked = 0
        self.unknown: set[Path] = set()

    def run(self, unread: int) -> tuple[ReplayedRound, int]:
        """The round's figures; `unread` counts the rounds since the draft last read what was accepted, before and after."""
        self.policy.begin()
        is_drafting = unread == 0 or self.policy.should_draft()
        if is_drafting and unread:
            self.widths.append(1)
        tree = self._draft() if is_drafting else Tree.of_root(self.root)
        paths = _paths(tree)
        next_tokens = [self._choice(path) for path in paths]
        if self.policy.needs_feedback():
            tree = replace(tree, draft_topk=_along_answer(tree, next_tokens))
        verdict = Verdict.of_tokens(tree, next_tokens)
        path = verdict.path
        accepted = min(len(path) - 1, len(self.answer))
        self.policy.observe(self._outcome(tree, verdict, accepted))
        is_cut = paths[path[-1]] in self.unknown
        emitted = min(accepted + 1, len(self.answer))
        one = ReplayedRound(accepted, emitted, len(tree) - 1, tree.depth, self.widths, self.asked, len(self.unknown), is_cut)
        return one, 1 if is_drafting else unread + 1

    def _choice(self, path: Path) -> int:
        """The target's token after a path that follows the answer; nobody's where it left it, or the answer is over."""
        follows = tuple(self.answer[: len(path)]) == path and len(path) < len(self.answer)
        return self.answer[len(path)] if follows else NO_TOKEN

    def _draft(self) -> Tree:
        """As `sage.decoder.draft_tree`, from what was recorded."""
        builder = new_builder(self.policy, self.root, CPU, self.eos)
        at: list[Path] = [()]
        for level in range(1, self.room):
            probs, tokens = self._candidates(at)
            next_level = self.policy.next_level(builder.open_level(probs, tokens))
            if next_level is None:
                break
            builder.add(next_level)
            if len(next_level.expand) == 0 or level == self.room - 1:
                break
            rows, asked = builder.advance(next_level)
            at = [(*at[row], token) for row, token in zip(rows.tolist(), map(int, asked), strict=True)]
            self.widths.append(len(at))
        return builder.tree(self.policy.select(builder))

    def _candidates(self, paths: Sequence[Path]) -> Candidates:
        """[F, K] each: as recorded, or equal chances of tokens that nobody says."""
        count = min(self.policy.num_candidates, self.vocabulary)
        clueless = torch.full((count,), 1 / self.vocabulary), torch.full((count,), NO_TOKEN)
        self.asked += len(paths)
        self.unknown.update(path for path in paths if path not in self.said)
        rows = [self.said.get(path, clueless) for path in paths]
        assert all(len(probs) >= count for probs, _ in rows), "recorded with fewer candidates than the policy looks at"
        return torch.stack([probs[:count] for probs, _ in rows]), torch.stack([tokens[:count] for _, tokens in rows])

    def _outcome(self, tree: Tree, verdict: Verdict, accepted: int) -> RoundOutcome:
        outcome = RoundOutcome(accepted, tree, verdict.path, self.context)
        if self.policy.needs_feedback():
            assert self.costs is not None
            verify_s = self.costs.verify_s(len(tree), self.context)
            draft = [(width, self.costs.draft(width)) for width in self.widths]
            total_s = verify_s + sum(seconds for _, seconds in draft) + self.costs.overhead
            times = RoundTimes(verify_s, draft, total_s)
            outcome.labels, outcome.times = verdict.labels, lambda: times
        return outcome


def _along_answer(tree: Tree, next_tokens: Sequence[int]) -> list[Any]:
    """`Tree.draft_topk` without the nodes off the answer, whose target tokens, and so labels, are unknown."""
    return [None if token == NO_TOKEN else topk for topk, token in zip(tree.draft_topk, next_tokens, strict=True)]


def _paths(tree: Tree) -> list[Path]:
    """Of every node, the tokens below the root that lead to it."""
    paths: list[Path] = [()]
    for token, parent in zip(tree.columns.tokens[1:], tree.columns.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths
