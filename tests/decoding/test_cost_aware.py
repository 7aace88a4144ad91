"""`cost_aware`: its calibrator against a slow reference and a known distribution, its tree against one worked out by hand."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.messages import refused
from support.models import make_inputs, random_draft
from support.toy_helpers import make_policy, toy_answer, toy_tree
from torch import Tensor

import sage
from sage.costs.calibration import Calibrator
from sage.costs.tables import Costs, Curve
from sage.decoding.settings import Sampling
from sage.decoding.verify import Verdict
from sage.planning.tree import Frontier, RoundOutcome, Tree
from sage.runtime.timing import RoundTimes
from sage.trees.cost_aware import learner as learning
from sage.trees.cost_aware.learner import LEARN_EVERY, ChildMass, Learner, Pace, Prices, labelled_candidates

COUPLED = Sampling(temperature=1.0, seed=3, max_new_tokens=10)
PLAIN = replace(COUPLED, couple=False)


def flat_costs(node: float = 0.1, level: float = 0.5, base: float = 1.0) -> Costs:
    """A pass costs `base` + `node` per node beyond the first, a level `level` whatever its width."""
    return Costs(Curve([1, 2, 64], [base, base + node, base + 63 * node]), Curve([1, 64], [level, level]), context=0)


def random_probs(count: int, ranks: int, seed: int) -> Tensor:
    """[count, ranks] descending probabilities of synthetic drafts, peaked and flat."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, 50, generator=generator) * (1 + 4 * torch.rand(count, 1, generator=generator))
    return logits.softmax(-1).topk(ranks).values


