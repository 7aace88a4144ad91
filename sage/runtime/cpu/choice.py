"""Which kernels run linear layers and attention of a compiled pass: those for few rows or torch's, whichever are faster.

Both are timed once, when the pass is compiled; the choice is part of the compiled package. Linear layers run in the order of
the pass and with the weights of the model, so that what fits into the processor's caches counts as in decoding; layers of the
same input become one call. Attention runs on random keys of the pass's sizes.

Shapes: M rows, K inputs, N outputs of one layer; B batch, H KV heads, R query rows of a KV head, S keys, d head size.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sage.runtime.cpu.kernels import (
    DTYPES,
    FOLDED_ATTENTION,
    JOINT_LINEAR,
    MAX_WEIGHTS,
    MULTIPLE,
    prepared_attention,
    prepared_linear,
)
from sage.runtime.timing import fastest_s

LINEAR_REPEATS, ATTENTION_REPEATS = 9, 50
TIMED_KEYS = 512
ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
LINEAR, SLICE, ADD, CAT = (
    torch.ops.aten.linear.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.add.Tensor,
    torch.ops.aten.cat.default,
)


class Timings(NamedTuple):
    """Seconds with a kernel for few rows and with torch's; certain unless other processes disturbed every run of a call."""

    ours: float
    theirs: float
    is_certain: bool = True


class Choice(NamedTuple):
    """What was chosen and measured, in words, and whether the measurement is certain."""

    text: str
    is_certain: bool = True


@dataclass
class Layers:
    """Linear layers of the same input in an exported graph."""

    nodes: list[Any]
    weights: list[Tensor]


@dataclass
class AttentionCall:
    """A call of torch's attention in an exported graph whose query heads are folded into the rows of KV heads."""

    node: Any
    query: Any
    key: Any
    value: Any
    mask: Any
    scale: float


def choose_kernels(program: Any, several_rows: Sequence[int]) -> bool:
    """Replaces the layers of an exported pass that run faster with a kernel for few rows, and prints what was measured; returns
    whether the measurements are certain.

    Args:
        several_rows: numbers of rows to time if the pass has several.
    """
    choices = choose_linear(program, several_rows), choose_attention(program, several_rows)
    for choice in choices:
        print(f"passes: {choice.text}", file=sys.stderr)
    return all(choice.is_certain for choice in choices)


def choose_linear(program: Any, several_rows: Sequence[int]) -> Choice:
    """Replaces the linear layers of an exported pass by `joint_linear` if that is faster."""
    groups = _groups(program)
    if not groups:
        return Choice("no linear layers")
    sizes = [size for group in groups for size in group.nodes[0].meta["val"].shape[:-1]]
    counts = (1,) if all(isinstance(size, int) and size == 1 for size in sizes) else several_rows  # others are symbols
    ours, theirs, is_certain = linear_timings(groups, counts)
    is_faster = ours < theirs
    if is_faster:
        for group in groups:
            _replace_linear(program.graph_module.graph, group)
        program.graph_module.recompile()
    size = sum(weight.nbytes for group in groups for weight in group.weights) / 1e6
    name = "joint_linear" if is_faster else "torch"
    times = f"joint_linear {1e3 * ours:.2f} ms, torch {1e3 * theirs:.2f} ms for {', '.join(map(str, counts))} row(s)"
    return Choice(f"linear layers of {size:.1f} MB run by {name}, in place ({times})", is_certain)


def choose_attention(program: Any, several_rows: Sequence[int]) -> Choice:
    """Replaces the attention of an exported pass by `folded_attention` if that is faster."""
    calls = [call for node in program.graph_module.graph.nodes if (call := _folded(node))]
    if not calls:
        return Choice("no attention of folded heads")
    rows = calls[0].query.meta["val"].shape[2]
    counts = (rows,) if isinstance(rows, int) else several_rows  # others are symbols
    timings = [attention_timings(calls[0], count) for count in counts]  # the layers of a pass are alike
    ours, theirs = (sum(seconds) * len(calls) for seconds in zip(*[timing[:2] for timing in timings], strict=True))
    is_faster = ours < theirs
    if is_faster:
        graph = program.graph_module.graph
        for call in calls:
            arguments = (call.query, call.key, call.value, call.mask, call.scale, torch.get_num_threads())
            with graph.inserting_before(call.node):
                call.node.replace_all_uses_with(_insert_call(graph, FOLDED_ATTENTION, *arguments))
            graph.erase_node(call.node)
        program.graph_module.recompile()
    name = "folded_attention" if is_faster else "torch"
    times = f"folded_attention {1e3 * ours:.2f} ms, torch {1e3 * theirs:.2f} ms with {TIMED_KEYS} keys"
    text = f"attention of {len(calls)} layer(s) runs by {name} ({times})"
    return Choice(text, all(timing.is_certain for timing in timings))


