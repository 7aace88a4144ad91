"""Draft heads and how they are made, loaded and put to work."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage.drafts.eagle import EagleConfig, EagleDraft
from sage.drafts.eagle3 import Eagle3Config, Eagle3Draft, default_levels
from sage.drafts.model import ModelDraft, ModelSession, check_pair, shallow_model
from sage.drafts.pruning import KEEP_ALL, PruneMethod, Pruning
from sage.drafts.session import DraftSession, EagleSession
from sage.model_files import load_weights, read_config
from sage.targets import Target, is_target_folder, load_target

KINDS = ("eagle", "eagle3")
Head = EagleDraft | Eagle3Draft
Draft = Head | ModelDraft


def new_draft(
    target: Target, kind: str = "eagle", *, seed: int | None = None, vocabulary: Tensor | None = None, **config: Any
) -> Head:
    """A draft with fresh weights, sized after its target. For a smaller model see `shallow_model`.

    Args:
        kind: one of `KINDS`.
        seed: of the weights; None draws from torch's global generator. On a target without weights (on the meta device) the
            draft has none either.
        vocabulary: LongTensor [U], for `eagle3`: increasing target ids the draft may say; None = all.
        config: overrides of `EagleConfig` or `Eagle3Config`.

    Raises:
        ValueError: unknown kind or config key, or attention heads that key and value heads do not divide.
    """
    if kind not in KINDS:
        raise ValueError(f"draft: {kind!r} is unknown; choose one of {', '.join(KINDS)}")
    sizes = _sizes(target)
    known = {*sizes, "image_inputs", "compressor", "initializer_range", "feature_levels" if kind == "eagle3" else "input_norm"}
    unknown = [key for key in config if key not in known]
    if unknown:
        raise ValueError(f"draft.{unknown[0]}: unknown; choose from {', '.join(sorted(known))}")
    if vocabulary is not None and kind != "eagle3":
        raise ValueError(f"draft: a reduced vocabulary belongs to eagle3, not to {kind}, which borrows the target's lm_head")
    sizes |= config
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    if heads % kv_heads:
        raise ValueError(
            f"draft.num_attention_heads={heads}: allowed: a multiple of draft.num_key_value_heads={kv_heads}; change one "
            f"(a size that is not given is the target's)"
        )
    with torch.random.fork_rng(enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        with torch.device("meta") if _is_meta(target) else nullcontext():
            draft = _build(target, kind, sizes, vocabulary)
    return draft.to(device=target.device, dtype=target.dtype)


def _build(target: Target, kind: str, config: dict[str, Any], vocabulary: Tensor | None) -> Head:
    if kind == "eagle":
        head = EagleDraft(EagleConfig(**config))
        if not _is_meta(target):
            head.reset_parameters(target)
        return head
    if "feature_levels" not in config:
        config["feature_levels"] = default_levels(target.num_layers)
    size = target.vocab_size if vocabulary is None else len(vocabulary)
    head3 = Eagle3Draft(Eagle3Config(draft_vocab_size=size, **config))
    if not _is_meta(target):
        head3.reset_parameters(target, vocabulary)
    return head3


def _is_meta(target: Target) -> bool:
    """Whether the target has shapes only, as in the plan of a run."""
    return target.device.type == "meta"


def load_draft(path: str | Path, target: Target, dtype: torch.dtype | None = None) -> Draft:
    """Loads a draft for a target: a trained head, or a smaller target of the same family.

    Args:
        path: folder with config.json and model.safetensors.
        dtype: None = the target's; a head, which reads the target's features, takes no other.

    Raises:
        ValueError: no draft there, a damaged one, a head in another dtype, or one made for another target; names both sides.
    """
    draft = open_draft(path, target, dtype or target.dtype)
    if not isinstance(draft, ModelDraft) and draft.dtype != target.dtype:
        raise ValueError(
            f"draft: {path}: in {draft.dtype}, but it reads the features of a target in {target.dtype}; leave dtype out"
        )
    return draft


def open_draft(path: str | Path, target: Target, dtype: torch.dtype) -> Draft:
    """`load_draft` in any dtype: training keeps a head in float32 beside a target in bfloat16.

    Raises:
        ValueError: as `load_draft`, but for the dtype.
    """
    folder = Path(path)
    stored = read_config(folder)
    if is_target_folder(folder):
        return ModelDraft(load_target(folder, dtype, target.device), target)
    kinds: dict[str, Any] = {head.config_class.model_type: head for head in (EagleDraft, Eagle3Draft)}
    kind = kinds.get(str(stored.get("model_type")))
    if kind is None or not stored.get("target"):
        raise ValueError(f"draft: {folder}: model_type {stored.get('model_type')!r} is not a draft of ours")
    _check_target(stored["target"], target, folder)
    draft: Head = load_weights(kind, folder, "draft", dtype=dtype)
    return draft.to(target.device).eval()


def new_session(draft: Draft, target: Target, capacity: int) -> DraftSession:
    """The draft at work on one request of at most `capacity` tokens."""
    if isinstance(draft, ModelDraft):
        return ModelSession(draft, target, capacity)
    return EagleSession(draft, target, capacity)


def check_draft(draft: Draft, target: Target, pruning: Pruning = KEEP_ALL) -> None:
    """Raises ValueError if the draft was made for another target, naming both sides, or cannot read a pruned prompt."""
    if isinstance(draft, ModelDraft):
        if draft.target is not target:  # comparing whole vocabularies takes as long as a dozen passes
            check_pair(draft.model, target)
        return
    _check_target(draft.config.target, target, draft.config._name_or_path or "the draft")
    if pruning.ratio and draft.compressor is not None:
        kind = draft.config.compressor["kind"]
        raise ValueError(
            f"pruning.ratio: {pruning.ratio}; allowed: 0 for a draft with a compressor ({kind}), which was trained on whole "
            f"pictures; drop it"
        )


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
    "Eagle3Config",
    "Eagle3Draft",
    "EagleConfig",
    "EagleDraft",
    "EagleSession",
    "Head",
    "ModelDraft",
    "ModelSession",
    "PruneMethod",
    "Pruning",
    "check_draft",
    "load_draft",
    "new_draft",
    "new_session",
    "open_draft",
    "shallow_model",
]
