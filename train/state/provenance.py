"""provenance.json of a run: revision, versions, command line, data; written at its start and extended at each resume."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from checkpoints.run_folder import PROVENANCE
from sage.commands.cli import versions
from sage.io.files import write_text
from train.launch.ranks import Ranks

PACKAGES = ("sage-draft", "torch", "transformers", "deepspeed", "datasets", "hydra-core", "omegaconf", "numpy", "wandb")
GIT_TIMEOUT_S = 5


def write_provenance(
    folder: Path, ranks: Ranks, target: Any, data_fingerprint: str, from_step: int, changed: dict[str, list[Any]]
) -> None:
    """Writes `provenance.json`; when the run is resumed, appends to its `resumed` entries.

    `changed` holds the settings changed by the resume: dotted key -> [before, after].
    """
    path, installed = folder / PROVENANCE, versions(PACKAGES)
    is_cuda = ranks.device.type == "cuda"
    entry = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "from_step": from_step,
        "command": sys.argv,
        "git": git_revision(),
        "versions": {name: installed.get(name) for name in PACKAGES},
        "python": platform.python_version(),
        "host": platform.node(),
        "ranks": ranks.world_size,
        "device": torch.cuda.get_device_name(ranks.device) if is_cuda else platform.processor() or platform.machine(),
        "target": {"name": target.name, **target.fingerprint},
        "data_fingerprint": data_fingerprint,
        **({"changed": changed} if changed else {}),
    }
    previous = json.loads(path.read_text()) if path.exists() else {}
    content = {**previous, "resumed": [*previous.get("resumed", []), entry]} if previous else entry
    write_text(path, json.dumps(content, indent=1) + "\n")


def git_revision() -> dict[str, Any] | None:
    """Returns the commit and whether there are uncommitted changes; None outside a checkout of this project."""
    here = Path(__file__).resolve().parents[2]
    if not (here / ".git").exists():
        return None
    command = ["git", "-C", str(here), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        text = ""
    commit, dirty, _ = text.partition("-dirty")
    return {"commit": commit or None, "is_dirty": bool(dirty)}
