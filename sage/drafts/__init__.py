"""Draft heads and how they are made, loaded and put to work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sage.drafts.eagle import EagleConfig, EagleDraft
from sage.drafts.model import ModelDraft, ModelSession, check_pair
from sage.drafts.pruning import KEEP_ALL, PruneMethod, Pruning
from sage.drafts.session import DraftSession, EagleSession
from sage.targets import Target, is_target_folder, load_target

KINDS = ("eagle",)
Draft = EagleDraft | ModelDraft


def new_draft(target: Target, kind: str = "eagle", *, seed: int | None = None, **config: Any) -> EagleDraft:
    """A draft with fresh weights, sized after its target.

    Args:
        kind: one of `KINDS`.
        seed: of the weights; None draws from torch's global generator.
        config: overrides of `EagleConfig`.

    Raises:
        ValueError: unknown kind or config key.
    """
    if kind not in KINDS:
        raise ValueError(f"draft: {kind!r} is unknown; choose one of {', '.join(KINDS)}")
    sizes = _sizes(target)
    unknown = [key for key in config if key not in {*sizes, "input_norm", "image_inputs", "initializer_range"}]
    if unknown:
        raise ValueError(f"draft.{unknown[0]}: unknown; choose from {', '.join(sorted(sizes))}, input_norm, image_inputs")
    with torch.random.fork_rng(enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        draft = EagleDraft(EagleConfig(**{**sizes, **config}))
        draft.reset_parameters()
    return draft.to(device=target.device, dtype=target.dtype)


def load_draft(path: str | Path, target: Target, dtype: torch.dtype | None = None) -> Draft:
    """Loads a draft for a target: a trained head, or a smaller target of the same family.

    Args:
        path: folder with config.json and model.safetensors.
        dtype: None = the target's.

    Raises:
        ValueError: no draft there, weights missing, or made for another target; names both sides.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ValueError(f"draft: {folder}: no draft there (config.json is missing); give a run's draft/ folder")
    if is_target_folder(folder):
        return ModelDraft(load_target(folder, dtype or target.dtype, target.device), target)
    config = EagleConfig.from_pretrained(folder)
    if config.model_type != EagleConfig.model_type or not config.target:
        raise ValueError(f"draft: {folder}: model_type {config.model_type!r} is not a draft of ours")
    _check_target(config.target, target, folder)
    draft, report = EagleDraft.from_pretrained(folder, config=config, dtype=dtype or target.dtype, output_loading_info=True)
    wrong = sorted(map(str, [*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]]))
    if wrong:
        raise ValueError(f"draft: {folder}: its weights do not fit its config: {', '.join(wrong)}; save it again")
    return draft.to(target.device).eval()


def new_session(draft: Draft, target: Target, capacity: int) -> DraftSession:
    """The draft at work on one request of at most `capacity` tokens."""
    if isinstance(draft, ModelDraft):
        return ModelSession(draft, target, capacity)
    return EagleSession(draft, target, capacity)


def check_draft(draft: Draft, target: Target) -> None:
    """Raises ValueError, naming both sides, if the draft was made for another target."""
    if isinstance(draft, ModelDraft):
        check_pair(draft.model, target)
        return
    _check_target(draft.config.target, target, draft.config._name_or_path or "the draft")


def _check_target(made_for: dict[str, Any], target: Target, where: Any) -> None:
    if made_for != target.fingerprint:
        raise ValueError(
            f"draft: {where} was made for {_describe(made_for)}, but the target is {_describe(target.fingerprint)}; "
            f"give the draft trained for this target"
        )


def _describe(fingerprint: dict[str, Any]) -> str:
    sizes = ", ".join(f"{key} {value}" for key, value in sorted(fingerprint.items()) if key != "model_type")
    return f"{fingerprint.get('model_type', 'an unknown target')} ({sizes})"


def _sizes(target: Target) -> dict[str, Any]:
    text = target.text_config
    rope = getattr(text, "rope_parameters", None) or {}
    return {
        "hidden_size": target.hidden_size,
        "intermediate_size": text.intermediate_size,
        "num_attention_heads": text.num_attention_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": text.max_position_embeddings,
        "rms_norm_eps": text.rms_norm_eps,
        "hidden_act": text.hidden_act,
        "rope_theta": rope["rope_theta"],
        "mrope_section": rope.get("mrope_section"),
        "target": target.fingerprint,
        "target_path": target.name,
    }


__all__ = [
    "KEEP_ALL",
    "KINDS",
    "Draft",
    "DraftSession",
    "EagleConfig",
    "EagleDraft",
    "EagleSession",
    "ModelDraft",
    "ModelSession",
    "PruneMethod",
    "Pruning",
    "check_draft",
    "load_draft",
    "new_draft",
    "new_session",
]
