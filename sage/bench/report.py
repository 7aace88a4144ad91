"""One dictionary in the schema of `report.json`, from a measurement: also what `python -m sage.bench` writes."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from sage.bench.measurement import Measurement
from sage.bench.summary import summarize
from sage.dtypes import dtype_name

SCHEMA = 1
PACKAGES = ("sage-draft", "torch", "transformers")


def build_report(
    measurement: Measurement, target: Any, draft_name: str, policies: Sequence[str], **extra: Any
) -> dict[str, Any]:
    """The report of one measurement; `extra` adds keys (step, command, options) and may not replace any.

    Raises:
        ValueError: a key of `extra` is one of the report's own.
    """
    sampling = measurement.sampling
    report = {
        "schema": SCHEMA,
        "target": display_name(target.name),
        "draft": draft_name,
        "device": str(target.device),
        "dtype": dtype_name(target.dtype),
        "prompts": len(measurement.prompts),
        "max_new_tokens": sampling.max_new_tokens,
        "min_new_tokens": sampling.min_new_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "repeats": measurement.repeats,
        **summarize(measurement, target, policies),
        "machine": machine(target.device),
        "versions": versions(),
    }
    if taken := sorted(report.keys() & extra.keys()):
        raise ValueError(f"report: {', '.join(taken)} is filled in by the measurement itself")
    return report | extra


def display_name(name: str) -> str:
    """A local folder by its last part, a hub id as it is."""
    return Path(name).name if Path(name).is_dir() else name


def machine(device: torch.device | str) -> dict[str, Any]:
    """What the figures were measured on: a reader needs it before believing a tokens-per-second."""
    facts: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 1,
        "torch_threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
    }
    if torch.device(device).type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
    return facts


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Installed versions, `python` first; a package that is not installed is left out."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def write_json(report: Mapping[str, Any], path: Path) -> None:
    """Write atomically: a reader sees the old file or the whole new one. NaN and infinity are refused."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(report, indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write to a temporary name beside `path`, flush to disk, rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"
