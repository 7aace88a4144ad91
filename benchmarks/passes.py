"""`python -m benchmarks.passes`: time, calls and memory of target passes and draft levels, eager, compiled and captured, beside
the time that reading weights, keys, values and states of linear layers would take, and beside single steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

import sage
from benchmarks.figures import Figures, allocated, counts, describe_machine, peak, ratio_spread, reset_peak
from benchmarks.shapes import limit_layers, limit_vision, published_architecture, random_target
from sage.commands import cli
from sage.costs.measure import draft_level, empty_cache, verify_pass
from sage.drafts.draft import new_session
from sage.io.dtypes import torch_dtype
from sage.io.machine import free_bytes
from sage.runtime.cpu import huge_pages, kernels
from sage.runtime.executors import describe_passes
from sage.runtime.modes import PassMode
from sage.runtime.package_folder import PACKAGE_SUFFIX, passes_folder
from sage.runtime.timing import TimedCall, interleaved_s
from sage.targets.loading import meta_target
from sage.targets.tree_passes import TreePasses

READ_BYTES = 2**28  # larger than the caches
USABLE_MEMORY = 0.7  # share of free memory; the rest is for activations, KV cache and other processes
EMBEDDING, ATTENTION = "aten::embedding", "scaled_dot_product"


def num_operators(call: TimedCall) -> int:
    """Returns the number of ATen operators of one call."""
    call.reset()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        call.run()
    return sum(event.count for event in profiler.key_averages() if event.key.startswith("aten::"))


class ReadTensors(TorchDispatchMode):
    """Adds up what the operators of an eager pass have to read: weights, and keys and values. Of an embedding, rows are read.

    Args:
        weights: the parameters that the pass may read.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self._storages = {weight.untyped_storage().data_ptr() for weight in weights}
        self._weights: dict[int, int] = {}
        self._cached = 0

    @property
    def num_bytes(self) -> int:
        return sum(self._weights.values()) + self._cached

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if ATTENTION in name:
            self._cached += sum(tensor.nbytes for tensor in tensors[1:3])
        elif name != EMBEDDING:
            for tensor in tensors:
                if tensor.untyped_storage().data_ptr() in self._storages:
                    address = tensor.data_ptr()
                    self._weights[address] = max(self._weights.get(address, 0), tensor.nbytes)
        return func(*args, **(kwargs or {}))


def bytes_read(call: TimedCall, weights: Iterable[Tensor]) -> int:
    """Returns the bytes of weights, keys and values that an eager pass reads."""
    call.reset()
    with ReadTensors(weights) as read:
        call.run()
    return read.num_bytes


