"""Builds the student of a configuration, from fresh weights or a saved draft.

Owns: configuration -> student. Does not own: a kind's architecture (sage.drafts) or how it reads pairs (train.distill.student).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sage
from checkpoints.export.writing import refuse_damaged
from data_prep.dataset.vocabulary import count_tokens, most_frequent
from sage.drafts import Draft, ModelDraft, open_draft
from sage.drafts.options import ModelOptions, TrainedPart
from sage.drafts.registry import KINDS, StudentKind
from train.config.draft import CompressorConfig, CompressorKind, DraftConfig
from train.config.schema import Config, ConfigError
from train.distill.objective import Objective
from train.distill.student import HeadStudent, ModelStudent, Student
from train.launch.ranks import Ranks

logger = logging.getLogger(__name__)


def build_student(config: Config, target: sage.Target, dataset: Any, ranks: Ranks) -> Student:
    """The draft in float32 with its objective: loaded from `draft.path`, or fresh from `seed`, the same on every rank.

    Args:
        dataset: whose supervised tokens a reduced draft vocabulary is counted from.

    Raises:
        ValueError: `draft.path` holds no draft, one of another kind, or one made for another target; sizes do not fit.
    """
    chosen = config.draft
    if chosen.path is None:
        draft = fresh_draft(config, target, draft_vocabulary(chosen, target, dataset, ranks))
    else:
        refuse_damaged(Path(chosen.path))
        draft = open_draft(chosen.path, target, torch.float32)
        check_kind(chosen, draft)
        _check_same(chosen, draft)
    return new_student(draft, config)


def check_kind(chosen: DraftConfig, draft: Draft) -> None:
    """Raises ConfigError if the draft in `draft.path` is not of the configured kind."""
    if draft.kind != chosen.kind:
        raise ConfigError(f"draft.path={chosen.path}: holds draft={draft.kind}, but draft={chosen.kind} is asked for")


def _check_same(chosen: DraftConfig, draft: Any) -> None:
    """What a saved head was made with must be what the configuration says."""
    if isinstance(draft, ModelDraft):
        return
    for name in ("image_inputs", "input_norm"):
        if hasattr(chosen, name) and getattr(draft.config, name) != getattr(chosen, name):
            made = str(getattr(draft.config, name)).lower()
            raise ConfigError(
                f"draft.{name}={getattr(chosen, name)}: {chosen.path} was made with {made}; give draft.{name}={made}"
            )
    made_with = getattr(draft.config, "compressor", None)
    if compressor_options(chosen.compressor) != made_with:
        kind, *numbers = (made_with or {"kind": CompressorKind.none}).items()
        words = " ".join([f"draft/compressor={kind[1]}", *(f"draft.compressor.{key}={value}" for key, value in numbers)])
        raise ConfigError(f"draft/compressor={chosen.compressor.kind}: {chosen.path} was made with another; give {words}")


def compressor_options(chosen: CompressorConfig) -> dict[str, Any] | None:
    """A head's own way of writing its compressor (see `sage.drafts.compressor.compressor`); None for none."""
    if chosen.kind is CompressorKind.none:
        return None
    return {"kind": str(chosen.kind)} | {key: value for key, value in asdict(chosen).items() if key != "kind"}


def fresh_draft(config: Config, target: sage.Target, vocabulary: Tensor | None) -> Draft:
    """A draft with fresh weights; on a target without weights, the meta device's, it has none either."""
    chosen = {key: getattr(config.draft, key) for key in KINDS[config.draft.kind].keys}
    levels = chosen.get("feature_levels") or []
    if any(level > target.num_layers for level in levels):
        raise ConfigError(f"draft.feature_levels={levels}: allowed: 0 to {target.num_layers}, the target's layers; change them")
    chosen["compressor"] = compressor_options(config.draft.compressor)
    options = {key: value for key, value in chosen.items() if value is not None}
    return sage.new_draft(target, config.draft.kind, seed=config.seed, vocabulary=vocabulary, **options)


def draft_vocabulary(chosen: DraftConfig, target: sage.Target, dataset: Any, ranks: Ranks) -> Tensor | None:
    """The words a draft with a reduced vocabulary may say, counted by rank 0; None for all.

    Raises:
        ConfigError: more words than the target has.
    """
    size: int | None = getattr(chosen, "draft_vocab_size", None)
    if size is None:
        return None
    if size > target.vocab_size:
        raise ConfigError(f"draft.draft_vocab_size={size}: allowed: at most the target's {target.vocab_size}; drop it for all")
    if size == target.vocab_size:
        return None
    ids = ranks.share(_count(size, target, dataset) if ranks.is_main else None)
    return torch.tensor(ids)


def _count(size: int, target: sage.Target, dataset: Any) -> list[int]:
    counts = count_tokens(dataset, target.vocab_size)
    ids = most_frequent(counts, size, end_tokens(target))
    share = float(counts[ids].sum() / counts.sum().clamp(min=1))
    logger.info("draft vocabulary: %d of %d words, %.2f%% of the supervised tokens", size, target.vocab_size, 100 * share)
    found: list[int] = ids.tolist()
    return found


def end_tokens(target: sage.Target) -> list[int]:
    """The tokens an answer may end with; a draft that cannot say them drafts past every end."""
    tokenizer = target.processor.tokenizer if target.processor is not None else None
    own = [tokenizer.eos_token_id] if tokenizer is not None and tokenizer.eos_token_id is not None else []
    return sorted({*target.eos_token_ids, *own})


def build_objective(config: Config) -> Objective:
    """The loss."""
    chosen = asdict(config.objective)
    del chosen["feature_noise"]
    return Objective(**chosen)


def new_student(draft: Draft, config: Config) -> Student:
    """The student of a draft, its trained part in float32 and marked."""
    return STUDENTS[KINDS[config.draft.kind].student](draft, config)


def _head_student(draft: Any, config: Config) -> Student:
    return HeadStudent(draft.float().train().requires_grad_(True), build_objective(config), config.objective.feature_noise)


def _model_student(draft: Any, config: Config) -> Student:
    assert isinstance(config.draft, ModelOptions)
    model, part = draft.model, config.draft.train_part
    parts = {
        TrainedPart.layers: [model.text_model.layers, model.text_model.norm],
        TrainedPart.text: [model.text_model, model.lm_head],
        TrainedPart.all: [model.model],
    }
    model.model.float().train()
    for module in parts[part]:
        module.requires_grad_(True)
    return ModelStudent(draft, build_objective(config))


STUDENTS: dict[StudentKind, Callable[[Any, Config], Student]] = {
    StudentKind.head: _head_student,
    StudentKind.model: _model_student,
}
