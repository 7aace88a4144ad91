"""Cost tables of a target's shape: c_t(n, L) of verification and c_d(w, L) of a draft level.

Measured on random weights: the decoder's own passes are timed; their cost does not depend on the values of the weights. If the
layers of a target do not all fit, a pass without layers and one with the layers that fit are measured, and the rest is
extrapolated linearly, which is exact if all layers cost the same; the result is marked as extrapolated. Verification includes
lm_head and argmax over all nodes, a draft level lm_head and the top k of every node.

Derived from memory bandwidth, for devices that are not available: a pass reads every weight and the KV cache once; on large
GPUs this dominates for trees of up to some tens of nodes. Bytes over bandwidth are a lower bound of the time of a pass, so the
share of host overhead derived from it is an upper bound. The tables are marked as bounds wherever they are printed.

Host overhead measured with a small target is projected to these tables. Policy, acceptance, cache commit and other host work
take about the same time for every model. Their time per round is compared with the model time of a round of the large target:
verification of the same number of nodes and the same number of draft levels, all assumed to have the same width.

Legend: N tree nodes, L context tokens in the cache, D hidden.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor

from sage.bench.random_targets import random_target
from sage.bench.report import SCHEMA, machine, versions
from sage.bench.report_table import HOST_PHASES, decode_shares
from sage.bench.shapes import Shape
from sage.costs.measure import draft_level, empty_cache, verify_pass
from sage.costs.tables import Curve
from sage.drafts.draft import new_session
from sage.drafts.loading import new_draft
from sage.io.dtypes import dtype_name
from sage.io.tables import text_table
from sage.runtime.timing import TimedCall, interleaved_s
from sage.targets import Target
from sage.targets.tree_passes import TreePasses

logger = logging.getLogger(__name__)


def measure_shape_costs(
    shape: Shape,
    num_layers: int,
    dtype: torch.dtype,
    device: torch.device,
    nodes: Sequence[int],
    widths: Sequence[int],
    contexts: Sequence[int],
    repeats: int,
) -> dict[str, Any]:
    """Measures the cost tables of a shape.

    Args:
        num_layers: text layers to build; verification is extrapolated to those of the shape; ValueError for none or more.
        nodes, widths, contexts: the grid, in nodes per verification, nodes per draft level and tokens in the cache.
        repeats: timed passes per point, after an untimed one; the median is used.

    Returns:
        {"kind": "costs", "verify": [{"nodes", "context", "seconds", "measured_s"}], "draft": [{"width", "context",
        "seconds"}], "layers_measured", "layers", "is_extrapolated", ...}; seconds are for the complete target.
    """
    if not 1 <= num_layers <= shape.num_layers:
        raise ValueError(f"--layers {num_layers}: {shape.name} takes 1 to {shape.num_layers}")
    capacity = max(contexts) + max(*nodes, *widths)
    target = random_target(shape, num_layers, dtype, device, capacity)
    logger.info("measuring %d of %d layers of %s", num_layers, shape.num_layers, shape.name)
    tables = {
        "repeats": repeats,
        "verify": verify_costs(target, shape.num_layers, nodes, contexts, capacity, repeats),
        "draft": draft_costs(target, widths, contexts, capacity, repeats),
        "machine": machine(device),
    }
    return _described(tables, shape, num_layers, dtype, str(device))


def _described(tables: dict[str, Any], shape: Shape, num_layers: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Returns cost tables with their origin; `num_layers` are measured."""
    return {
        "schema": SCHEMA,
        "kind": "costs",
        "shape": asdict(shape),
        "device": device,
        "dtype": dtype_name(dtype),
        "layers_measured": num_layers,
        "layers": shape.num_layers,
        "is_extrapolated": num_layers < shape.num_layers,
        **tables,
        "versions": versions(),
    }