def greedy_labels(probs: Tensor, seed: int) -> Tensor:
    """One-hot [count, ranks]: the target's argmax, a softmax of the draft's log-probabilities twice as sharp."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.multinomial((2 * probs.log()).softmax(-1), 1, generator=generator)
    return torch.zeros_like(probs).scatter_(1, chosen, 1.0)


class TestCalibrator:
    @pytest.mark.parametrize("ranks", [1, 2, 5])
    def test_numbers_give_the_same_as_tensors(self, ranks: int) -> None:
        calibrator, generator = Calibrator(), torch.Generator().manual_seed(1)
        weights = 0.3 * torch.randn(6, generator=generator, dtype=torch.float64) + torch.eye(6)[0]
        calibrator.load_state(calibrator.state() | {"weights": weights.tolist()})
        probs, depths = random_probs(50, ranks, 2), torch.arange(50) % 9 + 1
        predicted = copy.deepcopy(calibrator).learn(probs, depths, torch.zeros_like(probs), torch.ones(50))
        for row, depth, wanted in zip(probs, depths, predicted, strict=True):
            room, kept = 1.0, []
            for probability in wanted.tolist():  # siblings are exclusive
                kept.append(min(probability, room))
                room -= kept[-1]
            assert calibrator.leading(row.tolist(), int(depth), -1.0) == pytest.approx(kept, abs=1e-6)

    @pytest.mark.parametrize("is_wrong", [False, True])
    def test_learns_the_acceptance_of_a_greedy_target(self, is_wrong: bool) -> None:
        """Negative control: labels of the wrong candidates must increase the error on the true ones."""
        calibrator, before, after = Calibrator(), torch.zeros(4), torch.zeros(4)  # errors by rank
        for step in range(60):
            probs, depths = random_probs(40, 4, step), torch.full((40,), 1)
            truth = greedy_labels(probs, 1000 + step)
            predicted = calibrator.learn(probs, depths, truth.flip(1) if is_wrong else truth, torch.ones(40))
            if step >= 20:
                before += (probs - truth).sum(0)
                after += (predicted - truth).sum(0)
        ratio = float(after.abs().sum() / before.abs().sum())
        assert ratio > 2 if is_wrong else ratio < 0.5

    def test_siblings_are_accepted_with_one_at_most(self) -> None:
        """They exclude each other: after 0.9, a second candidate of 0.9 has a tenth left, and a third nothing."""
        accepted = Calibrator().leading([0.9, 0.9, 0.9], 1, 0.0)
        assert accepted[:2] == pytest.approx([0.9, 0.1]) and sum(accepted) == pytest.approx(1.0)

    def test_one_newton_step_is_that_of_a_naive_loop(self) -> None:
        calibrator = Calibrator(prior=3.0, memory=0.9)
        probs, depths, weights = random_probs(7, 3, 5), torch.arange(7) + 1, torch.rand(7)
        labels = greedy_labels(probs, 6)
        hessian, gradient = 3.0 * torch.eye(6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
        for i in range(7):
            for r in range(3):
                p = [min(max(float(v), 1e-5), 1 - 1e-5) for v in probs[i]]
                margin = math.log(p[r]) - math.log(p[0] if r else p[1])
                columns = (math.log(p[r] / (1 - p[r])), 1.0, min(max(margin, -1.5), 1.5), r > 0, r > 1, int(depths[i]) - 1)
                x = torch.tensor([float(column) for column in columns], dtype=torch.float64)
                gradient += float(weights[i]) * (float(labels[i, r]) - p[r]) * x
                hessian += float(weights[i]) * p[r] * (1 - p[r]) * torch.outer(x, x)
        wanted = calibrator.weights + torch.linalg.solve(hessian, gradient)
        calibrator.learn(probs, depths, labels, weights)
        assert torch.allclose(calibrator.weights, wanted, atol=1e-6)

    def test_the_state_of_another_version_is_refused(self) -> None:
        with refused("calibrator", "5"):
            Calibrator().load_state({"weights": [0.0] * 5, "curvature": []})


class TestTree:
    def policy(self, costs: Costs, **options: float) -> Any:
        policy = sage.policy("cost_aware", **{"calibrate": False, **options})
        policy.costs = costs
        policy.reset()
        return policy

    def test_by_hand(self) -> None:
        """lambda = 1.5 tokens per unit of time: before any round the policy assumes 1.5 tokens in an undrafted one.

        A node costs 0.1, so it must be accepted with 0.15 at least; a level costs 0.4, worth 0.6 tokens, and a node of it
        0.15 more.
        """
        policy = self.policy(flat_costs(node=0.1, level=0.4))
        policy.begin()
        chosen = policy.next_level(Frontier(1, [[0.9, 0.06, 0.04]]))
        assert chosen.picks == [0], "0.06 < 0.15"
        # A made-up s of 0.75 before anything is known, and now the 0.9 kept below the root: the next level pays 0.9 * 0.75.
        assert chosen.expand == [], "0.675 < 0.6 + 0.15"
        cheaper = self.policy(flat_costs(node=0.1, level=0.3))
        cheaper.begin()
        chosen = cheaper.next_level(Frontier(1, [[0.9, 0.06, 0.04]]))
        assert chosen.expand == [0], "0.675 > 0.45 + 0.15"
        chosen = cheaper.next_level(Frontier(2, [[0.5, 0.3, 0.1]]))
        assert chosen.picks == [0, 1], "0.9 * 0.1 < 0.15 < 0.9 * 0.3"
        assert chosen.expand == [], "neither 0.45 * 0.75 nor 0.27 * 0.75 more pays for a level"

    @pytest.mark.parametrize(("usual_size", "top_k", "expected"), [(8, 10, 4), (13, 10, 6), (30, 10, 10), (8, 3, 3)])
    def test_narrow_trees_look_at_few_candidates(self, usual_size: float, top_k: int, expected: int) -> None:
        """Half as many as a usual tree has nodes, those that are learned from at least, and all that were allowed at most."""
        policy = self.policy(flat_costs(), top_k=top_k)
        policy.learner.usual_size = usual_size
        policy.begin()
        assert policy.num_candidates_at(1) == policy.num_candidates_at(5) == expected <= policy.num_candidates == top_k

    def test_nothing_is_drafted_below_a_token_that_ends_the_answer(self) -> None:
        """The more probable of two candidates ends the answer: both are verified, only the other is expanded."""
        for sees_ends, expected in ((True, [1]), (False, [0, 1])):
            policy = self.policy(flat_costs(node=0.01, level=0.01), sees_ends=sees_ends)
            policy.begin()
            chosen = policy.next_level(Frontier(1, [[0.6, 0.4]], ends=lambda: [0]))
            assert chosen == ([0, 1], expected)

    def test_the_number_of_verified_nodes_follows_the_cost_curve(self) -> None:
        """A pass of five nodes costs much more than one of four: the fifth node is not verified."""
        steep = Costs(verify=Curve([1, 2, 3, 4, 5], [1, 1.01, 1.02, 1.03, 9.0]), draft=Curve([1, 2], [0.01, 0.01]), context=0)
        policy = self.policy(steep, max_depth=1)
        policy.begin()
        policy.plan.prices = policy.prices._replace(node=0.0)
        chosen = policy.next_level(Frontier(1, [[0.4, 0.2, 0.2, 0.2]]))
        keep = policy.select()
        assert len(chosen.picks) == len(keep) == 4 and keep[0] == 0

    def test_a_second_node_that_does_not_pay_is_not_expanded(self) -> None:
        """Both are verified; a level of two nodes costs a hundred times as much as a level of one."""
        costs = Costs(flat_costs(node=0.01).verify, Curve([1, 2], [0.01, 1.0]), context=0)
        policy = self.policy(costs)
        policy.begin()
        assert policy.next_level(Frontier(1, [[0.6, 0.4]])) == ([0, 1], [0])

    def test_a_tile_of_rows_beyond_the_usual_tree_makes_no_node_dearer(self) -> None:
        """Up to 8 nodes one more costs 0.01, the ninth 5: trees of 8 nodes are priced by what their nodes cost."""
        verify = Curve([1, 2, 8, 9, 64], [1.0, 1.0, 1.06, 6.0, 7.0])
        prices = [Prices.of(1.0, Costs(verify, Curve([1], [0.1]), 0), size, 0.0, 64, 10, [[]]) for size in (2.0, 8.0, 9.0)]
        assert [one.node for one in prices] == pytest.approx([0.01, 0.01, 5 / 7])

    def test_free_rows_do_not_let_a_round_draft_far_more_than_it_verifies(self) -> None:
        """Up to 8 nodes a pass costs the same, and the ninth node is never worth it: what is left out makes nodes dearer."""
        verify = Curve([1, 8, 9, 64], [1.0, 1.0, 100.0, 200.0])
        policy = self.policy(Costs(verify, Curve([1, 10], [0.01, 0.01]), context=0), max_depth=5)
        drafted = []
        for _ in range(80):
            tree, _ = toy_tree(policy, root=(1,), levels=5)
            drafted.append(len(policy.plan.paths))
            assert len(tree) <= 9
            policy.observe(RoundOutcome(1, tree, [0, 1], 0, times=lambda: RoundTimes(1.0, [], 1.1)))
        assert 7 <= drafted[-1] < drafted[0] / 2

    def test_drafting_that_does_not_pay_is_skipped_and_retried(self) -> None:
        policy = self.policy(flat_costs(node=0.1, level=50.0))
        drafted = []
        for _ in range(20):
            policy.begin()
            drafted.append(policy.should_draft())
            policy.observe(RoundOutcome(0, Tree.of_root(0), [0]))
        assert drafted[0] and sum(drafted) < 10 and drafted[16]

    def test_state_is_plain_and_restored(self) -> None:
        policy, other = self.policy(flat_costs()), sage.policy("cost_aware")
        policy.begin()
        policy.observe(RoundOutcome(3, Tree.of_root(0), [0]))
        other.load_state(policy.state())
        assert other.state() == policy.state()
        assert other.prices == policy.prices
        missing = ("usual_size", "left_out")  # in states of earlier versions
        sage.policy("cost_aware").load_state({key: value for key, value in policy.state().items() if key not in missing})


class TestCoupledScores:
    """Candidates scored with the noise of draws have statistics of their own."""

    def test_each_kind_has_its_own_state(self) -> None:
        policy = make_policy("cost_aware", {"max_depth": 3, "top_k": 3})
        toy_answer(policy, PLAIN)
        alone = policy.state()
        assert alone["coupled"] is None and alone["rounds"] > 0
        toy_answer(policy, COUPLED)
        both = policy.state()
        assert both["coupled"]["rounds"] > 0 and both["coupled"]["calibrator"] != alone["calibrator"]
        assert all(both[key] == alone[key] for key in ("calibrator", "mass", "rounds"))
        other = sage.policy("cost_aware", max_depth=3, top_k=3)
        other.load_state(both)
        assert other.state() == both
        toy_answer(other, PLAIN)
        assert other.learner.rounds > both["rounds"] and other.state()["coupled"] == both["coupled"]


class TestLearning:
    """Rounds are learned from in batches; plans depend only on what has been learned."""

    def after(self, rounds: int, **options: float) -> Any:
        policy: Any = make_policy("cost_aware", {"max_depth": 3, "max_nodes": 5, "top_k": 3, **options})
        policy.reset()
        for seed in range(rounds):
            policy.begin()
            tree, _ = toy_tree(policy, root=(seed % 4,))
            verdict = Verdict.of_tokens(tree, [seed % 3] * len(tree))
            times = lambda: RoundTimes(1.1, [(1, 0.01)], 1.2)  # noqa: E731
            policy.observe(RoundOutcome(len(verdict.path) - 1, tree, verdict.path, 9, verdict.labels, times))
        return policy

    def test_at_1_2_4_8_rounds_and_then_in_batches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        learned: list[int] = []
        learn = Learner.learn
        monkeypatch.setattr(Learner, "learn", lambda self, costs: (learned.append(self.rounds), learn(self, costs))[1])
        self.after(3 * LEARN_EVERY)
        assert learned[:4] == [1, 2, 4, 8] and learned[-2:] == [2 * LEARN_EVERY, 3 * LEARN_EVERY]

    def test_a_batch_equals_its_rounds_one_by_one(self) -> None:
        """Prices, masses and costs: equal for single rounds and for a batch (Newton steps of the calibrator differ)."""
        together, one_by_one = self.after(1, calibrate=False), self.after(1, calibrate=False)
        tree, _ = toy_tree(together, root=(1,))
        times = RoundTimes(1.1, [(1, 0.012), (2, 0.02)], 1.2)
        for policy, is_batch in ((together, True), (one_by_one, False)):
            policy.learner.rounds = 10**6 if is_batch else 0
            for accepted in (0, 2, 1):
                outcome = RoundOutcome(accepted, tree, list(range(accepted + 1)), 9, times=lambda: times)
                masses = [(0, 1.0, 0.7), (1, 0.6, 0.9)]
                plan = replace(policy.plan, drafting_s=0.04, masses=masses, left_out=0.0)
                policy.learner.pending.append((outcome, plan))
                if not is_batch:
                    policy._learn()
            policy._learn()
            policy.learner.rounds = 0
        assert together.state() == one_by_one.state()
        assert together.prices == one_by_one.prices

    def test_the_pass_that_starts_a_round_does_not_price_deeper_levels(self) -> None:
        """It reads the accepted tokens and costs four times a level; no level becomes dearer, and every round costs it."""
        policy = self.after(1)
        costs = policy.costs
        assert costs.commit_s is None and costs.first_level_s == costs.draft(1)
        costs.commit_s = 4 * costs.draft(1)
        tree, level_s, first_s = toy_tree(policy, root=(1,))[0], costs.draft(1), costs.commit_s
        for _ in range(200):
            times = RoundTimes(1.1, [(0, 1.2 * first_s), (1, level_s)], 1.2)
            learning.correct_costs(costs, RoundOutcome(1, tree, [0, 1], times=lambda times=times: times))
        assert (costs.draft(1), costs.commit_s) == (pytest.approx(level_s), pytest.approx(1.2 * first_s, rel=1e-3))
        policy._prices.clear()
        policy.begin()
        policy.next_level(Frontier(1, [[0.9, 0.06, 0.04]]))
        assert policy.plan.drafting_s == costs.commit_s

    @pytest.mark.parametrize("context", [0, 400, 4000])
    def test_timings_equal_to_the_tables_correct_nothing(self, context: int) -> None:
        """At any context: the tables include the cost of longer contexts."""
        policy = self.after(0)
        policy.costs.context, policy.costs.verify_per_token = 800, 1e-3
        tree, _ = toy_tree(policy, root=(1,))
        seconds = policy.costs.verify_s(len(tree), context)
        for _ in range(50):
            times = RoundTimes(seconds, [(1, policy.costs.draft(1))], seconds)
            learning.correct_costs(policy.costs, RoundOutcome(1, tree, [0, 1], context, times=lambda times=times: times))
        assert (policy.costs.verify.scale, policy.costs.draft.scale) == pytest.approx((1.0, 1.0))

    def test_labelled_candidates_equal_those_of_a_walk_over_the_trees(self) -> None:
        """Against a slow reference that visits every node and candidate."""
        outcomes = []
        for seed in range(6):
            policy = make_policy("static", {"paths": [(0,), (1,), (0, 0), (0, 2), (0, 0, 1)]})
            tree, _ = toy_tree(policy, root=(seed % 4,))
            choices = [(seed + node) % 4 for node in range(len(tree))]
            verdict = Verdict.of_tokens(tree, choices)
            outcomes.append(RoundOutcome(len(verdict.path) - 1, tree, verdict.path, labels=verdict.labels))
        found = labelled_candidates(outcomes)
        assert found is not None
        rows = []
        for outcome in outcomes:
            labels = iter(outcome.labels(learning.LABELLED_RANKS))
            for node in range(len(outcome.tree)):
                topk = outcome.tree.draft_topk[node]
                if topk is not None:
                    weight = 1.0 if node in outcome.path else learning.OFF_PATH_WEIGHT
                    rows.append((topk[0], int(outcome.tree.depths[node]) + 1, next(labels), weight))
            assert next(labels, None) is None
        for column, expected in zip(found, zip(*rows, strict=True), strict=True):
            torch.testing.assert_close(column, torch.tensor(expected, dtype=column.dtype))
        assert labelled_candidates([RoundOutcome(0, Tree.of_root(0), [0])]) is None

    def test_masses_are_a_table_of_means(self) -> None:
        mass = ChildMass(2, start=0.5, weight=2.0, memory=0.5)
        mass.learn(1, 0.6, 0.9)
        table = mass.table(4)
        assert table[1] == pytest.approx([0.5, 0.5, (0.5 + 0.9) / 2, 0.5, 0.5])
        assert table[0] == table[2] == table[3] == table[4] == [0.5] * 5, "beyond the last row, the last row is repeated"


def test_requests_draft_together_or_not_as_their_rounds_were_faster() -> None:
    """Rounds of eight requests are faster without drafting, those of one with it; trials become rare."""
    speeds = {(8, True): 900.0, (8, False): 1000.0, (1, True): 300.0, (1, False): 200.0}
    policy = sage.policy("cost_aware")
    kinds: dict[int, list[bool]] = {8: [], 1: []}
    for requests in (8, 1):
        for _ in range(1000):
            one = policy.for_request()
            one.share(8 * (requests - 1), requests)
            kinds[requests].append(one.should_draft())
            one.observe_together(requests, 24, 24 / speeds[requests, kinds[requests][-1]])
        assert policy.for_request().should_draft() == (requests == 1)
    assert kinds[8][0] and kinds[8][:100].count(True) < 20 and kinds[8][100:].count(True) < 50
    assert not kinds[1][0] and kinds[1][:100].count(False) < 20


def test_the_draft_reads_the_prompt_when_it_drafts_first(tiny_qwen: sage.Target, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts = iter([False] * 4 + [True] * 100)
    monkeypatch.setattr(Pace, "drafts", property(lambda self: next(drafts)))
    monkeypatch.setattr(Pace, "observe", lambda *_: None)
    inputs, draft, policy = make_inputs(tiny_qwen), random_draft(tiny_qwen), make_policy("cost_aware", {})
    policy._paces[1] = Pace()
    (out,) = sage.generate_batch(tiny_qwen, draft, [inputs], policy, max_new_tokens=16)
    alone = sage.generate(tiny_qwen, draft, inputs, policy=make_policy("cost_aware", {}), max_new_tokens=16)
    assert out.tokens.tolist() == alone.tokens.tolist()
    drafted = [entry["drafted"] > 0 for entry in out.stats.rounds_log]
    assert not any(drafted[:3]) and drafted[3] and out.stats.draft_context > 0
