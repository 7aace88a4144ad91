"""Builds the student of a configuration, with fresh weights or from a saved draft."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

import sage
from data_prep.dataset.dataset import count_tokens, most_frequent
from sage.drafts.draft import Draft, open_draft
from sage.drafts.head import DraftHead
from sage.drafts.location import find_draft
from sage.drafts.registry import KINDS, VocabularyOptions, resolve
from train.config.draft import NO_COMPRESSOR, CompressorConfig, DraftConfig
from train.config.schema import Config, ConfigError
from train.distill.compiled_layers import draft_layers
from train.distill.student import Student
from train.launch.ranks import Ranks

logger = logging.getLogger(__name__)


def build_student(config: Config, target: sage.Target, dataset: Any, ranks: Ranks) -> Student:
    """Returns the draft in float32 with its objective: loaded from `draft.path`, or with fresh weights drawn from `seed`.

    Args:
        dataset: a reduced draft vocabulary holds its most frequent supervised tokens.

    Raises:
        ValueError: `draft.path` holds no draft, or one of another kind or for another target; the sizes do not fit.
    """
    chosen = config.draft
    if chosen.path is None:
        draft = fresh_draft(config, target, draft_vocabulary(chosen, target, dataset, ranks))
    else:
        folder = find_draft(chosen.path, "draft.path")
        draft = open_draft(folder, target, torch.float32)
        logger.info("draft: continues from %s", folder)
        check_kind(chosen, draft)
        _check_same(chosen, draft)
        if isinstance(draft, DraftHead):
            draft.assign(target)
    student = new_student(draft, config)
    student.layers = draft_layers(config, student.compilable(), target.device)
    return student


def check_kind(chosen: DraftConfig, draft: Draft) -> None:
    """Raises ConfigError if the draft in `draft.path` is not of the configured kind."""
    if draft.kind != chosen.kind:
        raise ConfigError(f"draft.path={chosen.path}: holds draft={draft.kind}, but draft={chosen.kind} is configured")


def _check_same(chosen: DraftConfig, draft: Draft) -> None:
    """Refuses a saved draft whose options contradict the configuration."""
    options = draft.options()
    saved = options.pop("compressor", None)
    for name, value in options.items():
        if hasattr(chosen, name) and value != getattr(chosen, name):
            made = str(value).lower()
            given = f"draft.{name}={getattr(chosen, name)}"
            raise ConfigError(f"{given}: {chosen.path} was made with {made}; give draft.{name}={made}")
    if draft.reads_features and compressor_options(chosen.compressor) != saved:
        kind, *numbers = (saved or {"kind": NO_COMPRESSOR}).items()
        overrides = [f"draft/compressor={kind[1]}", *(f"draft.compressor.{key}={value}" for key, value in numbers)]
        given = f"draft/compressor={chosen.compressor.kind}"
        raise ConfigError(f"{given}: {chosen.path} has another one; give {' '.join(overrides)}")


def compressor_options(chosen: CompressorConfig) -> dict[str, Any] | None:
    """Returns `compressor` as in the `config.json` of a head (see `sage.drafts.compressor`); None for none."""
    if chosen.kind is NO_COMPRESSOR:
        return None
    return {"kind": str(chosen.kind)} | {key: value for key, value in asdict(chosen).items() if key != "kind"}


def fresh_draft(config: Config, target: sage.Target, vocabulary: Tensor | None) -> Draft:
    """Returns a draft with fresh weights; on the meta device if the target is there."""
    chosen = {key: getattr(config.draft, key) for key in KINDS[config.draft.kind].keys}
    levels = chosen.get("feature_levels") or []
    if any(level > target.num_layers for level in levels):
        raise ConfigError(f"draft.feature_levels={levels}: allowed: 0 to {target.num_layers}, the target's layers; change them")
    chosen["compressor"] = compressor_options(config.draft.compressor)
    options = {key: value for key, value in chosen.items() if value is not None}
    return sage.new_draft(target, config.draft.kind, seed=config.seed, vocabulary=vocabulary, **options)


def draft_vocabulary(chosen: DraftConfig, target: sage.Target, dataset: Any, ranks: Ranks) -> Tensor | None:
    """Returns the target ids of a reduced draft vocabulary, LongTensor [U], counted on rank 0; None for the full vocabulary.

    Raises:
        ConfigError: it is larger than the target's vocabulary.
    """
    size = vocabulary_size(chosen, target)
    if size > target.vocab_size:
        raise ConfigError(f"draft.draft_vocab_size={size}: allowed: at most the target's {target.vocab_size}; give 0 for all")
    if size == target.vocab_size:
        return None
    ids = None
    if ranks.is_main:
        counts = count_tokens(dataset, target.vocab_size)
        ids = most_frequent(counts, size, end_tokens(target)).tolist()
        share = 100 * float(counts[ids].sum() / counts.sum().clamp(min=1))
        logger.info("draft vocabulary: %d of %d tokens, %.2f%% of the supervised ones", size, target.vocab_size, share)
    return torch.tensor(ranks.broadcast(ids))


def vocabulary_size(chosen: DraftConfig, target: sage.Target) -> int:
    """Returns the tokens of the draft's vocabulary."""
    return chosen.vocabulary_size(target.vocab_size) if isinstance(chosen, VocabularyOptions) else target.vocab_size


def end_tokens(target: sage.Target) -> list[int]:
    """Returns the EOS ids of the target; without them in its vocabulary, a draft would continue after the end of an answer."""
    tokenizer = target.processor.tokenizer if target.processor is not None else None
    ends = [tokenizer.eos_token_id] if tokenizer is not None and tokenizer.eos_token_id is not None else []
    return sorted({*target.eos_token_ids, *ends})


def new_student(draft: Draft, config: Config) -> Student:
    """Returns the student of a draft; its trained part is in float32 and requires gradients."""
    student: Student = resolve(KINDS[draft.kind].student).of(draft, config)
    return student
