"""`python -m benchmarks.passes`: time, calls and memory of target passes and draft levels, eager, compiled and captured."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import sage
from benchmarks.training.measuring import allocated, describe_machine, peak, ratio_spread, reset_peak
from benchmarks.wide import add_widen_option, widened
from sage.bench.options import counts
from sage.commands import cli
from sage.costs.measure import draft_level, empty_cache, verify_pass
from sage.drafts.draft import new_session
from sage.io.dtypes import torch_dtype
from sage.io.tables import text_table
from sage.runtime.package_folder import PACKAGE_SUFFIX, passes_folder
from sage.runtime.pass_modes import PassMode
from sage.runtime.timing import TimedCall, interleaved_s
from sage.targets.tree_passes import TreePasses


@dataclass
class Timed:
    """One pass in one mode: its call, the seconds of its first call, which compiles or loads it, the bytes that are allocated
    meanwhile at most, and those of them that are kept.
    """

    mode: PassMode
    call: TimedCall
    first_s: float
    peak: int
    kept: int


def num_calls(call: TimedCall) -> tuple[int, int]:
    """Returns the number of ATen operators, and of calls of Python and C functions, of one call."""
    call.reset()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        call.run()
    operators = sum(event.count for event in profiler.key_averages() if event.key.startswith("aten::"))
    counted = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    call.reset()
    sys.setprofile(count)
    try:
        call.run()
    finally:
        sys.setprofile(None)
    return operators, counted


def timed(target: Any, mode: PassMode, make: Callable[[], TimedCall]) -> Timed:
    """Builds a pass in a mode and runs it once."""
    target.passes = mode
    call = make()
    call.reset()
    before, start = reset_peak(target.device), time.perf_counter()
    call.run()
    first_s = time.perf_counter() - start
    return Timed(mode, call, first_s, peak(target.device) - before, allocated(target.device) - before)


def rows_of(name: str, target: Any, make: Callable[[], TimedCall], repeats: int) -> list[list[str]]:
    """Times one pass in turns in the modes that the device has, the reference first; returns a row of the table for each."""
    modes = (PassMode.eager, PassMode.captured if target.device.type == "cuda" else PassMode.compiled)
    passes = [timed(target, mode, make) for mode in modes]
    times = interleaved_s([one.call for one in passes], repeats, target.device)
    rows = []
    for one, own in zip(passes, times, strict=True):
        spread = "{:.2f} ({:.2f}-{:.2f})".format(*ratio_spread(own, times[0]))
        operators, calls = num_calls(one.call)
        memory = [f"{max(count, 0) / 1e6:.1f}" for count in (one.peak, one.kept)]
        seconds = f"{1e3 * statistics.median(own):.3f}"
        rows.append([name, str(one.mode), seconds, spread, str(operators), str(calls), f"{one.first_s:.2f}", *memory])
    return rows


@torch.inference_mode()
def measure(target: Any, draft: Any, nodes: Sequence[int], widths: Sequence[int], context: int, repeats: int) -> str:
    """Measures passes over `nodes` and draft levels of `widths` on top of `context` tokens; returns the text to print."""
    room, rows = max(*nodes, *widths), list[list[str]]()

    def verify(count: int) -> TimedCall:
        passes = TreePasses(target, draft.levels if draft is not None else ())
        return verify_pass(passes, target, empty_cache(passes, context + room), count, context)

    def level(width: int) -> TimedCall:
        return draft_level(new_session(draft, target, context + room), target, width, context)

    for count in nodes:
        rows += rows_of(f"target pass, {count} nodes", target, partial(verify, count), repeats)
    for width in widths if draft is not None else ():
        rows += rows_of(f"draft level, {width} nodes", target, partial(level, width), repeats)
    head = ("", "passes", "ms", "ratio to eager", "ATen calls", "all calls", "first call, s", "peak, MB", "kept, MB")
    kept_mb = sum(path.stat().st_size for path in passes_folder().glob(f"*{PACKAGE_SUFFIX}")) / 1e6
    weights = sum(weight.numel() * weight.element_size() for weight in target.text_model.parameters())
    lines = [
        f"{target.name}, {target.dtype}, {context} tokens in the cache; the text layers read {weights / 1e6:.1f} MB of weights",
        text_table(head, rows, "<<>>>>>>>", ruled=False),
        "all calls: of Python and C functions; peak, kept: memory allocated by the first call, without compilers' processes",
        f"compiled passes are kept in {passes_folder()}, {kept_mb:.1f} MB; without it, starts are cold",
        describe_machine(target.device),
    ]
    return "\n".join(lines)


def main() -> int:
    parser = cli.new_parser("python -m benchmarks.passes", description=__doc__)
    cli.add_model_options(parser)
    add_widen_option(parser)
    parser.add_argument("--nodes", metavar="N,N", default="1,4,8,16,32", help="nodes of target passes; default %(default)s")
    parser.add_argument("--widths", metavar="N,N", default="1,4,8", help="nodes of draft levels; default %(default)s")
    parser.add_argument("--context", type=int, default=256, help="tokens in the cache; default %(default)s")
    parser.add_argument("--repeats", type=int, default=60, help="timed turns; default %(default)s")
    parser.add_argument("--threads", type=int, metavar="N", help="torch's threads; default: torch's own choice")
    cli.add_dtype_option(parser, "fp32", "dtype of target and draft (default %(default)s)")
    cli.add_device_option(parser, "auto")
    args = parser.parse_args()
    if min(args.context, args.repeats) < 1:
        raise ValueError("--context, --repeats: give at least 1")
    if args.threads:
        torch.set_num_threads(args.threads)
    path, folder = cli.find_models(args)
    path = widened(path, args)
    device, dtype = cli.resolve_device(args.device), torch_dtype(args.dtype)
    target = sage.load_target(path, dtype=dtype, device=device, passes=PassMode.eager)
    draft = None if folder is None else sage.load_draft(folder, target)
    print(measure(target, draft, counts(args.nodes), counts(args.widths), args.context, args.repeats))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
