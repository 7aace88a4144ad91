"""Builds `report.json` from a measurement: settings, summary, machine, versions."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from sage.bench.measurement import Measurement
from sage.bench.summary import summarize
from sage.io.dtypes import dtype_name
from sage.io.machine import processor_name

SCHEMA = 1
SAMPLING_KEYS = ("max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "seed")
PACKAGES = ("sage-draft", "torch", "transformers")


def build_report(
    measurement: Measurement, target: Any, draft_name: str, policies: Sequence[str], **extra: Any
) -> dict[str, Any]:
    """Returns the report of one measurement.

    Args:
        policies: names of the runners to report as policies.
        extra: additional keys (step, command, options); ValueError for a key that belongs to the report itself.
    """
    report = {
        "schema": SCHEMA,
        "target": display_name(target.name),
        "draft": draft_name,
        "device": str(target.device),
        "dtype": dtype_name(target.dtype),
        "prompts": len(measurement.prompts),
        **{key: getattr(measurement.sampling, key) for key in SAMPLING_KEYS},
        "repeats": measurement.repeats,
        **_partial(measurement),
        **summarize(measurement, target, policies),
        "machine": machine(target.device),
        "versions": versions(),
    }
    if taken := sorted(report.keys() & extra.keys()):
        raise ValueError(f"report: {', '.join(taken)} is set by the measurement; use another key")
    return report | extra


def _partial(measurement: Measurement) -> dict[str, Any]:
    """Returns the section `partial` of an interrupted measurement: prompts and repeats measured and planned."""
    planned = measurement.planned
    if planned is None:
        return {}
    measured = {"prompts": len(measurement.prompts), "repeats": measurement.repeats}
    return {"partial": {**measured, "planned_prompts": planned.prompts, "planned_repeats": planned.repeats}}


def display_name(name: str) -> str:
    """Returns the last part of a local folder, a hub id unchanged."""
    return Path(name).name if Path(name).is_dir() else name


def machine(device: torch.device | str) -> dict[str, Any]:
    """Returns the hardware and load of this machine."""
    facts: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": processor_name(torch.device("cpu")),
        "cores": os.cpu_count() or 1,
        "torch_threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
    }
    if torch.device(device).type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
    return facts


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Returns installed versions, `python` first; packages that are not installed are omitted."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
