"""This machine: its cores, processor and free memory, and what results kept on disk depend on besides models."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

PASSES = ("sage.drafts", "sage.runtime", "sage.targets")  # packages whose code computes passes


def environment(device: torch.device, *modules: str) -> dict[str, Any]:
    """Returns what a result of passes on `device` depends on: versions, processor, source of `PASSES` and `modules`."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "source": source_digest(*PASSES, *modules),
        "device": device.type,
        "threads": torch.get_num_threads(),
        "instructions": instructions(device),
    }


@cache
def source_digest(*names: str) -> str:
    """Returns a digest of the source files of packages and modules, 32 hexadecimal digits; imports are not followed.

    A result that is kept on disk is valid while the code that computed it is the same. ValueError for an unknown name.
    """
    paths: set[Path] = set()
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ValueError(f"{name}: no module of this name")
        path = Path(spec.origin)
        paths |= set(path.parent.rglob("*.py")) if path.name == "__init__.py" else {path}
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def instructions(device: torch.device) -> str:
    """Describes the processor that code is generated for."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    flags = _cpuinfo("flags", "Features") or platform.processor()
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {flags}"


def processor_name(device: torch.device) -> str:
    """Returns the name of the GPU or the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _cpuinfo("model name") or platform.processor() or "unknown"


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(available_cores())


def available_cores() -> list[int]:
    """Returns the numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def pin(pid: int, cores: Collection[int]) -> None:
    """Lets a process, 0 for this one, run on these cores only; no effect where that is not possible, as on macOS."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(pid, cores)


def free_bytes(device: torch.device) -> int | None:
    """Returns the free memory of a device, or of this machine; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


@cache
def _cpuinfo(*names: str) -> str:
    """Returns the first value in /proc/cpuinfo under one of these names; empty without one."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")
