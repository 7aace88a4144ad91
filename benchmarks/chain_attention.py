"""`python -m benchmarks.chain_attention`: the fused attention of unrolled training steps, and its gradient, against float64.

Shapes: B batch, H query heads, C key heads, T rows, I keys of the chain, d head size; the kernel sees d + 8.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from benchmarks.figures import Figures, describe_machine
from sage.commands.cli import add_device_option, new_parser, resolve_device, run
from sage.commands.device_check import attention_used
from sage.drafts.unroll import attend_with_chain
from sage.runtime.timing import TimedCall

CHAIN = 6  # keys of the chain in the last of seven steps
NAMES = ("result", "query", "keys", "values", "keys of the chain", "values of the chain")


def inputs(rows: int, size: int, heads: int, key_heads: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Returns query [1, H, T, d], keys and values [1, C, T, d], and those of the chain [1, C, T, I, d], of unit variance."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, rows, size), *[(1, key_heads, rows, size)] * 2, *[(1, key_heads, rows, CHAIN, size)] * 2]
    return [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]


def result_and_gradients(tensors: list[Tensor]) -> list[Tensor]:
    """Returns the attention of every row and the gradients of the sum of its squares."""
    out = attend_with_chain(*tensors)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), tensors)]


def errors(tensors: list[Tensor]) -> list[float]:
    """Returns the error of the result and of each gradient, relative to its norm, against the same inputs in float64."""
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    pairs = zip(result_and_gradients(tensors), result_and_gradients(wide), strict=True)
    return [float((mine.double() - exact).norm() / exact.norm()) for mine, exact in pairs]


def measure(rows: int, size: int, device: torch.device, out: str | None) -> Figures:
    """Compares both half precisions and float32 with float64; `out` receives row by row."""
    cells = list[list[str]]()
    title = f"attention of {rows} rows with a chain of {CHAIN} keys, 28 query and 4 key heads of size {size}"
    notes = ["relative error of the result and of the gradient of each input, against float64"]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        tensors = inputs(rows, size, 28, 4, dtype, device)
        kernels = attention_used(TimedCall(lambda tensors=tensors: attend_with_chain(*tensors)), device)  # type: ignore[misc]
        cells.append([str(dtype).removeprefix("torch."), *(f"{error:.1e}" for error in errors(tensors)), kernels])
        figures = Figures(title, ("", *NAMES, "kernel"), cells, notes, describe_machine(device))
        figures.write(out)
    return figures


def main() -> int:
    parser = new_parser("python -m benchmarks.chain_attention", description=__doc__)
    parser.add_argument("--rows", type=int, default=1024, help="T (default: %(default)s)")
    parser.add_argument("--size", type=int, default=128, help="d (default: %(default)s)")
    parser.add_argument("--out", metavar="FILE", help="also write the table as JSON")
    add_device_option(parser, "auto")
    arguments = parser.parse_args()
    if min(arguments.rows, arguments.size) < 1:
        raise ValueError("--rows, --size: give at least 1")
    figures = measure(arguments.rows, arguments.size, resolve_device(arguments.device), arguments.out)
    print(figures.text())
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
