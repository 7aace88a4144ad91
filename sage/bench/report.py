"""Builds `report.json` from a measurement: settings, summary, machine, versions."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sage.bench.measurement import Measurement
from sage.bench.summary import summarize
from sage.commands.cli import versions
from sage.io.dtypes import dtype_name
from sage.io.machine import processor_name
from sage.runtime.executors import describe_passes

SCHEMA = 1
SAMPLING_KEYS = ("max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "seed")


def build_report(
    measurement: Measurement, target: Any, draft_name: str, policies: Sequence[str], **extra: Any
) -> dict[str, Any]:
    """Returns the report of one measurement.

    Args:
        policies: names of the runners to report as policies.
        extra: additional keys (step, command, options).
    """
    report = {
        "schema": SCHEMA,
        "target": display_name(target.name) + (f" ({target.quantization})" if target.quantization else ""),
        "draft": draft_name,
        "device": str(target.device),
        "dtype": dtype_name(target.dtype),
        "passes": describe_passes(target),
        "prompts": len(measurement.prompts),
        **{key: getattr(measurement.sampling, key) for key in SAMPLING_KEYS},
        "repeats": measurement.repeats,
        **({"batch_size": measurement.batch_size} if measurement.batch_size > 1 else {}),
        **summarize(measurement, target, policies),
        "machine": machine(target.device),
        "versions": versions(),
    }
    if (planned := measurement.planned) is not None:
        measured = {"prompts": len(measurement.prompts), "repeats": measurement.repeats}
        report["partial"] = {**measured, "planned_prompts": planned.prompts, "planned_repeats": planned.repeats}
    return report | extra


def display_name(name: str) -> str:
    """Returns the last part of a local folder, a hub id unchanged."""
    return Path(name).name if Path(name).is_dir() else name


def machine(device: torch.device | str) -> dict[str, Any]:
    """Returns the hardware and load of this machine; of a GPU, its memory in GiB: reserved by this process at most, free, all.

    The processor's name is followed by the vector instructions that torch uses: clouds give several generations one name.
    """
    facts: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": f"{processor_name(torch.device('cpu'))} ({torch.backends.cpu.get_cpu_capability()})",
        "cores": os.cpu_count() or 1,
        "torch_threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
    }
    if torch.device(device).type == "cuda":
        sizes = (torch.cuda.max_memory_reserved(device), *torch.cuda.mem_get_info(device))
        memory = {
            f"{name}_gib": round(size / 2**30, 2) for name, size in zip(("reserved", "free", "total"), sizes, strict=True)
        }
        facts |= {"gpu": torch.cuda.get_device_name(device), **memory}
    return facts
