"""Which kernel runs the linear layers of a compiled pass: `joint_linear` or torch's, whichever is faster on this machine.

The layers of an exported pass are timed once with both, when the pass is compiled, in the order of the pass and with the
weights of the model, so that what fits into the processor's caches counts as in decoding. Layers of the same input become one
call. The choice is part of the compiled package. Does not own: the kernel (sage.runtime.joint_linear).

Shapes: M rows, K inputs, N outputs of one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sage.io.machine import processor_name
from sage.runtime.joint_linear import DTYPES, JOINT_LINEAR, MAX_WEIGHTS, joint_linear, kernel, kernel_digest
from sage.runtime.timing import TimedCall, interleaved_s

MIN_BYTES = 1_000_000  # of weights; below, calls take longer than products
REPEATS = 9  # the fastest one counts: other processes delay threads that wait for each other
CPU = torch.device("cpu")
LINEAR, SLICE, ADD, CAT = (
    torch.ops.aten.linear.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.add.Tensor,
    torch.ops.aten.cat.default,
)


def kernel_facts(module: nn.Module) -> str | None:
    """Returns a description of the kernel that a compiled pass may contain; None if its linear layers are torch's anyway.

    Loads the kernel: a compiled pass that contains it cannot be loaded before.
    """
    weights = {weight.data_ptr(): weight for weight in module.parameters() if weight.dim() == 2}.values()
    if any(weight.device.type != "cpu" or weight.dtype not in DTYPES for weight in weights):
        return None
    if sum(weight.nbytes for weight in weights) < MIN_BYTES or kernel() is None:
        return None
    return f"{kernel_digest()} {processor_name(CPU)}"


@dataclass
class Layers:
    """Linear layers of the same input in an exported graph."""

    nodes: list[Any]
    weights: list[Tensor]


def choose(program: Any, several_rows: Sequence[int]) -> str:
    """Replaces the linear layers of an exported pass by `joint_linear` if that is faster; returns what was measured.

    Args:
        several_rows: numbers of rows to time if the pass has several.
    """
    groups = _groups(program)
    if not groups:
        return "no linear layers"
    sizes = [size for group in groups for size in group.nodes[0].meta["val"].shape[:-1]]
    counts = (1,) if all(isinstance(size, int) and size == 1 for size in sizes) else several_rows  # others are symbols
    ours, theirs = timings(groups, counts)
    is_faster = ours < theirs
    if is_faster:
        for group in groups:
            _replace(program.graph_module.graph, group)
        program.graph_module.recompile()
    size = sum(weight.nbytes for group in groups for weight in group.weights) / 1e6
    name = "joint_linear" if is_faster else "torch"
    times = f"joint_linear {1e3 * ours:.2f} ms, torch {1e3 * theirs:.2f} ms for {', '.join(map(str, counts))} row(s)"
    return f"linear layers of {size:.1f} MB run by {name}, in place ({times})"


def timings(groups: Sequence[Layers], counts: Sequence[int]) -> tuple[float, float]:
    """Returns the seconds of all layers with `joint_linear` and with torch, summed over numbers of rows (fastest runs)."""
    total = [0.0, 0.0]
    for count in counts:
        inputs = [torch.zeros(count, group.weights[0].shape[1], dtype=group.weights[0].dtype) for group in groups]
        pairs = list(zip(inputs, groups, strict=True))
        threads = torch.get_num_threads()

        def ours(pairs: Any = pairs, threads: int = threads) -> None:
            for x, group in pairs:
                joint_linear(x, group.weights, threads)

        def theirs(pairs: Any = pairs) -> None:
            for x, group in pairs:
                for weight in group.weights:
                    nn.functional.linear(x, weight)

        for place, times in enumerate(interleaved_s([TimedCall(ours), TimedCall(theirs)], REPEATS, CPU)):
            total[place] += min(times)
    return total[0], total[1]


def _groups(program: Any) -> list[Layers]:
    """Returns the linear layers of parameters in the order of the graph, those of one input together."""
    names, found = program.graph_signature.inputs_to_parameters, dict[Any, list[Layers]]()
    for node in program.graph_module.graph.nodes:
        if node.target is not LINEAR or node.args[1].name not in names:
            continue
        weight = program.state_dict[names[node.args[1].name]].detach()
        if weight.dtype not in DTYPES or node.args[0].meta["val"].dtype != weight.dtype:
            continue
        groups = found.setdefault(node.args[0], [])
        if not groups or len(groups[-1].nodes) == MAX_WEIGHTS:
            groups.append(Layers([], []))
        groups[-1].nodes.append(node)
        groups[-1].weights.append(weight)
    return [group for groups in found.values() for group in groups]


def _replace(graph: Any, group: Layers) -> None:
    """Replaces the layers of a group by one call; each result is a part of the call's, plus its bias."""

    def call(target: Any, *args: Any) -> Any:
        node = graph.call_function(target, args)
        values = torch.fx.map_arg(args, lambda arg: arg.meta["val"])
        with values[0].fake_mode:
            node.meta["val"] = target(*values)
        return node

    with graph.inserting_before(group.nodes[0]):
        joint = call(JOINT_LINEAR, group.nodes[0].args[0], [node.args[1] for node in group.nodes], torch.get_num_threads())
    parts, start = [], 0
    for node, weight in zip(group.nodes, group.weights, strict=True):
        end = start + weight.shape[0]
        with graph.inserting_before(node):
            part = joint if len(group.nodes) == 1 else call(SLICE, joint, -1, start, end)
            parts.append(part)
            if len(node.args) > 2 and node.args[2] is not None:
                part = call(ADD, part, node.args[2])
        node.replace_all_uses_with(part)
        graph.erase_node(node)
        start = end
    for user in list(parts[0].users):  # a draft's joined layers
        if user.target is CAT and list(user.args[0]) == parts and user.args[1:] == (-1,):
            user.replace_all_uses_with(joint)
            graph.erase_node(user)
