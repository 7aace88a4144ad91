"""Counterfactual replay: the figures of other policies on the drafts of a recorded decode, without running a model.

The answer of a decode does not depend on the policy. `record` decodes with a wide tree and keeps the draft's candidates at
every expanded node. At each round of a recording, another policy grows a tree from these candidates, and the rest of the answer
shows how much of that tree the target would accept.

A node that the other policy expands and the recording does not cover gets uniform probabilities, which can only lower the
policy's figures; `coverage` reports how often that happens.

Shapes: F frontier nodes, K candidates.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sage.costs.tables import Costs
from sage.decoding.generation import start
from sage.decoding.verify import Verdict
from sage.drafts.draft import Candidates, Draft, DraftSession
from sage.planning.base import Policy
from sage.planning.tree import RoundOutcome, Tree, TreeBuilder
from sage.runtime.host_tensors import CPU, Tokens
from sage.runtime.packing import Pass
from sage.runtime.timing import RoundTimes
from sage.targets import Features, Prompt, Target
from sage.trees import policy as new_policy

TokenPath = tuple[int, ...]  # tokens from below the root to a node
NodeCandidates = tuple[Tensor, Tensor]  # probabilities and target tokens, [K] each, in descending order of probability

WIDE: Mapping[str, Any] = {"total": 64, "depth": 12, "top_k": 10}  # options of `eagle2`, the default policy of a recording


@dataclass
class RecordedRound:
    position: int  # number of answer tokens before the round; the last of them is the root
    candidates: dict[TokenPath, NodeCandidates]  # below every expanded node, by the path to it


@dataclass
class Recording:
    prompt_tokens: int
    max_new_tokens: int
    vocabulary: int  # size of the target's
    tokens: list[int]  # the answer
    rounds: list[RecordedRound]
    eos: tuple[int, ...] = ()
    is_coupled: bool = False  # whether the candidates are scored with the noise of the target's draws
    max_depth: int | None = None  # of the draft's session


class Recorder(DraftSession):
    """A draft session that records `num_candidates` candidates per node of another one, with the scores that policies see."""

    def __init__(self, session: DraftSession, num_candidates: int) -> None:
        self.session, self.num_candidates = session, num_candidates
        self.levels, self.token_map, self.max_depth = session.levels, session.token_map, session.max_depth
        self.rounds: list[dict[TokenPath, NodeCandidates]] = []
        self._frontier: list[TokenPath] = []

    @property
    def context(self) -> int:
        return self.session.context

    def prefill(self, prompt: Prompt, features: Features, root: Tensor) -> Tensor:
        self._start()
        return self.session.prefill(prompt, features, root)

    def commit_pass(self, features: Features, tokens: Tokens) -> Pass | Tensor:
        self._start()
        return self.session.commit_pass(features, tokens)

    def expand_pass(self, rows: Tensor, tokens: Tokens) -> Pass | Tensor:
        self._frontier = [(*self._frontier[row], token) for row, token in zip(rows.tolist(), map(int, tokens), strict=True)]
        return self.session.expand_pass(rows, tokens)

    def propose(self, scores: Tensor, num_candidates: int) -> Candidates:
        probs, tokens = self.session.propose(scores, max(self.num_candidates, num_candidates))
        for path, row in zip(self._frontier, zip(probs.cpu(), tokens.cpu(), strict=True), strict=True):
            self.rounds[-1][path] = row
        return Candidates(probs[:, :num_candidates], tokens[:, :num_candidates])

    def _start(self) -> None:
        self.rounds.append({})
        self._frontier = [()]


def record(
    target: Target, draft: Draft, inputs: Any, policy: str | Policy | None = None, num_candidates: int = 16, **options: Any
) -> Recording:
    """Decodes one prompt and records the draft's candidates; arguments as for `sage.generate`.

    Args:
        policy: a policy with wide trees that drafts in every round; default `eagle2` with the options `WIDE`.
        num_candidates: candidates to record per node; at least `num_candidates` of every policy to replay.
    """
    generation = start(target, draft, inputs, policy=new_policy("eagle2", **WIDE) if policy is None else policy, **options)
    assert generation.request.session is not None, "start refuses a policy that drafts without a draft"
    request = generation.request
    recorder = request.session = Recorder(generation.request.session, num_candidates)
    positions = [len(generation.tokens) for _ in generation.rounds()]  # after the prefill and after each round
    rounds = recorder.rounds[: len(positions) - 1]  # an answer of one token has candidates, but no round
    return Recording(
        prompt_tokens=request.prompt.input_ids.shape[1],
        max_new_tokens=request.stop.max_new_tokens,
        vocabulary=generation.target.vocab_size,
        tokens=list(generation.tokens),
        rounds=[RecordedRound(position, candidates) for position, candidates in zip(positions[:-1], rounds, strict=True)],
        eos=tuple(request.stop.eos),
        is_coupled=request.verifier.sampler.is_coupled,
        max_depth=recorder.max_depth,
    )


NO_TOKEN = -1  # matches no drafted token


@dataclass
class ReplayedRound:
    """Figures of one policy in one round."""

    accepted: int  # drafted tokens that the target accepts
    emitted: int  # tokens of the round, including the bonus token unless the answer ends before it
    nodes: int  # of the verified tree, without the root
    depth: int
    widths: list[int]  # nodes of each draft pass, including the synchronization with the accepted tokens (0)
    expanded: int  # number of expanded nodes
    uncovered: int  # those of them that the recording does not cover
    is_truncated: bool  # the accepted path ends at an uncovered node, so `accepted` is a lower bound


@dataclass
class ReplayResult:
    """One policy over all rounds of some recordings; `seconds` is None without cost tables."""

    policy: str
    rounds: list[ReplayedRound] = field(default_factory=list)
    seconds: float | None = None

    def summary(self) -> dict[str, float]:
        """Returns the figures of a report.

        `coverage` is the share of expanded nodes that the recordings cover, `cut` the share of truncated rounds; `tokens_per_s`
        is predicted from the cost tables and omitted without them.
        """
        count = max(len(self.rounds), 1)
        emitted = sum(round_.emitted for round_ in self.rounds)
        expanded = sum(round_.expanded for round_ in self.rounds)
        figures = {
            "rounds": len(self.rounds),
            "mean_accepted_draft": sum(round_.accepted for round_ in self.rounds) / count,
            "tokens_per_target_pass": emitted / count,
            "nodes_per_round": sum(round_.nodes for round_ in self.rounds) / count,
            "depth": sum(round_.depth for round_ in self.rounds) / count,
            "draft_steps_per_round": sum(len(round_.widths) for round_ in self.rounds) / count,
            "coverage": 1 - sum(round_.uncovered for round_ in self.rounds) / expanded if expanded else 1.0,
            "cut": sum(round_.is_truncated for round_ in self.rounds) / count,
        }
        return figures if self.seconds is None else figures | {"tokens_per_s": emitted / self.seconds if emitted else 0.0}


def replay(recordings: Sequence[Recording], policy: Policy, costs: Costs | None = None) -> ReplayResult:
    """Replays recordings with another policy.

    Args:
        recordings: in the order in which a learning policy sees them.
        policy: keeps what it learns. One that needs costs gets a copy of `costs`; ValueError without `costs`.
        costs: for the prediction of times; None omits them.
    """
    if policy.needs_costs:
        if costs is None:
            raise ValueError(f"replay: the policy {policy.name!r} needs cost tables; measure them with sage.costs.measure")
        policy.costs = copy.deepcopy(costs)
    result = ReplayResult(policy.name, seconds=None if costs is None else 0.0)
    for recording in recordings:
        policy.reset(recording.is_coupled)
        num_unread = 0
        for recorded in recording.rounds:
            replayer = _RoundReplayer(recording, recorded, policy, costs)
            round_, num_unread = replayer.run(num_unread)
            result.rounds.append(round_)
            if costs is not None and result.seconds is not None:
                verify_s = costs.verify_s(round_.nodes + 1, replayer.context)
                result.seconds += verify_s + sum(costs.drafting_s(round_.widths)) + costs.overhead
    return result


class _RoundReplayer:
    """Runs one recorded round with another policy: plan, verify and commit of `sage.decoding.decoder`, without models."""

    def __init__(self, recording: Recording, recorded: RecordedRound, policy: Policy, costs: Costs | None) -> None:
        self.answer = recording.tokens[recorded.position :]
        self.root = recording.tokens[recorded.position - 1]
        self.num_remaining = recording.max_new_tokens - recorded.position
        self.context = recording.prompt_tokens + recorded.position - 1
        self.candidates, self.vocabulary, self.eos = recorded.candidates, recording.vocabulary, recording.eos
        self.policy, self.costs = policy, costs
        self.last_level = min(self.num_remaining - 1, recording.max_depth or self.num_remaining)
        self.widths: list[int] = []
        self.expanded = 0
        self.uncovered: set[TokenPath] = set()

    def run(self, num_unread: int) -> tuple[ReplayedRound, int]:
        """Returns the figures of the round, and the number of rounds that the draft has not read yet, given as `num_unread`."""
        self.policy.begin()
        is_drafting = num_unread == 0 or self.policy.should_draft()
        if is_drafting and num_unread:
            self.widths.append(0)
        tree = self._draft() if is_drafting else Tree.of_root(self.root)
        paths: list[TokenPath] = [()]  # from below the root to every node
        for token, parent in zip(tree.columns.tokens[1:], tree.columns.parents[1:], strict=True):
            paths.append((*paths[parent], token))
        # the target's tokens after paths that follow the answer
        follow = [len(path) < len(self.answer) and tuple(self.answer[: len(path)]) == path for path in paths]
        next_tokens = [self.answer[len(path)] if is_known else NO_TOKEN for path, is_known in zip(paths, follow, strict=True)]
        if self.policy.needs_feedback():
            known = zip(tree.draft_topk, next_tokens, strict=True)  # only nodes whose target token is known are labelled
            tree.draft_topk = [None if token == NO_TOKEN else topk for topk, token in known]
        verdict = Verdict.of_tokens(tree, next_tokens)
        accepted = min(len(verdict.path) - 1, len(self.answer))
        self.policy.observe(self._outcome(tree, verdict, accepted))
        round_ = ReplayedRound(
            accepted=accepted,
            emitted=min(accepted + 1, len(self.answer)),
            nodes=len(tree) - 1,
            depth=tree.depth,
            widths=self.widths,
            expanded=self.expanded,
            uncovered=len(self.uncovered),
            is_truncated=paths[verdict.path[-1]] in self.uncovered,
        )
        return round_, 1 if is_drafting else num_unread + 1

    def _draft(self) -> Tree:
        builder = TreeBuilder(self.root, CPU, self.eos)
        frontier: list[TokenPath] = [()]
        for level in range(1, self.last_level + 1):
            next_level = self.policy.next_level(builder.open_level(*self._propose(frontier, level)))
            if next_level is None:
                break
            builder.add(next_level)
            if len(next_level.expand) == 0 or level == self.last_level:
                break
            rows, tokens = builder.advance(next_level)
            frontier = [(*frontier[row], token) for row, token in zip(rows.tolist(), map(int, tokens), strict=True)]
            self.widths.append(len(frontier))
        return builder.tree(self.policy.select())

    def _propose(self, paths: Sequence[TokenPath], level: int) -> Candidates:
        """Candidates [F, K] below the frontier: recorded ones, or uniform probabilities of tokens that never match."""
        count = min(self.policy.num_candidates_at(level), self.vocabulary)
        uniform = torch.full((count,), 1 / self.vocabulary), torch.full((count,), NO_TOKEN)
        self.expanded += len(paths)
        self.uncovered.update(path for path in paths if path not in self.candidates)
        rows = [self.candidates.get(path, uniform) for path in paths]
        assert all(len(probs) >= count for probs, _ in rows), "the recording has fewer candidates than the policy needs"
        probs, tokens = (torch.stack([row[:count] for row in column]) for column in zip(*rows, strict=True))
        return Candidates(probs, tokens)

    def _outcome(self, tree: Tree, verdict: Verdict, accepted: int) -> RoundOutcome:
        outcome = RoundOutcome(accepted, tree, verdict.path, self.context)
        if self.policy.needs_feedback():
            assert self.costs is not None
            verify_s = self.costs.verify_s(len(tree), self.context)
            draft = list(zip(self.widths, self.costs.drafting_s(self.widths), strict=True))
            total_s = verify_s + sum(seconds for _, seconds in draft) + self.costs.overhead
            times = RoundTimes(verify_s, draft, total_s)
            outcome.labels, outcome.times = verdict.labels, lambda: times
        return outcome
