"""A captured pass compared with the eager one on the same arguments, before its results are used."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from sage.runtime.pass_function import Dim, PassFunction, PassInputs

# of the norm of a row; kernels differ by the number of rows, and layers add up what they round
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.05}


class Replayed(Protocol):
    """`sage.runtime.captured.StaticCall`."""

    def write(self, inputs: PassInputs, sizes: dict[Dim, int]) -> None: ...

    def run(self, sizes: dict[Dim, int]) -> Sequence[Tensor]: ...

    def unchanged_cache(self) -> AbstractContextManager[None]: ...


def describe_difference(function: PassFunction, call: Replayed, inputs: Any, sizes: dict[Dim, int]) -> str:
    """Runs a pass eagerly, then captured; returns how the results differ, empty if they agree.

    The cache is left as by the eager pass.
    """
    expected = [result for result in function.compute(inputs) if result.is_floating_point()]
    call.write(inputs, sizes)
    with call.unchanged_cache():
        found = [result for result in call.run(sizes) if result.is_floating_point()]
    error = max(row_error(*both) for both in zip(found, expected, strict=True))
    allowed = max(TOLERANCES[result.dtype] for result in expected)
    if error <= allowed:
        return ""
    shape = ", ".join(f"{dim.name} {size}" for dim, size in sizes.items())
    return f"a captured pass of the {function.owner} ({shape}) differs from the eager one by {error:.2g} (allowed: {allowed:g})"


def row_error(found: Tensor, expected: Tensor) -> float:
    """Returns the largest distance of two rows [.., d] relative to the expected one's norm; NaN if only one of them has NaN."""
    is_same = (found == expected) | (found.isnan() & expected.isnan())
    distance = (found.double() - expected.double()).masked_fill(is_same, 0).norm(dim=-1)
    norm = expected.double().masked_fill(~expected.isfinite(), 0).norm(dim=-1)
    return float((distance / norm.clamp(min=torch.finfo(torch.float32).tiny)).amax())
