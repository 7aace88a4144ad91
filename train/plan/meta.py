"""Target and draft of a run on the meta device: shapes and parameter counts without weights.

The architectures of the presets are in conf/target, so that a plan needs no hub.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

import sage
from sage.drafts.draft import Draft, open_draft
from sage.drafts.head import DraftHead
from sage.drafts.location import find_draft
from sage.io.files import config_dir
from sage.io.hub import require_hub
from sage.targets.loading import meta_target
from train.config.schema import Config, ConfigError, OptimizerKind, TargetConfig
from train.distill.build import check_kind, fresh_draft, new_student, vocabulary_size
from train.engine.optimizers import matrices_of


@dataclass(kw_only=True)
class MetaModels:
    """A target and its draft on the meta device.

    Attributes:
        target_parameters, vision_parameters: of the target, and of its vision tower.
        active_parameters: parameters of the target that a token uses; fewer than all in a mixture of experts.
        read_parameters: of the text layers and lm_head, which a pass over a token reads; without other rows of the embedding.
        text_parameters: of the text layers that a token uses, without embedding and lm_head.
        layers_parameters: of all text layers, which `deepspeed.shard_target` shards over the ranks.
        draft_parameters, trained_parameters: of the draft, and those that are trained.
        context_parameters: of a draft head that reads every pair, also one from which nothing is drafted; 0 without a head.
    """

    target: sage.Target
    draft: Draft

    def __post_init__(self) -> None:
        target, network, lm_head = self.target, self.draft.network, self.target.lm_head.weight
        head_parameters = int(lm_head.numel())
        own_head = 0 if lm_head is target.embed_tokens.weight else head_parameters
        self.target_parameters = count(target.model)
        self.active_parameters = target.family.active_parameters(target.model)
        self.vision_parameters = self.target_parameters - count(target.text_model) - own_head
        self.read_parameters = self.active_parameters - self.vision_parameters - own_head
        self.text_parameters = self.read_parameters - head_parameters
        self.layers_parameters = count(target.text_model.layers)
        self.draft_parameters = count(network)
        self.trained_parameters = sum(p.numel() for p in network.parameters() if p.requires_grad)
        context = network.named_parameters() if isinstance(network, DraftHead) else ()
        self.context_parameters = sum(value.numel() for name, value in context if network.is_of_context(name))

    def muon_matrices(self, config: Config) -> list[tuple[int, int]]:
        """Rows and columns of the matrices that Muon trains; empty without Muon."""
        if config.optim.kind is not OptimizerKind.muon:
            return []
        return [(matrix.shape[0], matrix.shape[1]) for matrix in matrices_of(self.draft.network)]


def count(module: nn.Module) -> int:
    """Returns the number of parameters; tied ones count once."""
    return sum(p.numel() for p in module.parameters())


def build_on_meta(config: Config) -> MetaModels:
    """Returns target and draft of a run without weights; ValueError if the draft's sizes do not fit the target."""
    target = meta_target(target_architecture(config.target))
    return MetaModels(target=target, draft=meta_draft(config, target))


def meta_draft(config: Config, target: sage.Target) -> Draft:
    """Returns the draft of `config` without weights; its trained parameters require gradients.

    Raises ValueError if `draft.path` holds no draft, or one of another kind (ConfigError) or for another target.
    """
    chosen = config.draft
    if chosen.path is None:
        size = vocabulary_size(chosen, target)
        draft = fresh_draft(config, target, None if size == target.vocab_size else torch.arange(size))
    else:
        draft = open_draft(find_draft(chosen.path, "draft.path"), target, torch.float32)
    check_kind(chosen, draft)
    return new_student(draft, config).decoding_draft


def target_architecture(target: TargetConfig) -> PreTrainedConfig:
    """Returns the configuration of a target: from a local folder, the hub's cache, conf/target, or else the hub.

    ConfigError if none of them has it.
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
