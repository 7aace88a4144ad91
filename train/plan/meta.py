"""Target and draft of a run on the meta device: shapes and parameter counts without a byte of weights.

Owns: where a target's architecture is read from. Does not own: what follows from it (train.plan.memory).

The architectures of the presets are in `architectures.json` beside this file, so that a plan needs no hub.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig

import sage
from sage.drafts import Draft, DraftHead, ModelDraft
from sage.drafts.registry import head_kind
from sage.model_files import read_config
from sage.targets import is_target_folder
from train.config.schema import Config, ConfigError
from train.distill.build import check_kind, fresh_draft, new_student

PRESETS = Path(__file__).with_name("architectures.json")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A target and its draft on the meta device. `draft` is the head, or the whole smaller model."""

    target: sage.Target
    draft: nn.Module

    @cached_property
    def target_parameters(self) -> int:
        return count(self.target.model)

    @cached_property
    def vision_parameters(self) -> int:
        text = count(self.target.text_model) + (0 if _is_tied(self.target) else self.target.lm_head.weight.numel())
        return self.target_parameters - text

    @cached_property
    def layers_parameters(self) -> int:
        """Of all text layers: what a sharded target spreads over the ranks."""
        return count(self.target.text_model.layers)

    @cached_property
    def draft_parameters(self) -> int:
        return count(self.draft)

    @cached_property
    def trained_parameters(self) -> int:
        return sum(p.numel() for p in self.draft.parameters() if p.requires_grad)


def _is_tied(target: sage.Target) -> bool:
    return target.lm_head.weight is target.embed_tokens.weight


def count(module: nn.Module) -> int:
    """Parameters, tied ones once."""
    return sum(p.numel() for p in module.parameters())


def build_on_meta(config: Config) -> Pair:
    """The target and the draft of a run, without weights.

    Raises:
        ConfigError: the target's architecture is not at hand.
        ValueError: the draft's sizes do not fit the target.
    """
    target = meta_target(target_architecture(config.target.path, config.target.revision))
    return Pair(target=target, draft=meta_draft(config, target))


def meta_target(architecture: PreTrainedConfig) -> sage.Target:
    """A target without weights."""
    with torch.device("meta"):
        return sage.Target(AutoModelForImageTextToText.from_config(architecture))


def meta_draft(config: Config, target: sage.Target) -> nn.Module:
    """The draft `config` asks for, without weights, its trained part marked: fresh, or sized as the one in `draft.path`.

    Raises:
        ConfigError: `draft.path` holds no draft of that kind.
    """
    chosen = config.draft
    if chosen.path is None:
        size = getattr(chosen, "draft_vocab_size", None)
        found: Draft = fresh_draft(config, target, None if size is None else torch.arange(size))
    elif is_target_folder(chosen.path):
        found = ModelDraft(meta_target(AutoConfig.from_pretrained(chosen.path)), target)
    else:
        found = _meta_head(Path(chosen.path))
    check_kind(chosen, found)
    trained: nn.Module = new_student(found, config).draft
    return trained


def _meta_head(folder: Path) -> DraftHead:
    sizes = read_config(folder)
    kind = head_kind(sizes.get("model_type"))
    if kind is None:
        raise ConfigError(f"draft.path={folder}: config.json is not that of a draft head; give a run's draft/ folder")
    head = kind.draft_class()
    with torch.device("meta"):
        found: DraftHead = head(head.config_class(**sizes))
    return found


def target_architecture(path: str, revision: str | None = None) -> PreTrainedConfig:
    """A target's configuration: of its folder, of the hub's cache, of our presets, else from the hub itself.

    Raises:
        ConfigError: none of them has it.
    """
    options: dict[str, Any] = {} if revision is None else {"revision": revision}
    if Path(path).expanduser().is_dir():
        return _read(path, {})
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, **options)
    except OSError:
        pass
    preset = json.loads(PRESETS.read_text(encoding="utf-8")).get(path)
    if preset is not None and revision is None:
        return AutoConfig.for_model(**preset)
    return _read(path, options)


def _read(path: str, options: dict[str, Any]) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(path, **options)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(f"target.path={path}: cannot read its config.json ({first})") from error
