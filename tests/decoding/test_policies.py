"""EAGLE-2, Spec-LLaVA, TALON and DDD: slow references of each rule, bounds; options of every policy."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.messages import refused
from support.toy_helpers import Draft, draft_with, paths_of

import sage
from sage.planning.base import OptionError, best, best_children, defaults
from sage.trees import policy_class

Ranks = tuple[int, ...]


# -- slow references ------------------------------------------------------------------------------------------------------

WIDTH = 6


def dyadic_draft(seed: int, sharpness: float) -> Draft:
    """Probabilities that are multiples of 1/16: products of five are exact in float32, and ties are frequent."""

    def candidates(path: Ranks) -> list[float]:
        generator = random.Random(f"{seed}{path}")
        sixteenths = [0] * WIDTH
        for _ in range(16):
            sixteenths[int(WIDTH * generator.random() ** sharpness)] += 1
        return sorted((n / 16 for n in sixteenths), reverse=True)

    return candidates


def ranked(probs: dict[Ranks, float], count: int) -> list[Ranks]:
    """Returns the most probable paths; ties go to the shallower, then to the one further left."""
    return sorted(probs, key=lambda path: (-probs[path], len(path), path))[:count]


def children(probs: dict[Ranks, float], parents: list[Ranks], draft: Draft, count: int) -> dict[Ranks, float]:
    return {(*path, rank): probs[path] * p for path in parents for rank, p in enumerate(draft(path)[:count])}


def eagle2_reference(
    draft: Draft, total: int, depth: int, top_k: int, threshold: float = 0.0, check_every: int = 1
) -> set[Ranks]:
    """EAGLE-2's tree, or with a threshold that of DDD."""
    probs, beam = {(): 1.0}, [()]
    for level in range(1, depth + 1):
        new = children(probs, beam, draft, top_k)
        probs |= new
        beam = ranked(new, top_k)
        if level % check_every == 0 and sum(new[path] for path in beam[: total - 1]) < threshold:
            break
    return set(ranked(probs, total))


def spec_llava_reference(draft: Draft, budget: int, branch: int, steps: int, min_confidence: float) -> set[Ranks]:
    probs = children({(): 1.0}, [()], draft, budget)
    kept, expanded = ranked(probs, budget), set[Ranks]()
    for _ in range(steps):
        unexpanded = [path for path in kept if path not in expanded]
        expanded |= set(unexpanded)
        pool = {path: probs[path] for path in kept} | children(probs, unexpanded, draft, branch)
        probs |= pool
        kept = ranked(pool, budget)
    return {()} | {path for path in kept if probs[path] >= min_confidence}


def talon_reference(draft: Draft, total: int, top_k: int, ratio: float, max_depth: int) -> set[Ranks]:
    probs, layer = {(): 1.0}, [()]
    for level in range(1, max_depth + 1):
        new = children(probs, layer, draft, top_k)
        gate = 0.0 if level == 1 else ratio * max(new.values())
        layer = ranked({path: p for path, p in new.items() if p >= gate}, total - len(probs))
        probs |= {path: new[path] for path in layer}
        if len(probs) == total:
            break
    return set(probs)


seeds, sharpnesses = st.integers(0, 10**6), st.sampled_from([0.5, 1.0, 2.0, 5.0])
few = settings(max_examples=30, deadline=None)


def check(name: str, draft: Draft, reference: Callable[..., set[Ranks]], **options: Any) -> None:
    """The tree equals that of the slow reference, and its size and that of the frontiers keep the bound."""
    policy = sage.policy(name, **options)
    tree, expanded = draft_with(policy, draft)
    assert set(paths_of(tree)) == reference(draft, **options)
    assert len(tree) <= policy.tree_capacity
    assert expanded < policy.tree_capacity  # which includes the root


