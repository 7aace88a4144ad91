"""What the tests of passes decode with: draft heads, whole answers, single passes over a chain."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.models import make_inputs, random_draft
from torch import Tensor, nn

import sage
from sage.planning.tree import Columns, Tree
from sage.runtime import compiled, executors
from sage.runtime.cache import TreeCache
from sage.runtime.captured import Capture, Captured
from sage.runtime.compiled import Compiled
from sage.runtime.modes import PassMode
from sage.runtime.pass_function import EAGER, Executor, PassFunction, PassInputs, Run, argument
from sage.targets import Features
from sage.targets.tree_passes import TreePasses


def slow_except(quick: Sequence[Any], names: Sequence[Any]) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`, of which those not in `quick` are marked slow."""
    return [
        name if name in quick else pytest.param(*(name if isinstance(name, tuple) else (name,)), marks=pytest.mark.slow)
        for name in names
    ]


def head(target: sage.Target, *args: Any, **options: Any) -> Any:
    return random_draft(target, *args, **options).eval()


def call_again(function: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], object], Sequence[Tensor]]:
    """Callable[[], object]s by calling the function again, into the same results: `cuda_graph` for devices without graphs."""
    outputs = [result.clone() for result in function()]

    def replay() -> None:
        for static, result in zip(outputs, function(), strict=True):
            static.copy_(result)

    return replay, outputs


def capture_with(monkeypatch: pytest.MonkeyPatch, capture: Capture) -> None:
    """Captures passes of target and draft with another function than `cuda_graph`, which needs a GPU."""
    for mode in (PassMode.captured, PassMode.auto):
        monkeypatch.setitem(executors._EXECUTORS, mode, Captured(capture, mode is PassMode.auto))


class Uncompiled(Compiled):
    """Runs functions as they are, with what a compiled one assumes: contiguous arguments. `num_bound` counts the functions."""

    num_bound = 0

    def bind(self, function: PassFunction) -> Run:
        self.num_bound += 1

        def run(inputs: PassInputs) -> Any:
            assert all(tensor.is_contiguous() for tensor in inputs.flat())
            return function.compute(inputs)

        return run


@dataclass(kw_only=True)
class LayerInputs(PassInputs):
    x: Tensor = argument(3, 4, dtype=None)


class LayerPass(PassFunction):
    """A linear layer as a pass without dynamic sizes."""

    def __init__(self, depends_on: str) -> None:
        super().__init__("target", ("a layer", "a layer"), LayerInputs, {}, torch.float32, [(3, 4)], depends_on)
        self.layer = nn.Linear(4, 4)

    def compute(self, inputs: LayerInputs) -> tuple[Tensor, ...]:
        return (self.layer(inputs.x),)


def quick_wrappers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles the code around the kernels without optimization."""
    monkeypatch.setitem(compiled.OPTIONS, "aot_inductor.compile_wrapper_opt_level", "O0")


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> Uncompiled:
    """Runs the functions of compiled passes, not compiled; returns their executor."""
    executor = Uncompiled()
    monkeypatch.setitem(executors._EXECUTORS, PassMode.compiled, executor)
    return executor


def tree_pass(
    target: sage.Target,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    visible: torch.Tensor,
    cache: TreeCache,
    executor: Executor = EAGER,
) -> Features:
    """The features of a pass over a tree, by default an eager one."""
    with torch.no_grad():
        return TreePasses(target, (), executor)(tokens, positions, visible, cache).features


def answer(target: sage.Target, draft: Any, passes: PassMode, policy: str, **options: Any) -> tuple[list[int], list[Any]]:
    """Returns tokens, and the shape and outcome of every tree."""
    target.passes = passes
    inputs = make_inputs(target)
    inputs = {key: value.to(target.dtype) if value.is_floating_point() else value for key, value in inputs.items()}
    out = sage.generate(target, None if policy == "autoregressive" else draft, inputs, policy, max_new_tokens=20, **options)
    return out.tokens.tolist(), [(row["nodes"], row["depth"], row["accepted"]) for row in out.stats.rounds_log]


def run_chain(passes: Any, cache: Any, nodes: int) -> Any:
    depths = list(range(nodes))
    tree = Tree.of(Columns([2 + depth for depth in depths], [depth - 1 for depth in depths], depths))
    with torch.inference_mode():
        return passes(tree.tokens, cache.length + tree.depths, tree.ancestors, cache)
