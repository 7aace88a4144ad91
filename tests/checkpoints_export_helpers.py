"""Tiny drafts of both families on disk, and the run folders they would lie in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from conftest import make_llava, make_qwen

import sage
from checkpoints.export import Allowed, Options, export
from checkpoints.export.exporting import Exported
from checkpoints.export.layout import Flavour
from sage.drafts import Head

LEVELS = [0, 1, 2]  # the tiny targets have three layers, too few for the engines' default
REDUCED = torch.arange(3, 330, 3)
TARGETS = {"qwen2_5_vl": make_qwen, "llava_onevision": make_llava}


def save_target(folder: Path, family: str = "qwen2_5_vl", seed: int = 0) -> sage.Target:
    """A tiny target saved like any other, and in memory under the name of its folder."""
    target = TARGETS[family](seed=seed)
    target.model.save_pretrained(folder)
    target.name = str(folder)
    return target


def make_draft(target: sage.Target, kind: str = "eagle3", vocabulary: torch.Tensor | None = None, **config: Any) -> Head:
    """A draft that has moved away from its start, so that no tensor is all zero, one or equal to the target's."""
    extra = {"feature_levels": LEVELS} if kind == "eagle3" else {"input_norm": False}
    draft = sage.new_draft(target, kind, seed=1, vocabulary=vocabulary, **{**extra, **config})
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=generator)
    return draft


def save_draft(folder: Path, target: sage.Target, kind: str = "eagle3", **config: Any) -> Path:
    """One of our drafts in a folder."""
    make_draft(target, kind, **config).save_pretrained(folder)
    return folder


def export_draft(draft: Path, out: Path, format_: str = "eagle3", **options: Any) -> Exported:
    """An export with everything allowed that a tiny target needs."""
    given = {"allowed": Allowed(unserved=True), **options}
    if format_ == "eagle":
        given.setdefault("flavour", Flavour.vllm)
    return export(draft, out, format_, Options(**given))


def edit_json(path: Path, change: Any) -> None:
    """Lets `change` alter a JSON file's content."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content, indent=2) + "\n")
