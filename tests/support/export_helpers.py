"""Saves tiny targets and drafts of both families, and run folders that contain them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.models import EAGLE_3_1, MAKERS, random_draft
from support.train_helpers import policy_figures

import sage
from checkpoints.export.exporter import ExportOptions, ExportResult, export
from checkpoints.export.formats import find_format
from checkpoints.store import StateStore
from sage.drafts.head import DraftHead
from sage.io.manifest import write_manifest

LEVELS = [0, 1, 2]  # the tiny targets have three layers, too few for the engines' default
REDUCED = torch.arange(3, 330, 3)
MASK = 7
BLOCK: dict[str, Any] = {"feature_levels": [1, 2], "feed": False, "conditional": "none", "block_size": 4, "mask_token": MASK}
MARKOV = BLOCK | {"conditional": "markov", "conditional_rank": 6, "confidence": True}
PEAGLE: dict[str, Any] = {"block_size": 4, "num_layers": 2, "mask_token": MASK, "image_inputs": "token"}
FP32 = {"dtype": torch.float32}
EXPORTS: dict[str, tuple[str, dict[str, Any], torch.Tensor | None, str, dict[str, Any]]] = {
    # name: kind of draft, its configuration, its vocabulary, format, options of the export
    "eagle3": ("eagle3", {}, REDUCED, "eagle3", {}),
    "speculators": ("eagle3", EAGLE_3_1, REDUCED, "speculators", {}),
    "vllm": ("eagle", {}, None, "eagle", {"flavour": "vllm"}),
    "sglang": ("eagle", {}, None, "eagle", {"flavour": "sglang"}),
    "plugin": ("eagle", {"input_norm": True}, None, "eagle", {"flavour": "plugin"}),
    "plain": ("block", BLOCK, None, "dflash", FP32),
    "reduced": ("block", BLOCK | {"num_layers": 2, "causal": True}, REDUCED, "dflash", FP32),
    "native": ("block", BLOCK, None, "dflash", FP32 | {"flavour": "native"}),
    "dspark": ("block", MARKOV, REDUCED, "dspark", FP32),
    "peagle": ("peagle", PEAGLE | {"feature_levels": LEVELS}, None, "peagle", FP32),
    "peagle_two": ("peagle", PEAGLE | {"feature_levels": [0, 2]}, REDUCED, "peagle", FP32),
}
outputs = find_format("eagle3").outputs  # of an EAGLE-3 draft on the fixed batch


def save_target(folder: Path, family: str = "qwen2_5_vl", seed: int = 0) -> sage.Target:
    """Saves a tiny target and returns it under the name of its folder."""
    target = MAKERS[family](seed=seed)
    target.model.save_pretrained(folder)
    target.name = str(folder)
    return target


def make_draft(target: sage.Target, kind: str = "eagle3", **config: Any) -> DraftHead:
    """Returns a random draft that engines serve for a target of three layers."""
    extra: dict[str, Any] = {"eagle": {"input_norm": False}, "eagle3": {"feature_levels": LEVELS}}.get(kind, {})
    draft: DraftHead = random_draft(target, kind, seed=1, **{**extra, **config})
    return draft


def save_draft(folder: Path, target: sage.Target, kind: str = "eagle3", **config: Any) -> Path:
    make_draft(target, kind, **config).save_pretrained(folder)
    return folder


def export_draft(folder: Path, out: Path, format_: str = "eagle3", **options: Any) -> ExportResult:
    """Exports a draft with the options that a tiny target needs."""
    given = {"allow_unserved": True, **options}
    if format_ == "eagle":
        given.setdefault("flavour", "vllm")
    return export(folder, out, format_, ExportOptions(**given))


def edit_json(path: Path, change: Any) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content, indent=2) + "\n")


def save_run(folder: Path, target: sage.Target, scores: dict[int, float], **draft: Any) -> Path:
    """Saves a run folder with validations at some steps, the best draft and one state.

    Args:
        scores: step -> tokens per target pass of the policy `sage`.
    """
    steps = {"draft": max(scores, default=1), "draft_best": max(scores, key=scores.__getitem__, default=1)}
    for name, step in steps.items():
        write_manifest(save_draft(folder / name, target, **draft), step)
    (folder / "config.yaml").write_text(RECIPE)
    git = {"commit": "0123abc", "is_dirty": True}
    known = {
        "started": "2026-11-20T00:00:00",
        "data_fingerprint": "f00d",
        "git": git,
        "versions": {"torch": "2.13", "wandb": None},
    }
    known["target"] = {"name": target.name, **target.fingerprint}
    (folder / "provenance.json").write_text(json.dumps(known))
    for step, score in scores.items():
        at = folder / "validation" / f"step_{step:08d}"
        at.mkdir(parents=True)
        policies = {"autoregressive": policy_figures(1.0), "sage": policy_figures(score)}
        settings = {"prompts": 4, "max_new_tokens": 64, "temperature": 0.0, "seed": 0, "device": "cpu", "dtype": "float32"}
        (at / "report.json").write_text(json.dumps({"schema": 1, "target": "tiny", **settings, "policies": policies}))
    store = StateStore(folder / "state")
    (store.begin(max(scores, default=1)) / "trainer.json").write_text("{}")
    store.commit(max(scores, default=1))
    return folder


Damage = Callable[[Path], object]  # of the folder of an export


def change_config(*path: str, **changes: Any) -> Damage:
    """Changes fields of config.json, or of the part of it at `path`; `...` removes them."""

    def apply(folder: Path) -> None:
        def change(content: dict[str, Any]) -> None:
            for part in path:
                content = content[part]
            content.update(changes)
            for key in [key for key, value in changes.items() if value is ...]:
                del content[key]

        edit_json(folder / "config.json", change)

    return apply


def change_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:

    def apply(folder: Path) -> None:
        content = load_file(folder / "model.safetensors")
        change(content)
        save_file({name: tensor.contiguous() for name, tensor in content.items()}, folder / "model.safetensors")

    return apply


def drop(name: str) -> Damage:
    return change_tensors(lambda tensors: tensors.pop(name))


def put(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return change_tensors(lambda tensors: tensors.update({name: value(tensors[name])}))


def add(name: str, *shape: int) -> Damage:
    return change_tensors(lambda tensors: tensors.update({name: torch.ones(shape, dtype=torch.bfloat16)}))


def copy_export(source: Path, out: Path) -> Path:
    shutil.copytree(source, out)
    (out / "manifest.json").unlink()
    return out


RECIPE = """
seed: 3
launch: {gpus: 8, ranks: null, timeout_s: 7200}
draft: {kind: eagle3, path: /home/me/other, feature_levels: [0, 1, 2]}
optim: {lr: 0.001, grad_clip: 1.0}
train: {max_steps: 300, epochs: null}
objective: {ce_weight: 0.1}
data: {sources: {llava: {path: /home/me/data}}, max_length: 2048, cache_dir: /home/me/cache}
"""
