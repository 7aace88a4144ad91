"""The kernels for few rows in the graph of an exported pass: in place of torch's linear layers and attention.

They are not compared with torch's when a pass is compiled: on an AMD EPYC (Zen 4) they are 1.2 to 4 times as fast for up to 32
rows, in float32 and bfloat16, and at least as fast for any number of query rows and keys. Layers of the same input become one
call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sage.runtime.cpu.kernels import DTYPES, FOLDED_ATTENTION, JOINT_LINEAR, MAX_WEIGHTS, MULTIPLE

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
LINEAR, SLICE, ADD, CAT = (
    torch.ops.aten.linear.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.add.Tensor,
    torch.ops.aten.cat.default,
)


def use_kernels(program: Any) -> None:
    """Replaces linear layers and attention of an exported pass by `joint_linear` and `folded_attention` where they fit."""
    graph = program.graph_module.graph
    for group in _linear_groups(program):
        _replace_linear(graph, group)
    for node in list(graph.nodes):
        if node.target is ATTENTION and (arguments := _folded_arguments(node)):
            with graph.inserting_before(node):
                node.replace_all_uses_with(_insert_call(graph, FOLDED_ATTENTION, *arguments))
            graph.erase_node(node)
    program.graph_module.recompile()


def _linear_groups(program: Any) -> list[list[Any]]:
    """Returns the linear layers of parameters in the order of the graph, those of one input together."""
    parameters, by_input = program.graph_signature.inputs_to_parameters, dict[Any, list[list[Any]]]()
    for node in program.graph_module.graph.nodes:
        if node.target is not LINEAR or node.args[1].name not in parameters:
            continue
        source, weight = (arg.meta["val"] for arg in node.args[:2])
        if weight.dtype not in DTYPES or source.dtype != weight.dtype:
            continue
        groups = by_input.setdefault(node.args[0], [])
        if not groups or len(groups[-1]) == MAX_WEIGHTS:
            groups.append([])
        groups[-1].append(node)
    return [group for groups in by_input.values() for group in groups]


def _replace_linear(graph: Any, group: list[Any]) -> None:
    """Replaces the layers of a group by one call; each result is a part of the call's, plus its bias."""
    weights = [node.args[1] for node in group]
    with graph.inserting_before(group[0]):
        joint = _insert_call(graph, JOINT_LINEAR, group[0].args[0], weights, torch.get_num_threads())
    parts, start = [], 0
    for node, weight in zip(group, weights, strict=True):
        end = start + weight.meta["val"].shape[0]
        with graph.inserting_before(node):
            part = joint if len(group) == 1 else _insert_call(graph, SLICE, joint, -1, start, end)
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


def _folded_arguments(node: Any) -> tuple[Any, ...] | None:
    """Returns the arguments of `folded_attention` for a call of torch's attention whose query heads are folded into the rows of
    KV heads; None if the kernel cannot compute it.
    """
    given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), node.args, strict=False)) | node.kwargs
    inputs, mask, scale = [given[name] for name in ("query", "key", "value")], given.get("attn_mask"), given.get("scale")
    states = [each.meta["val"] for each in inputs]
    if given.get("dropout_p") or given.get("is_causal") or given.get("enable_gqa") or any(each.dim() != 4 for each in states):
        return None
    (heads, size), dtype = states[0].shape[1::2], states[0].dtype
    if dtype not in DTYPES or heads != states[1].shape[1] or size % MULTIPLE:
        return None
    if any(each.stride(3) != 1 or each.stride(2) != size for each in states):  # the rows of a head are not contiguous
        return None
    if mask is not None:
        additive = mask.meta["val"]
        if additive.dim() != 4 or additive.shape[1] != 1 or additive.dtype != dtype or additive.stride(3) != 1:
            return None
    return (*inputs, mask, size**-0.5 if scale is None else scale, torch.get_num_threads())


def _insert_call(graph: Any, target: Any, *args: Any) -> Any:
    """Returns a new node of an exported graph at its point of insertion: a call of an operator, and what it returns."""
    node = graph.call_function(target, args)
    values = torch.fx.map_arg(args, lambda arg: arg.meta["val"])
    with next(value for value in values if isinstance(value, Tensor)).fake_mode:
        node.meta["val"] = target(*values)
    return node
