"""Cost tables derived from memory bandwidth, for devices that are not available.

A pass reads every weight and the KV cache once; on large GPUs this dominates for trees of up to some tens of nodes. Bytes over
bandwidth are a lower bound of the time of a pass, so the share of host overhead derived from it is an upper bound. The tables
are marked as bounds wherever they are printed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

import torch

from sage.bench.report import SCHEMA, versions
from sage.bench.shapes import Shape
from sage.io.dtypes import dtype_name


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
            {"nodes": n, "context": context, "seconds": seconds(shape.pass_parameters, context + n, shape.num_layers)}
            for context, n in product(contexts, nodes)
        ],
        "draft": [
            {"width": width, "context": context, "seconds": seconds(shape.draft_parameters, context + width, 1)}
            for context, width in product(contexts, widths)
        ],
        "versions": versions(),
    }