class TestReferences:
    @few
    @given(seeds, sharpnesses, st.integers(2, 25), st.integers(1, 5), st.integers(1, WIDTH))
    @example(0, 1.0, 2, 3, WIDTH)  # fewer nodes than the beam is wide
    def test_eagle2(self, seed: int, sharpness: float, total: int, depth: int, top_k: int) -> None:
        check("eagle2", dyadic_draft(seed, sharpness), eagle2_reference, total=total, depth=depth, top_k=top_k)

    @few
    @given(seeds, sharpnesses, st.integers(2, 20), st.integers(2, 5), st.integers(1, 4), st.floats(0.1, 0.9), st.integers(1, 4))
    def test_ddd(self, seed, sharpness, total, depth, top_k, threshold, check_every):
        options = {"total": total, "depth": depth, "top_k": top_k, "check_every": min(check_every, depth - 1)}
        check("ddd", dyadic_draft(seed, sharpness), eagle2_reference, threshold=threshold, **options)

    @few
    @given(
        seeds, sharpnesses, st.integers(1, WIDTH), st.integers(1, WIDTH), st.integers(0, 4), st.sampled_from([0.0, 1 / 16, 0.2])
    )
    @example(1, 5.0, WIDTH, WIDTH, 4, 0.0)
    def test_spec_llava(self, seed: int, sharpness: float, budget: int, branch: int, steps: int, least: float) -> None:
        options = {"budget": budget, "branch": branch, "steps": steps, "min_confidence": least}
        check("spec_llava", dyadic_draft(seed, sharpness), spec_llava_reference, **options)

    @few
    @given(
        seeds, sharpnesses, st.integers(2, 25), st.integers(1, WIDTH), st.sampled_from([1 / 32, 1 / 4, 0.9]), st.integers(1, 5)
    )
    def test_talon(self, seed: int, sharpness: float, total: int, top_k: int, ratio: float, max_depth: int) -> None:
        options = {"total": total, "top_k": top_k, "ratio": ratio, "max_depth": max_depth}
        check("talon", dyadic_draft(seed, sharpness), talon_reference, **options)

    def test_negative_control_other_options_give_other_trees(self) -> None:
        draft = dyadic_draft(3, 2.0)
        tree, _ = draft_with(sage.policy("eagle2", total=12, depth=4, top_k=3), draft)
        assert set(paths_of(tree)) != eagle2_reference(draft, 12, 4, 2)
        tree, _ = draft_with(sage.policy("talon", total=20, top_k=3, ratio=0.25), draft)
        assert set(paths_of(tree)) != talon_reference(draft, 20, 3, 0.9, 99)


# -- properties ----------------------------------------------------------------------------------------------------------


@few
@given(seeds, st.sampled_from([0.1, 1.0, 10.0, 200.0]), st.integers(1, 40))
def test_the_best_nodes_are_a_tree_for_any_draft(seed: int, scale: float, count: int) -> None:
    """Real softmax output, from flat to so sharp that probabilities are 1 and 0: `subtree` raises if a parent is missing."""

    def draft(path: Ranks) -> list[float]:
        generator = random.Random(f"{seed}{path}")
        logits = torch.tensor([generator.gauss(0, scale) for _ in range(4)])
        return logits.softmax(0).sort(descending=True).values.tolist()

    tree, _ = draft_with(sage.policy("eagle2", total=10**6, depth=4, top_k=4), draft)
    keep = torch.tensor(best(tree.path_probs.tolist(), count))
    assert keep[0] == 0 and bool((keep.diff() > 0).all()) and len(keep) == min(count, len(tree))
    assert len(tree.subtree(keep)) == len(keep)
    assert float(tree.path_probs[keep].sum()) == pytest.approx(float(tree.path_probs.topk(len(keep)).values.sum()), rel=1e-5)


def test_best_children_are_in_tree_order() -> None:
    """.5*(.6 .4) = .30 .20, .3*(.9 .1) = .27 .03: the three best are .30 .20 .27 in tree order."""
    picks, paths = best_children([[0.6, 0.4, 0.0], [0.9, 0.1, 0.0]], [0.5, 0.3], count=3)
    assert picks == [0, 1, 3]  # row * 3 + rank
    assert paths == pytest.approx([0.30, 0.20, 0.27])


# -- options -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        *(("eagle2", "total", value) for value in (1, "60")),
        ("ddd", "threshold", 1.0),
        ("ddd", "check_every", 11),
        ("spec_llava", "min_confidence", 1),
        ("talon", "ratio", 0.0),
        *(("static", "paths", value) for value in ([], [()], [[0], [-1]], [[0], 1], ["0"], [[False]], "00")),
        ("sage", "min_depth", 9),
        ("sage", "min_width", 11),
        ("sage", "history_low", 4),
        ("cost_aware", "memory", 1.5),
    ],
)
def test_bad_values_are_refused(name: str, option: str, value: object) -> None:
    with refused(f"policy.{name}.{option}: {value!r}", error=OptionError):
        sage.policy(name, **{option: value})


def wrong_values(default: object) -> list[object]:
    """Values that no option with a default of this type accepts."""
    if isinstance(default, (str, bool)):
        return ["abc", 1, None]
    return ["abc", "3", True, [3], math.nan, math.inf, -1, *([2.5, 10.0] if isinstance(default, int) else [])]


@pytest.mark.parametrize("name", sage.POLICIES)
def test_every_option_of_every_policy_is_checked(name: str) -> None:
    """Includes what a typing error on a command line gives: a word, text, a fraction, NaN."""
    for option, default in defaults(policy_class(name)).items():
        for value in wrong_values(default):
            with pytest.raises(OptionError) as caught:
                sage.policy(name, **{option: value})
            assert caught.value.under("decode.options").startswith(
                f"decode.options.{name}.{option}: {value!r} is not allowed; "
            )
