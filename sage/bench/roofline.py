"""Cost tables that follow from memory bandwidth alone, for devices that are not at hand.

One request reads every weight and the KV cache once per pass, and on large GPUs little else costs time until a tree has some
tens of nodes. Bytes over bandwidth are then the least a pass can take, so the share of bookkeeping beside it is the most it can
be. A bound, not a measurement, and it says so wherever it is printed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from sage.bench.report import SCHEMA, versions
from sage.bench.shapes import Shape
from sage.dtypes import dtype_name


def roofline_costs(
    shape: Shape,
    dtype: torch.dtype,
    bandwidth_gb_s: float,
    nodes: Sequence[int],
    widths: Sequence[int],
    contexts: Sequence[int],
) -> dict[str, Any]:
    """Least times of passes and draft levels, in the form of `sage.bench.costs.measure_shape_costs`.

    Args:
        bandwidth_gb_s: gigabytes (1e9) the device reads per second.
        nodes, widths, contexts: the grid, as there.

    Raises:
        ValueError: a bandwidth that is not above 0.
    """
    if not bandwidth_gb_s > 0:
        raise ValueError(f"--bandwidth {bandwidth_gb_s}: give the device's gigabytes per second, above 0")
    head = shape.vocab_size * shape.hidden_size
    target = shape.num_layers * shape.layer_parameters + head
    draft = shape.layer_parameters + 2 * shape.hidden_size**2 + head  # a layer, fc of two inputs, the borrowed lm_head
    row = 2 * shape.num_kv_heads * shape.head_dim  # keys and values of a token in one layer

    def seconds(weights: int, tokens: int, layers: int) -> float:
        return (weights + layers * tokens * row) * dtype.itemsize / (1e9 * bandwidth_gb_s)

    return {
        "schema": SCHEMA,
        "kind": "costs",
        "shape": asdict(shape),
        "device": f"{bandwidth_gb_s:g} GB/s",
        "dtype": dtype_name(dtype),
        "layers_measured": 0,
        "layers": shape.num_layers,
        "is_extrapolated": True,
        "verify": [
            {"nodes": n, "context": context, "seconds": seconds(target, context + n, shape.num_layers)}
            for context in contexts
            for n in nodes
        ],
        "draft": [
            {"width": width, "context": context, "seconds": seconds(draft, context + width, 1)}
            for context in contexts
            for width in widths
        ],
        "versions": versions(),
    }