@torch.inference_mode()
def read_bandwidth(device: torch.device) -> float:
    """Returns the bytes per second at which one large tensor is read (median of 5 runs)."""
    source = torch.ones(READ_BYTES // 4, device=device)
    return source.nbytes / statistics.median(interleaved_s([TimedCall(source.sum)], 5, device)[0])


def first_call(target: Any, mode: PassMode, make: Callable[[], TimedCall]) -> tuple[TimedCall, list[str]]:
    """Builds a pass in a mode and runs it once, which compiles or loads it.

    Returns:
        the pass, and the cells of its row: seconds, the megabytes allocated meanwhile at most, and those that are kept.
    """
    target.passes = mode
    call = make()
    call.reset()
    before, start = reset_peak(target.device), time.perf_counter()
    call.run()
    first_s, sizes = time.perf_counter() - start, (peak(target.device), allocated(target.device))
    return call, [f"{first_s:.2f}", *(f"{max(size - before, 0) / 1e6:.1f}" for size in sizes)]


def spread(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Returns the ratio of paired times as a cell."""
    return "{:.2f} ({:.2f}-{:.2f})".format(*ratio_spread(ours, theirs))


def beside_steps(whole: TimedCall, one: TimedCall, count: int, repeats: int, device: torch.device) -> str:
    """Returns the ratio of a pass of `count` nodes to as many passes of one after the other, timed in turns, as a cell."""
    steps = TimedCall(lambda: [one.run() for _ in range(count)], one.reset)
    return spread(*interleaved_s([whole, steps], repeats, device))


def rows_of(
    name: str, target: Any, make: Callable[[int], TimedCall], count: int, repeats: int, weights: Sequence[Tensor], states: int
) -> list[list[str]]:
    """Times a pass of `count` nodes in turns in the modes that the device has, the reference first; returns a row of the table
    for each.

    The bandwidth is measured just before and after, because on shared machines it changes from minute to minute.

    Args:
        weights: of target and draft.
        states: bytes of linear layers' states that the pass reads.
    """
    modes = (PassMode.eager, PassMode.captured if target.device.type == "cuda" else PassMode.compiled)
    calls, cells = zip(*(first_call(target, mode, partial(make, count)) for mode in modes), strict=True)
    before = read_bandwidth(target.device)
    times = interleaved_s(calls, repeats, target.device)
    read, bandwidth = bytes_read(calls[0], weights) + states, (before + read_bandwidth(target.device)) / 2
    bound_s, rows = read / bandwidth, []
    for mode, call, first, own in zip(modes, calls, cells, times, strict=True):
        target.passes, median_s = mode, statistics.median(own)
        spreads = [spread(own, times[0]), beside_steps(call, make(1), count, repeats, target.device) if count > 1 else ""]
        bound = [f"{read / 1e6:.1f}", f"{bandwidth / 1e9:.1f}", f"{1e3 * bound_s:.3f}", f"{median_s / bound_s:.2f}"]
        rows.append([name, str(mode), f"{1e3 * median_s:.3f}", *spreads, *bound, str(num_operators(call)), *first])
    return rows


@torch.inference_mode()
def measure(
    target: Any, draft: Any, nodes: Sequence[int], widths: Sequence[int], context: int, repeats: int, out: str | None = None
) -> Figures:
    """Measures passes over `nodes` and draft levels of `widths` on top of `context` tokens; `out` receives row by row."""
    room, rows = max(*nodes, *widths), list[list[str]]()
    weights = [*target.model.parameters(), *(draft.network.parameters() if draft is not None else ())]

    def verify(count: int) -> TimedCall:
        passes = TreePasses(target, draft.levels if draft is not None else ())
        return verify_pass(passes, target, empty_cache(passes, context + room), count, context)

    def level(width: int) -> TimedCall:
        return draft_level(new_session(draft, target, context + room), target, width, context)

    state, slot = target.linear.num_bytes(target.dtype.itemsize) if target.linear else (0, 0)
    calls: list[Any] = [("target pass", verify, count, state + count * slot) for count in nodes]
    if draft is not None:
        calls += [("draft level", level, width, 0) for width in widths]
    for name, make, count, states in calls:
        rows += rows_of(f"{name}, {count} nodes", target, make, count, repeats, weights, states)
        figures = _figures(target, context, rows)
        figures.write(out)
    return figures


def _figures(target: Any, context: int, rows: Sequence[Sequence[str]]) -> Figures:
    measured = ("ms", "ratio to eager", "to single steps", "reads, MB", "at GB/s", "takes ms", "ratio to that")
    head = ("", "passes", *measured, "ATen calls", "first call, s", "peak, MB", "kept, MB")
    kept_mb = sum(path.stat().st_size for path in passes_folder().glob(f"*{PACKAGE_SUFFIX}")) / 1e6
    notes = [
        f"passes in the last rows: {describe_passes(target)}",
        "reads: weights, keys, values, states; GB/s: at which memory is read, measured before and after; caches are faster",
        "peak, kept: memory allocated by the first call, without compilers' processes",
        f"compiled passes are kept in {passes_folder()}, {kept_mb:.1f} MB; without it, starts are cold",
    ]
    title = f"{target.name}, {target.num_layers} layers, {target.dtype}, {context} tokens in the cache"
    return Figures(title, head, rows, notes, describe_machine(target.device))


def main() -> int:
    parser = cli.new_parser("python -m benchmarks.passes", description=__doc__)
    cli.add_model_options(parser)
    parser.add_argument("--nodes", metavar="N,N", default="1,4,8,16,32", help="nodes of target passes; default %(default)s")
    parser.add_argument("--widths", metavar="N,N", default="1,4,8", help="nodes of draft levels; default %(default)s")
    parser.add_argument("--context", type=int, default=256, help="tokens in the cache; default %(default)s")
    parser.add_argument("--repeats", type=int, default=60, help="timed turns; default %(default)s")
    parser.add_argument("--shape", metavar="NAME", help="a published target of conf/target and a draft, with random weights")
    parser.add_argument("--layers", type=int, metavar="N", help="text layers of --shape; default: as many as fit")
    parser.add_argument("--out", metavar="FILE", help="also write the table as JSON")
    text = "linear layers and attention of compiled passes with torch's kernels only"
    parser.add_argument("--torch-kernels", action="store_true", help=text)
    parser.add_argument("--small-pages", action="store_true", help="weights in pages of 4 KiB, as they are allocated")
    cli.add_dtype_option(parser, "fp32", "dtype of target and draft (default %(default)s)")
    cli.add_device_option(parser, "auto")
    args = parser.parse_args()
    if min(args.context, args.repeats) < 1:
        raise ValueError("--context, --repeats: give at least 1")
    if args.torch_kernels:
        kernels.MIN_BYTES = sys.maxsize
    if args.small_pages:
        huge_pages.MIN_BYTES = sys.maxsize
    nodes, widths = counts(args.nodes), counts(args.widths)
    if args.shape:
        target, draft = _random(args)
    else:
        path, folder = cli.find_models(args)
        device, dtype = cli.resolve_device(args.device), torch_dtype(args.dtype)
        target = sage.load_target(path, dtype=dtype, device=device, passes=PassMode.eager)
        draft = None if folder is None else sage.load_draft(folder, target)
    figures = measure(target, draft, nodes, widths, args.context, args.repeats, args.out)
    print(figures.text())
    return 0


def _random(args: argparse.Namespace) -> tuple[Any, Any]:
    """Returns a target of `--shape`, whose vision tower has one block, and an EAGLE head, both with random weights."""
    if args.target or args.draft:
        raise ValueError("--shape: has random weights; leave out --target and --draft")
    architecture = AutoConfig.for_model(**published_architecture(args.shape))
    device, dtype = cli.resolve_device(args.device), torch_dtype(args.dtype)
    limit_vision(architecture)
    limit_layers(architecture, args.layers or layers_that_fit(architecture, args.shape, dtype, device), args.shape)
    target = random_target(architecture, dtype, device)
    draft = sage.new_draft(target, "eagle", seed=0)
    draft.network.eval()
    return target, draft


def layers_that_fit(architecture: Any, name: str, dtype: torch.dtype, device: torch.device) -> int:
    """Returns the layers that fit into free memory, beside embedding, lm_head and a draft layer; ValueError if none fits."""
    available = free_bytes(device)
    if available is None:
        raise ValueError("--layers: the free memory of this system is unknown; give the number of layers")
    target = meta_target(architecture)
    total, layers = (sum(p.numel() for p in module.parameters()) for module in (target.model, target.text_model.layers))
    usable = USABLE_MEMORY * available / dtype.itemsize - (total - layers)
    fit = int(usable // (layers / target.num_layers)) - 2  # the draft: a layer, and fc of about a layer
    if fit < 1:
        raise ValueError(
            f"--shape {name}: no layer fits into the free memory of {device}; choose a smaller shape or free memory"
        )
    return min(fit, target.num_layers)


if __name__ == "__main__":
    sys.exit(cli.run(main))
