"""Trees and policies against examples computed by hand."""

import pytest
import torch
from support.messages import refused
from support.toy_helpers import SlowTree, draft_with, paths_of, tree_of

import sage
from sage.decoding.verify import accept
from sage.planning.base import Policy
from sage.planning.tree import Frontier, RoundOutcome
from sage.trees.sage import round_half_up
from sage.trees.static import STATIC_TREE

GEOMETRIC = [0.5**i for i in range(1, 13)]


def grow_fully(policy: Policy, probs: list[float]) -> SlowTree:
    """Runs a policy with a draft that proposes `probs` at every node."""
    return draft_with(policy, lambda _: probs)[0]


def test_acceptance() -> None:
    """Root chooses 3 (a child), that chooses 3 (a child), that chooses 0 (no child): two accepted, 0 is the bonus."""
    tree = tree_of([(1,), (3,), (3, 3), (3, 1)])
    assert accept(tree, [3, 0, 3, 0, 2]) == ([0, 2, 3], [3, 3, 0])
    assert accept(tree_of([(1,)]), [2, 0]) == ([0], [2])


class TestSageEquations:
    def test_confidence_renormalizes_the_top_k(self) -> None:
        """p = (.5, .25, .15, .1), k = 2: p~ = (2/3, 1/3), H = .6365, alpha = 1 - .6365 / ln 2 = .0817."""
        logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
        assert float(sage.trees.sage.confidence(logits, 2)) == pytest.approx(0.0817042, abs=1e-6)

    def test_confidence_of_numbers_equals_that_of_tensors(self) -> None:
        for logits in (torch.randn(50, 10, generator=torch.Generator().manual_seed(0)) * scale for scale in (0.1, 3.0, 60.0)):
            slow = sage.trees.sage.confidence(logits.double(), 10)
            quick = [sage.trees.sage.confidence_of(row) for row in logits.double().softmax(-1).tolist()]
            torch.testing.assert_close(torch.tensor(quick, dtype=torch.float64), slow)

    def test_depth_width_level_width_and_threshold(self) -> None:
        assert sage.trees.sage.depth(0.5, 3, 8) == 5.5
        assert sage.trees.sage.width(0.25, 2, 10) == 8.0
        assert sage.trees.sage.level_width(8.0, 2, 0.25) == 3.0
        assert sage.trees.sage.prune_threshold(3, 6.0) == pytest.approx(0.05)

    @pytest.mark.parametrize(("value", "rounded"), [(2.5, 3), (2.49, 2), (3.5, 4), (0.2, 1)])
    def test_rounding_is_half_up_and_at_least_one(self, value: float, rounded: int) -> None:
        assert round_half_up(value) == rounded


class TestSagePolicy:
    def test_first_round_is_the_static_tree_with_alpha_one_half(self) -> None:
        policy = sage.policy("sage")
        assert paths_of(grow_fully(policy, GEOMETRIC))[1:] == list(STATIC_TREE)
        policy.reset()
        policy.begin()
        assert policy.plan.alpha == 0.5

    def test_second_round_by_hand(self) -> None:
        """alpha = 1 plans D = 8, W = 2, after probabilities (.9, .1): widths 2*1.5=3->2 children at level 1 (k = 2), then by
        (12) W_2 = 2/2 * (.5 + .9) = 1.4 -> 1 and (.5 + .1) = .6 -> 1; threshold .1 * l / 8."""
        policy = sage.policy("sage", top_k=2, history=False)
        policy.reset()
        policy._is_first = False
        policy.alpha = 1.0
        policy.begin()
        assert (policy.plan.depth, policy.plan.width) == (8.0, 2.0)
        assert policy.next_level(Frontier(1, [[0.9, 0.1]])) == ([0, 1], [0, 1])  # row * 2 + rank
        second = policy.next_level(Frontier(2, [[0.9, 0.1]] * 2))
        assert second == ([0, 2], [0, 2])  # .81 and .09 are both above .1 * 2 / 8 = .025
        third = policy.next_level(Frontier(3, [[0.9, 0.1], [0.2, 0.1]]))
        assert third.expand == [0]  # .09 * .2 = .018 is below .0375

    def test_node_threshold_ignores_the_path(self) -> None:
        policy = sage.policy("sage", top_k=2, history=False, threshold="node")
        policy._is_first = False
        policy.begin()
        policy.plan.paths = [0.01]
        assert policy.next_level(Frontier(3, [[0.2, 0.1]])).expand == [0]

    def test_nothing_is_drafted_below_a_token_that_ends_the_answer(self) -> None:
        policy = sage.policy("sage", top_k=2, history=False)
        policy._is_first = False
        for ends, expected in (([], [0, 1]), ([0], [1])):
            policy.begin()
            assert policy.next_level(Frontier(1, [[0.6, 0.4]], ends.copy)).expand == expected

    def test_depth_ends_the_drafting_and_the_budget_limits_the_nodes(self) -> None:
        for budget in (2, 5, 17):
            policy = sage.policy("sage", max_nodes=budget, alpha_from="current")
            tree = grow_fully(policy, GEOMETRIC)
            assert len(tree) - 1 <= budget
        deep = grow_fully(sage.policy("sage", alpha_from="current", min_depth=4, max_depth=4), [0.99, *[1e-4] * 9])
        assert deep.depth == 4

    def test_alpha_is_taken_at_the_last_accepted_node(self) -> None:
        policy = sage.policy("sage", top_k=2, history=False)
        tree = grow_fully(policy, GEOMETRIC)
        node = 5  # path (0, 0), which the static tree expands
        tree.draft_topk = list(tree.draft_topk)
        tree.draft_topk[node] = ([0.3, 0.3, 0.1], [0, 1, 2])  # equal probabilities of the k = 2 candidates
        policy.observe(RoundOutcome(2, tree, [0, 1, node]))
        assert policy.alpha == pytest.approx(0.0, abs=1e-6)
        leaf = len(tree) - 1
        policy.observe(RoundOutcome(5, tree, [0, 1, node, leaf]))
        assert policy.alpha == pytest.approx(0.0, abs=1e-6)  # a leaf is not expanded: alpha is taken at its parent

    def test_history_moves_the_ceiling_by_one_within_bounds(self) -> None:
        policy = sage.policy("sage", window=1, max_depth_ceiling=9)
        tree = grow_fully(policy, GEOMETRIC)

        def after(accepted: int, times: int) -> int:
            for _ in range(times):
                policy.observe(RoundOutcome(accepted, tree, [0]))
            return policy.ceiling

        assert after(3, 4) == 8  # between the thresholds nothing moves
        assert after(4, 1) == 9
        assert after(4, 5) == 9
        assert after(1, 1) == 8
        assert after(0, 20) == 3


class TestOtherPolicies:
    def test_static_tree_is_that_of_the_paper(self) -> None:
        tree = grow_fully(sage.policy("static"), GEOMETRIC)
        assert sorted(paths_of(tree)[1:]) == sorted(STATIC_TREE)
        assert tree.depths.bincount().tolist() == [1, 4, 8, 8, 3, 2]

    def test_static_rejects_a_path_without_its_prefix(self) -> None:
        with refused("policy.static.paths", "(1, 0)"):
            sage.policy("static", paths=[(0,), (1, 0)])

    def test_unknown_names_and_options_are_named(self) -> None:
        with refused("policy", "'sgae'", "autoregressive"):
            sage.policy("sgae")
        with refused("policy.chain.depht", "depth"):
            sage.policy("chain", depht=3)