def verify_costs(
    target: Target, num_layers: int, nodes: Sequence[int], contexts: Sequence[int], capacity: int, repeats: int
) -> list[dict[str, float]]:
    """Measures one verification for every (nodes, context), extrapolated to `num_layers` if the target has fewer."""
    passes = TreePasses(target, ())
    cache = empty_cache(passes, capacity)
    rows = []
    for context, count in product(contexts, nodes):
        verify = verify_pass(passes, target, cache, count, context)
        seconds = measured_s = _median_s(verify, _argmax_on_host, repeats, target.device)
        if target.num_layers < num_layers:
            with without_layers(target):
                fixed_s = _median_s(verify, _argmax_on_host, repeats, target.device)
            seconds = extrapolated(fixed_s, measured_s, target.num_layers, num_layers)
        rows.append({"nodes": count, "context": context, "seconds": seconds, "measured_s": measured_s})
    return rows


def extrapolated(fixed_s: float, measured_s: float, measured_layers: int, num_layers: int) -> float:
    """Returns the time of `num_layers` by the line through a pass without layers and the measured one, at least the latter."""
    per_layer_s = max(measured_s - fixed_s, 0.0) / measured_layers
    return measured_s + per_layer_s * (num_layers - measured_layers)


def draft_costs(
    target: Target, widths: Sequence[int], contexts: Sequence[int], capacity: int, repeats: int
) -> list[dict[str, float]]:
    """Measures one draft level of an EAGLE head for every (width, context)."""
    draft = new_draft(target, "eagle", seed=0)
    draft.network.eval()
    session = new_session(draft, target, capacity)
    session.set_synthetic_state(capacity, 1)  # uninitialized memory may hold denormal numbers, which are slow on a CPU
    rows = []
    for context, width in product(contexts, widths):
        level = draft_level(session, target, width, context)
        seconds = _median_s(level, Tensor.tolist, repeats, target.device)
        rows.append({"width": width, "context": context, "seconds": seconds})
    return rows


@contextmanager
def without_layers(target: Target) -> Iterator[None]:
    """Reduces the target to embedding, final norm and lm_head within the block."""
    text: Any = target.text_model
    layers = text.layers
    text.layers = layers[:0]
    try:
        yield
    finally:
        text.layers = layers


@torch.inference_mode()
def _median_s(call: TimedCall, transfer: Callable[[Tensor], object], repeats: int, device: torch.device) -> float:
    """Returns the median seconds of `call` and the transfer of its result to the host."""
    return median(interleaved_s([TimedCall(lambda: transfer(call.run()), call.reset)], repeats, device)[0])


def _argmax_on_host(logits_NV: Tensor) -> list[int]:
    return logits_NV.argmax(-1).tolist()


def format_costs(costs: dict[str, Any]) -> str:
    """Returns both tables as text, in milliseconds, with a column per context length."""
    head = f"{costs['shape']['name']}, {costs['dtype']} on {costs['device']}; {_origin(costs)}"
    verify = _grid("target pass, ms: nodes", costs["verify"], "nodes")
    draft = _grid("draft level, ms: width", costs["draft"], "width")
    return f"{head}\n\n{verify}\n\n{draft}"


def _origin(costs: dict[str, Any]) -> str:
    if not costs["layers_measured"]:
        return "not measured: lower bounds, bytes over memory bandwidth"
    if costs["is_extrapolated"]:
        return f"random weights, {costs['layers_measured']} of {costs['layers']} layers measured, the rest extrapolated"
    return f"random weights, all {costs['layers']} layers measured"


def _grid(corner: str, rows: Sequence[dict[str, float]], key: str) -> str:
    contexts = sorted({int(row["context"]) for row in rows})
    cells = {(row[key], row["context"]): f"{1e3 * row['seconds']:.2f}" for row in rows}
    sizes = sorted({int(row[key]) for row in rows})
    table = [[str(size), *(cells[size, context] for context in contexts)] for size in sizes]
    return text_table([corner, *(f"L = {context}" for context in contexts)], table, ruled=False)


# -- bounds by memory bandwidth ------------------------------------------------------------------------------------------


