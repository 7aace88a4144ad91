"""Random pocket targets and untrained drafts in the layout of `benchmarks.papers`; no run is trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml
from support.train_helpers import make_target

import sage
from benchmarks.papers import runs
from benchmarks.papers.runs import QUICK, Settings, load_settings
from sage.drafts.model import shallow_model

FAMILIES = {"qwen": "qwen2_5_vl", "qwen3": "qwen3_vl", "llava": "llava_onevision"}
PART = {"target": "qwen", "budget": "time", "seed": 0}
LEVELS = {"feature_levels": [0, 1, 2]}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {  # by the first word of a run's name
    "eagle3": ("eagle3", LEVELS),
    "peagle": ("peagle", LEVELS),
    "dflash": ("block", {**LEVELS, "feed": False, "conditional": "none"}),
    "dspark": ("block", {**LEVELS, "feed": False, "conditional": "markov"}),
    "block": ("block", LEVELS),
}
COMPRESSORS = {"compressor_pool": {"kind": "pool", "ratio": 4}}


def tiny_world(where: Path) -> Path:
    """Creates targets, settings and runs below `where`; returns the path of the settings."""
    targets = {name: str(make_target(where, family)) for name, family in FAMILIES.items()}
    small = {
        "runs_dir": str(where / "runs"),
        "docs_dir": str(where / "docs"),
        "max_new_tokens": 10,
        "targets": targets,
        "families": ["caption"],
        "policies": {"families": ["caption"]},
        "entropy": {"prompts": 1, "families": ["caption"], "lags": 2},
        "calibration": {"rounds": 2, "prompts": 1, "families": ["caption"]},
        "compressor": {"runs": ["compressor_none", "compressor_pool"], "policies": ["chain"]},
        "length": {"lengths": [4, 8], "edges": [0, 4]},
        "pruning": {"families": ["caption"]},
        "engines": {"python": str(where / "no_engines" / "python")},
        "regimes": {"megabytes": [4, 8], "threads": 1},
        "drafts": {"parts": [PART, {**PART, "megabytes": 8, "threads": 1, "prompts": 2}]},
        "projection": {"shapes": ["qwen2_5_vl_7b"], "contexts": [1024], "policies": ["chain", "cost_aware"]},
    }
    path = where / "tiny.yaml"
    path.write_text(yaml.safe_dump(small), encoding="utf-8")
    make_runs(load_settings(QUICK, path))
    return path


def make_runs(settings: Settings) -> None:
    """Creates every run of the settings, as sage-train would leave it."""
    targets = {name: sage.load_target(path, dtype=torch.float32) for name, path in settings.targets.items()}
    for name in settings.training.runs:
        target = targets[settings.training.runs[name].target]
        folder = runs.run_folder(settings, name)
        save_draft(name, target, folder / runs.DRAFT)
        save_history(folder)
        (folder / runs.MARKER).write_text(runs.run_digest(settings, name), encoding="utf-8")


def save_draft(name: str, target: sage.Target, folder: Path) -> None:
    """Saves an untrained draft of the run's kind."""
    if name.startswith("model"):
        shutil.copytree(target.name, folder)  # tokenizer and image processor of a target
        shallow_model(target, 1).model.model.save_pretrained(folder)
        return
    kind, extra = KINDS.get(name.partition("_")[0], ("eagle", {}))
    if name in COMPRESSORS:
        extra = {"compressor": COMPRESSORS[name]}
    sage.new_draft(target, kind, seed=0, **extra).save_pretrained(folder)


def save_history(folder: Path, curve: tuple[float, ...] = (1.5, 2.0)) -> None:
    """Saves metrics and one validation per epoch."""
    lines = [{"step": step, "time_s": 1.0 * step, "tokens": 100 * step} for step in range(1, len(curve) + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    for step, tokens in enumerate(curve, start=1):
        figures = {"tokens_per_target_pass": tokens, "mean_accepted_draft": tokens - 1, "speedup": tokens / 2}
        counts = {"match": 2, "total": 2, "rounds": 9}
        at = folder / "validation" / f"step_{step:08d}" / "report.json"
        at.parent.mkdir(parents=True)
        at.write_text(json.dumps({"schema": 1, "prompts": 2, "policies": {"static": figures | counts}}), encoding="utf-8")
