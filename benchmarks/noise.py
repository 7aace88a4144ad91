"""`python -m benchmarks.noise`: time of the sampling noise of one round, against drawing it on the CPU, and its floor."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.training.measuring import describe_machine, ratio_spread
from sage.commands.cli import add_device_option, new_parser, resolve_device, run
from sage.decoding.noise import gumbel
from sage.io.tables import text_table
from sage.runtime.timing import TimedCall, interleaved_s

INTEGER_OPERATIONS, FLOAT_OPERATIONS, LOGARITHMS = 8, 4, 2  # passes over the numbers in `sage.decoding.noise`


def drawn(seed: int, positions: Sequence[int], num_tokens: int, device: torch.device) -> Tensor:
    """Returns noise [P, V] from a CPU generator per position, float64, copied to the device: the straightforward way."""
    rows = []
    for position in positions:
        generator = torch.Generator().manual_seed(hash((seed, position)) % 2**63)
        uniform = torch.rand(num_tokens, generator=generator, dtype=torch.float64)
        rows.append(-torch.log(-torch.log(uniform.clamp(min=torch.finfo(torch.float64).tiny))))
    return torch.stack(rows).to(device)


def measure(num_positions: int, num_tokens: int, repeats: int, device: torch.device) -> str:
    """Times both in turns; returns the text to print."""
    positions = torch.arange(num_positions, device=device)
    uniform = torch.rand(num_positions, num_tokens, device=device)
    calls = {
        "hash": TimedCall(lambda: gumbel(1, positions, num_tokens)),
        "CPU generator": TimedCall(lambda: drawn(1, range(num_positions), num_tokens, device)),
        "two logarithms": TimedCall(lambda: uniform.log1p().log_()),
        "copy": TimedCall(uniform.clone),
    }
    times = dict(zip(calls, interleaved_s(list(calls.values()), repeats, device), strict=True))
    rows = [
        (name, f"{1e3 * statistics.median(own):.3f} ms", f"{1e3 * min(own):.3f}-{1e3 * max(own):.3f}")
        for name, own in times.items()
    ]
    middle, low, high = ratio_spread(times["hash"], times["CPU generator"])
    numbers = num_positions * num_tokens
    return "\n".join(
        (
            f"noise of {num_positions} positions, V = {num_tokens}: {numbers / 1e6:.2f} million numbers",
            f"floor: {4 * numbers / 1e6:.1f} MB written, {INTEGER_OPERATIONS * numbers / 1e6:.0f} million int32 and "
            f"{FLOAT_OPERATIONS * numbers / 1e6:.0f} million float32 operations, "
            f"{LOGARITHMS * numbers / 1e6:.1f} million logarithms",
            text_table(("", "median", "range"), rows, "<>>", ruled=False),
            f"hash / CPU generator, run by run: {middle:.3f} ({low:.3f}-{high:.3f}, 10% to 90%)",
            describe_machine(device),
        )
    )


def main() -> int:
    parser = new_parser("python -m benchmarks.noise", description=__doc__)
    parser.add_argument("--positions", type=int, default=8, help="positions per round (default: %(default)s)")
    parser.add_argument("--vocabulary", type=int, default=152064, help="V; default: %(default)s, that of Qwen2.5-VL-7B")
    parser.add_argument("--repeats", type=int, default=50, help="timed runs of each (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="threads of the CPU; 0: torch's default")
    add_device_option(parser, "cpu")
    arguments = parser.parse_args()
    for name in ("positions", "vocabulary", "repeats"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name}: {getattr(arguments, name)} is not allowed; give at least 1")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    print(measure(arguments.positions, arguments.vocabulary, arguments.repeats, resolve_device(arguments.device)))
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
