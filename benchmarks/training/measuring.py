"""Peak memory on a CPU or a GPU, ratios of paired times, and the machine; the clock is in sage.runtime.timing."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

from sage.bench.report import machine

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
GIB = 2**30
RESET_PEAK = "5"  # see proc(5)


def ratio_spread(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Returns the median of the ratios of paired times, and the bounds of all but the lowest and highest tenth."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return median(ratios), ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]


def reset_peak(device: torch.device) -> int:
    """Resets the peak and returns the bytes allocated now; raises ValueError on systems that do not report a peak."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return allocated(device)
    ctypes.CDLL(None).malloc_trim(0)  # freed blocks kept by the allocator would hide later allocations
    try:
        CLEAR.write_text(RESET_PEAK)
    except OSError as error:
        raise ValueError(f"{CLEAR}: cannot be written ({error}); peak memory on a CPU is measured on Linux only") from error
    return allocated(device)


def allocated(device: torch.device) -> int:
    """Returns the number of bytes allocated now."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _resident("VmRSS")


def peak(device: torch.device) -> int:
    """Returns the largest number of bytes allocated since `reset_peak`."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _resident("VmHWM")


def _resident(name: str) -> int:
    line = next(line for line in STATUS.read_text(encoding="ascii").splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


def describe_machine(device: torch.device) -> str:
    """Returns `2 CPU cores, 1 thread(s), load 0.5, torch 2.13.0`, or the name and memory of the GPU."""
    facts = machine(device)
    where = f"{facts['cores']} CPU cores, {torch.get_num_threads()} thread(s)"
    if device.type == "cuda":
        where = "{gpu}, {reserved_gib} GiB reserved at most, {free_gib} of {total_gib} GiB free".format(**facts)
    return f"{where}, load {facts['load_average']:.1f}, torch {torch.__version__}"
