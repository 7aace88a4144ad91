"""Target and draft of a run on the meta device: shapes and parameter counts without weights.

The architectures of the presets are in conf/target, so that a plan needs no hub.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

import sage
from sage.drafts.head import DraftHead
from sage.drafts.loading import Draft
from sage.drafts.location import find_draft
from sage.drafts.model import ModelDraft
from sage.drafts.registry import head_kind
from sage.io.files import config_dir
from sage.io.hub import require_hub
from sage.io.model_files import read_config
from sage.targets import is_target_folder
from sage.targets.families import family_of
from train.config.schema import Config, ConfigError, TargetConfig
from train.distill.build import check_kind, fresh_draft, new_student


@dataclass(frozen=True, kw_only=True)
class MetaModels:
    """A target and its draft on the meta device. `draft` is the head, or the complete smaller model."""

    target: sage.Target
    draft: nn.Module

    @cached_property
    def target_parameters(self) -> int:
        return count(self.target.model)

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that a token uses; fewer than all in a mixture of experts."""
        return self.target.family.active_parameters(self.target.model)

    @cached_property
    def vision_parameters(self) -> int:
        is_tied = self.target.lm_head.weight is self.target.embed_tokens.weight
        text = count(self.target.text_model) + (0 if is_tied else self.target.lm_head.weight.numel())
        return self.target_parameters - text

    @cached_property
    def layers_parameters(self) -> int:
        """Parameters of all text layers, which `deepspeed.shard_target` shards over the ranks."""
        return count(self.target.text_model.layers)

    @cached_property
    def draft_parameters(self) -> int:
        return count(self.draft)

    @cached_property
    def trained_parameters(self) -> int:
        return sum(p.numel() for p in self.draft.parameters() if p.requires_grad)

    @property
    def levels(self) -> tuple[int, ...]:
        """Hidden states of the target that the draft reads beside the last feature."""
        return tuple(getattr(self.draft, "levels", ()))

    @property
    def has_own_lm_head(self) -> bool:
        """Whether the draft trains an lm_head of its own; EAGLE borrows the target's."""
        return hasattr(self.draft, "lm_head")


def count(module: nn.Module) -> int:
    """Returns the number of parameters; tied ones count once."""
    return sum(p.numel() for p in module.parameters())


def build_on_meta(config: Config) -> MetaModels:
    """Returns target and draft of a run without weights.

    Raises:
        ConfigError: the target's architecture is not available.
        ValueError: the draft's sizes do not fit the target.
    """
    target = meta_target(target_architecture(config.target))
    return MetaModels(target=target, draft=meta_draft(config, target))


def meta_target(architecture: PreTrainedConfig) -> sage.Target:
    """Returns a target without weights."""
    with torch.device("meta"):
        return sage.Target(family_of(architecture).auto_class.from_config(architecture))


def meta_draft(config: Config, target: sage.Target) -> nn.Module:
    """Returns the draft of `config` without weights; its trained parameters require gradients.

    Raises:
        ConfigError: `draft.path` holds no draft of that kind.
    """
    chosen = config.draft
    if chosen.path is None:
        size = getattr(chosen, "draft_vocab_size", None)
        draft: Draft = fresh_draft(config, target, None if size is None else torch.arange(size))
    elif is_target_folder(folder := find_draft(chosen.path, "draft.path")):
        draft = ModelDraft(meta_target(AutoConfig.from_pretrained(folder)), target)
    else:
        draft = _meta_head(folder)
    check_kind(chosen, draft)
    return new_student(draft, config).draft


def _meta_head(folder: Path) -> DraftHead:
    sizes = read_config(folder)
    kind = head_kind(sizes.get("model_type"))
    if kind is None:
        raise ConfigError(f"draft.path={folder}: config.json is not that of a draft head; give a run's draft/ folder")
    head_class = kind.draft_class()
    with torch.device("meta"):
        return head_class(head_class.config_class(**sizes))


def target_architecture(target: TargetConfig) -> PreTrainedConfig:
    """Returns the configuration of a target: from a local folder, the hub's cache, conf/target, or else the hub.

    Raises:
        ConfigError: none of them has it.
    """
    path, revision = target.path, target.revision
    options: dict[str, Any] = {} if revision is None else {"revision": revision}
    if Path(path).expanduser().is_dir():
        return _read(path, {})
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, **options)
    except OSError:
        pass
    if revision is None and (shipped := shipped_architectures().get(path)):
        return AutoConfig.for_model(**shipped)
    return _read(path, options)


@cache
def shipped_architectures() -> dict[str, dict[str, Any]]:
    """Returns hub id -> `target.architecture` of the files in conf/target, whatever the name of the chosen target."""
    files = [OmegaConf.load(path) for path in sorted((config_dir() / "target").glob("*.yaml"))]
    targets: list[Any] = [OmegaConf.to_container(file) for file in files]
    return {target["path"]: target["architecture"] for target in targets if "architecture" in target}


def _read(path: str, options: dict[str, Any]) -> PreTrainedConfig:
    require_hub(path, "target.path")
    try:
        return AutoConfig.from_pretrained(path, **options)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(f"target.path={path}: cannot read its config.json ({first})") from error
