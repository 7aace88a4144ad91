"""Which kernel runs the linear layers of a compiled pass: `joint_linear` or torch's, whichever is faster on this machine.

The layers of an exported pass are timed once with both, when the pass is compiled, in the order of the pass and with the
weights of the model, so that what fits into the processor's caches counts as in decoding. Layers of the same input become one
call. The choice is part of the compiled package. Does not own: the kernel (sage.runtime.joint_linear).

Shapes: M rows, K inputs, N outputs of one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sage.runtime.joint_linear import JOINT_LINEAR, MAX_WEIGHTS, prepared
from sage.runtime.kernels import DTYPES, Choice, Timings, insert_call
from sage.runtime.timing import fastest_s

REPEATS = 9
LINEAR, SLICE, ADD, CAT = (
    torch.ops.aten.linear.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.add.Tensor,
    torch.ops.aten.cat.default,
)


@dataclass
class Layers:
    """Linear layers of the same input in an exported graph."""

    nodes: list[Any]
    weights: list[Tensor]


def choose(program: Any, several_rows: Sequence[int]) -> Choice:
    """Replaces the linear layers of an exported pass by `joint_linear` if that is faster; returns what was measured.

    Args:
        several_rows: numbers of rows to time if the pass has several.
    """
    groups = _groups(program)
    if not groups:
        return Choice("no linear layers")
    sizes = [size for group in groups for size in group.nodes[0].meta["val"].shape[:-1]]
    counts = (1,) if all(isinstance(size, int) and size == 1 for size in sizes) else several_rows  # others are symbols
    ours, theirs, is_certain = timings(groups, counts)
    is_faster = ours < theirs
    if is_faster:
        for group in groups:
            _replace(program.graph_module.graph, group)
        program.graph_module.recompile()
    size = sum(weight.nbytes for group in groups for weight in group.weights) / 1e6
    name = "joint_linear" if is_faster else "torch"
    times = f"joint_linear {1e3 * ours:.2f} ms, torch {1e3 * theirs:.2f} ms for {', '.join(map(str, counts))} row(s)"
    return Choice(f"linear layers of {size:.1f} MB run by {name}, in place ({times})", is_certain)


def timings(groups: Sequence[Layers], counts: Sequence[int]) -> Timings:
    """Returns the seconds of all layers with `joint_linear` and with torch, summed over numbers of rows and over layers.

    The fastest run of each layer counts.
    """
    threads, ours_s, theirs_s, is_certain = torch.get_num_threads(), 0.0, 0.0, True
    for count in counts:
        inputs = [torch.zeros(count, group.weights[0].shape[1], dtype=group.weights[0].dtype) for group in groups]
        ready = [prepared(x, group.weights, threads) for x, group in zip(inputs, groups, strict=True)]
        ours = [call for _, call in ready]
        theirs = [partial(_linear, x, group.weights) for x, group in zip(inputs, groups, strict=True)]
        found = fastest_s([ours, theirs], REPEATS)
        ours_s, theirs_s = ours_s + sum(found.seconds[0]), theirs_s + sum(found.seconds[1])
        is_certain &= found.is_undisturbed
    return Timings(ours_s, theirs_s, is_certain)


def _linear(x: Tensor, weights: Sequence[Tensor]) -> None:
    for weight in weights:
        nn.functional.linear(x, weight)


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
    with graph.inserting_before(group.nodes[0]):
        weights = [node.args[1] for node in group.nodes]
        joint = insert_call(graph, JOINT_LINEAR, group.nodes[0].args[0], weights, torch.get_num_threads())
    parts, start = [], 0
    for node, weight in zip(group.nodes, group.weights, strict=True):
        end = start + weight.shape[0]
        with graph.inserting_before(node):
            part = joint if len(group.nodes) == 1 else insert_call(graph, SLICE, joint, -1, start, end)
            parts.append(part)
            if len(node.args) > 2 and node.args[2] is not None:
                part = insert_call(graph, ADD, part, node.args[2])
        node.replace_all_uses_with(part)
        graph.erase_node(node)
        start = end
    for user in list(parts[0].users):  # a draft's joined layers
        if user.target is CAT and list(user.args[0]) == parts and user.args[1:] == (-1,):
            user.replace_all_uses_with(joint)
            graph.erase_node(user)