def roofline_costs(
    shape: Shape,
    dtype: torch.dtype,
    bandwidth_gb_s: float,
    nodes: Sequence[int],
    widths: Sequence[int],
    contexts: Sequence[int],
) -> dict[str, Any]:
    """Returns lower bounds of the times of passes and draft levels; grid and format as for `measure_shape_costs`.

    `bandwidth_gb_s`: gigabytes (1e9) the device reads per second.
    """
    row = 2 * shape.num_kv_heads * shape.head_dim  # keys and values of a token in one layer

    def seconds(weights: int, tokens: int, layers: int) -> float:
        return (weights + layers * tokens * row) * dtype.itemsize / (1e9 * bandwidth_gb_s)

    tables = {
        "verify": [
            {"nodes": n, "context": context, "seconds": seconds(shape.pass_parameters, context + n, shape.num_layers)}
            for context, n in product(contexts, nodes)
        ],
        "draft": [
            {"width": width, "context": context, "seconds": seconds(shape.draft_parameters, context + width, 1)}
            for context, width in product(contexts, widths)
        ],
    }
    return _described(tables, shape, 0, dtype, f"{bandwidth_gb_s:g} GB/s")


# -- projection of host overhead -----------------------------------------------------------------------------------------


def project(report: Mapping[str, Any], costs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns, per drafting policy and context length, seconds of model compute and of host overhead per round, and its share.

    Args:
        report: a `report.json`.
        costs: cost tables of the large target, from `measure_shape_costs`. Raises ValueError if one of the two is malformed.
    """
    if "policies" not in report or costs.get("kind") != "costs":
        raise ValueError("--project: needs a report.json of sage-validate or sage.bench")
    contexts = sorted({int(row["context"]) for row in costs["verify"]})
    parts = {name: part for name, part in report["policies"].items() if part["draft_steps_per_round"] > 0}
    return [_row(name, part, costs, context) for name, part in parts.items() for context in contexts]


def _row(name: str, part: Mapping[str, Any], costs: Mapping[str, Any], context: int) -> dict[str, Any]:
    levels = part["draft_steps_per_round"]
    width = max(part["nodes_per_round"] / levels, 1.0)
    compute_s = cost_curve(costs["verify"], "nodes", context)(round(part["nodes_per_round"]) + 1)
    compute_s += levels * cost_curve(costs["draft"], "width", context)(round(width))
    host_s = sum(part["time_s"][phase] for phase in HOST_PHASES) / part["rounds"]
    shares = decode_shares(part)
    return {
        "policy": name,
        "context": context,
        "compute_s": compute_s,
        "bookkeeping_s": host_s,
        "share": host_s / (host_s + compute_s),
        "measured_share": shares[-1] if shares else 0.0,
    }


def cost_curve(rows: Sequence[Mapping[str, float]], key: str, context: int) -> Curve:
    """Returns the seconds of passes at one context length, by the count `key` of each row."""
    chosen = sorted((int(row[key]), row["seconds"]) for row in rows if row["context"] == context)
    return Curve([count for count, _ in chosen], [seconds for _, seconds in chosen])


def format_projection(rows: Sequence[Mapping[str, Any]], name: str, measured: str) -> str:
    """Returns a table of the share of host overhead: of the target `measured`, and projected to the shape `name`."""
    contexts = list(dict.fromkeys(row["context"] for row in rows))
    table = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = {row["context"]: row for row in rows if row["policy"] == policy}
        first = own[contexts[0]]
        shares = [f"{own[context]['share']:.2%}" for context in contexts]
        table.append([policy, f"{1e3 * first['bookkeeping_s']:.3f}", f"{first['measured_share']:.1%}", *shares])
    head = ["policy", "ms/round", measured[:22], *(f"L = {context}" for context in contexts)]
    title = f"share of host overhead in decoding time: measured, and projected to {name}"
    return f"{title}\n{text_table(head, table, ruled=False)}"
