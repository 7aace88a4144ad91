"""Which kernel runs the attention of a compiled pass: `folded_attention` or torch's, whichever is faster on this machine.

Both are timed once, when the pass is compiled, on random keys of the pass's sizes. The choice is part of the compiled package.
Does not own: the kernel (sage.runtime.folded_attention).

Shapes: B batch, H KV heads, R query rows of a KV head, S keys, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sage.runtime.folded_attention import FOLDED_ATTENTION, MULTIPLE, prepared
from sage.runtime.kernels import DTYPES, Choice, Timings, insert_call
from sage.runtime.timing import fastest_s

TIMED_KEYS = 512
REPEATS = 50
ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


@dataclass
class Call:
    """A call of torch's attention in an exported graph whose query heads are folded into the rows of KV heads."""

    node: Any
    query: Any
    key: Any
    value: Any
    mask: Any
    scale: float


def choose(program: Any, several_rows: Sequence[int]) -> Choice:
    """Replaces the attention of an exported pass by `folded_attention` if that is faster; returns what was measured.

    Args:
        several_rows: numbers of query rows to time if the pass has several nodes.
    """
    calls = [call for node in program.graph_module.graph.nodes if (call := _folded(node))]
    if not calls:
        return Choice("no attention of folded heads")
    ours, theirs, is_certain = 0.0, 0.0, True
    rows = calls[0].query.meta["val"].shape[2]
    for count in (rows,) if isinstance(rows, int) else several_rows:  # others are symbols
        found = timings(calls[0], count)  # the layers of a pass are alike
        ours, theirs = ours + found.ours * len(calls), theirs + found.theirs * len(calls)
        is_certain &= found.is_certain
    is_faster = ours < theirs
    if is_faster:
        for call in calls:
            _replace(program.graph_module.graph, call)
        program.graph_module.recompile()
    name = "folded_attention" if is_faster else "torch"
    times = f"folded_attention {1e3 * ours:.2f} ms, torch {1e3 * theirs:.2f} ms with {TIMED_KEYS} keys"
    return Choice(f"attention of {len(calls)} layer(s) runs by {name} ({times})", is_certain)


def timings(call: Call, count: int) -> Timings:
    """Returns the seconds of a call with `folded_attention` and with torch for `count` query rows (the fastest ones)."""
    _, heads, _, size = call.query.meta["val"].shape
    dtype, threads = call.query.meta["val"].dtype, torch.get_num_threads()
    query, keys = torch.zeros(1, heads, count, size, dtype=dtype), torch.zeros(1, heads, TIMED_KEYS, size, dtype=dtype)
    mask = None if call.mask is None else torch.zeros(1, 1, count, TIMED_KEYS, dtype=dtype)

    ours = prepared(query, keys, keys, mask, call.scale, threads)  # with the result, which has to stay alive
    theirs = partial(nn.functional.scaled_dot_product_attention, query, keys, keys, attn_mask=mask, scale=call.scale)
    found = fastest_s([[ours[1]], [theirs]], REPEATS)
    (first,), (second,) = found.seconds
    return Timings(first, second, found.is_undisturbed)


def _folded(node: Any) -> Call | None:
    """Returns a node's call of attention if `folded_attention` can compute it."""
    if node.target is not ATTENTION:
        return None
    given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), node.args, strict=False)) | node.kwargs
    query, key, value = (given[name] for name in ("query", "key", "value"))
    values = [each.meta["val"] for each in (query, key, value)]
    if given.get("dropout_p") or given.get("is_causal") or given.get("enable_gqa") or any(each.dim() != 4 for each in values):
        return None
    if values[0].dtype not in DTYPES or values[0].shape[1] != values[1].shape[1] or values[0].shape[3] % MULTIPLE:
        return None
    if not all(_has_contiguous_rows(each) for each in values):
        return None
    mask = given.get("attn_mask")
    if mask is not None and not _is_additive(mask.meta["val"], values[0].dtype):
        return None
    scale = given.get("scale")
    return Call(node, query, key, value, mask, values[0].shape[3] ** -0.5 if scale is None else scale)


def _has_contiguous_rows(states: Tensor) -> bool:
    """Whether the rows [.., d] of every head are contiguous."""
    return states.stride(3) == 1 and bool(states.stride(2) == states.shape[3])


def _is_additive(mask: Tensor, dtype: torch.dtype) -> bool:
    return mask.dim() == 4 and mask.shape[1] == 1 and mask.dtype == dtype and mask.stride(3) == 1


def _replace(graph: Any, call: Call) -> None:
    """Replaces a call of torch's attention by one of the kernel."""
    with graph.inserting_before(call.node):
        given = (call.query, call.key, call.value, call.mask, call.scale, torch.get_num_threads())
        node = insert_call(graph, FOLDED_ATTENTION, *given)
    call.node.replace_all_uses_with(node)
    graph.erase_node(call.node)