def linear_timings(groups: Sequence[Layers], counts: Sequence[int]) -> Timings:
    """Returns the seconds of all layers, summed over numbers of rows and over layers; the fastest run of each layer counts."""
    threads, ours_s, theirs_s, is_certain = torch.get_num_threads(), 0.0, 0.0, True
    for count in counts:
        inputs = [torch.zeros(count, group.weights[0].shape[1], dtype=group.weights[0].dtype) for group in groups]
        prepared = [prepared_linear(x, group.weights, threads) for x, group in zip(inputs, groups, strict=True)]
        ours = [call for _, call in prepared]
        theirs = [partial(_run_torch, x, group.weights) for x, group in zip(inputs, groups, strict=True)]
        (of_ours, of_theirs), is_undisturbed = fastest_s([ours, theirs], LINEAR_REPEATS)
        ours_s, theirs_s, is_certain = ours_s + sum(of_ours), theirs_s + sum(of_theirs), is_certain and is_undisturbed
    return Timings(ours_s, theirs_s, is_certain)


def _run_torch(x: Tensor, weights: Sequence[Tensor]) -> None:
    for weight in weights:
        nn.functional.linear(x, weight)


def attention_timings(call: AttentionCall, count: int) -> Timings:
    """Returns the seconds of a call for `count` query rows (the fastest ones)."""
    _, heads, _, size = call.query.meta["val"].shape
    dtype, threads = call.query.meta["val"].dtype, torch.get_num_threads()
    query, keys = torch.zeros(1, heads, count, size, dtype=dtype), torch.zeros(1, heads, TIMED_KEYS, size, dtype=dtype)
    mask = None if call.mask is None else torch.zeros(1, 1, count, TIMED_KEYS, dtype=dtype)
    ours = prepared_attention(query, keys, keys, mask, call.scale, threads)  # with the result, which has to stay alive
    theirs = partial(nn.functional.scaled_dot_product_attention, query, keys, keys, attn_mask=mask, scale=call.scale)
    ((ours_s,), (theirs_s,)), is_undisturbed = fastest_s([[ours[1]], [theirs]], ATTENTION_REPEATS)
    return Timings(ours_s, theirs_s, is_undisturbed)


def _groups(program: Any) -> list[Layers]:
    """Returns the linear layers of parameters in the order of the graph, those of one input together."""
    names, by_input = program.graph_signature.inputs_to_parameters, dict[Any, list[Layers]]()
    for node in program.graph_module.graph.nodes:
        if node.target is not LINEAR or node.args[1].name not in names:
            continue
        weight = program.state_dict[names[node.args[1].name]].detach()
        if weight.dtype not in DTYPES or node.args[0].meta["val"].dtype != weight.dtype:
            continue
        groups = by_input.setdefault(node.args[0], [])
        if not groups or len(groups[-1].nodes) == MAX_WEIGHTS:
            groups.append(Layers([], []))
        groups[-1].nodes.append(node)
        groups[-1].weights.append(weight)
    return [group for groups in by_input.values() for group in groups]


def _folded(node: Any) -> AttentionCall | None:
    """Returns a node's call of attention if `folded_attention` can compute it."""
    if node.target is not ATTENTION:
        return None
    given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), node.args, strict=False)) | node.kwargs
    query, key, value = (given[name] for name in ("query", "key", "value"))
    values, mask, scale = [each.meta["val"] for each in (query, key, value)], given.get("attn_mask"), given.get("scale")
    if given.get("dropout_p") or given.get("is_causal") or given.get("enable_gqa") or any(each.dim() != 4 for each in values):
        return None
    (heads, size), dtype = values[0].shape[1::2], values[0].dtype
    if dtype not in DTYPES or heads != values[1].shape[1] or size % MULTIPLE:
        return None
    if any(each.stride(3) != 1 or each.stride(2) != size for each in values):  # the rows of a head are not contiguous
        return None
    if mask is not None:
        value_of_mask = mask.meta["val"]
        if (
            value_of_mask.dim() != 4
            or value_of_mask.shape[1] != 1
            or value_of_mask.dtype != dtype
            or value_of_mask.stride(3) != 1
        ):
            return None
    return AttentionCall(node, query, key, value, mask, size**-0.5 if scale is None else scale)


def _replace_linear(graph: Any, group: Layers) -> None:
    """Replaces the layers of a group by one call; each result is a part of the call's, plus its bias."""
    with graph.inserting_before(group.nodes[0]):
        weights = [node.args[1] for node in group.nodes]
        joint = _insert_call(graph, JOINT_LINEAR, group.nodes[0].args[0], weights, torch.get_num_threads())
    parts, start = [], 0
    for node, weight in zip(group.nodes, group.weights, strict=True):
        end = start + weight.shape[0]
        with graph.inserting_before(node):
            part = joint if len(group.nodes) == 1 else _insert_call(graph, SLICE, joint, -1, start, end)
            parts.append(part)
            if len(node.args) > 2 and node.args[2] is not None:
                part = _insert_call(graph, ADD, part, node.args[2])
        node.replace_all_uses_with(part)
        graph.erase_node(node)
        start = end
    for user in list(parts[0].users):  # a draft's joined layers
        if user.target is CAT and list(user.args[0]) == parts and user.args[1:] == (-1,):
            user.replace_all_uses_with(joint)
            graph.erase_node(user)


def _insert_call(graph: Any, target: Any, *args: Any) -> Any:
    """Returns a new node of an exported graph at its point of insertion: a call of an operator, and what it returns."""
    node = graph.call_function(target, args)
    values = torch.fx.map_arg(args, lambda arg: arg.meta["val"])
    with next(value for value in values if isinstance(value, Tensor)).fake_mode:
        node.meta["val"] = target(*values)
    return node
