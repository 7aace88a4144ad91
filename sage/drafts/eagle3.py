"""The EAGLE-3 draft head: three feature levels, a norm and lm_head of its own, an optional draft vocabulary.

Ref: EAGLE-3, arXiv 2503.01840, section 3. The residual stream is without `norm_before_residual`, as in all serving engines.
With `fc_norm` and `norm_output` it is EAGLE-3.1, as vLLM and SGLang compute it.

Index shift and positions are those of EAGLE (see sage.drafts.eagle): pair t = (g_t, e_{t+1}), where g_t fuses the target's
feature levels of token t; deeper in a tree the head's own output replaces g.

Shapes: B batch, T tokens, D hidden, A feature levels, V target vocabulary, U draft vocabulary.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

import torch
from torch import Tensor, nn

from sage.drafts.compressor.compressor import Compressor
from sage.drafts.eagle import EagleConfig
from sage.drafts.head import DraftHead
from sage.drafts.layer import MLP, Attention, GatedLayer, queries_of
from sage.drafts.rope import Rope
from sage.drafts.vocabulary import DraftVocabulary
from sage.targets import Features, Target


def default_levels(num_layers: int) -> list[int]:
    """Returns the default of serving engines: hidden_states[2], [n // 2] and [n - 3] of n layers; ValueError if n < 7."""
    levels = [2, num_layers // 2, num_layers - 3]
    if not 2 < levels[1] < levels[2]:
        raise ValueError(f"draft.feature_levels: a target of {num_layers} layers has no default; name three of 0..{num_layers}")
    return levels


def levels_for(target: Target) -> list[int]:
    """Returns the default levels of a target: those of serving engines, the first one above the deepstack layers.

    Engines differ in whether a level between deepstack layers contains the features that are added there.
    """
    first, *others = default_levels(target.num_layers)
    above = target.family.leading_layers + 1
    return [above if first < above < others[0] else first, *others]


class Eagle3Config(EagleConfig):
    """Configuration of an EAGLE-3 head; further arguments are those of `EagleConfig`.

    Args:
        feature_levels: the A indices k of the target's hidden_states[k] that are fused.
        draft_vocab_size: U; `vocab_size` for the complete vocabulary.
        norm_before_residual: whether the normed feature is the residual stream; only imported drafts have it.
        norm_before_fc: whether all levels are normalized together before fc; only imported drafts have it.
        fc_norm: whether each level is normalized before fc.
        norm_output: whether the next level reads the normed output, from which logits are computed, instead of the output.
    """

    model_type = "sage_eagle3"

    feature_levels: list[int] = field(default_factory=lambda: [2, 6, 9])
    draft_vocab_size: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        self.draft_vocab_size = self.draft_vocab_size or self.vocab_size
        super().__post_init__(**kwargs)


class Eagle3Layer(GatedLayer):
    """EAGLE-3's decoder layer: attention over (normed embedding, normed feature); the feature is the residual stream."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, 2 * config.hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)
        self.norm_before_residual = config.norm_before_residual

    def forward(self, embeds: Tensor, features: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None, cache: Any) -> Tensor:
        """[B, T, D] each -> [B, T, D]; [B, R, D] where the cache selects R queries.

        Mask and cache are those of `DraftLayer.forward`.
        """
        normed = self.hidden_norm(features)
        pair = torch.cat((self.input_layernorm(embeds), normed), -1)
        residual = normed if self.norm_before_residual else features
        hidden = queries_of(cache, residual) + self.self_attn(pair, rope, mask, cache)
        return self.feed_forward(hidden)


class Eagle3Draft(DraftVocabulary, DraftHead):
    """fc over the target's feature levels, one layer, norm and lm_head; the embedding is the target's and is not saved.

    Its draft vocabulary is that of `DraftVocabulary`.
    """

    config_class = Eagle3Config
    has_own_lm_head = True
    _no_split_modules = ["Eagle3Layer"]

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        size, count, eps = config.hidden_size, len(config.feature_levels), config.rms_norm_eps
        self.input_norm = nn.RMSNorm(count * size, eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(nn.RMSNorm(size, eps) for _ in range(count)) if config.fc_norm else None
        self.fc = nn.Linear(count * size, size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = nn.RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.rope = Rope(config)
        self.register_vocabulary(config)
        self.compressor = None if config.compressor is None else Compressor(config)
        self.post_init()

    @classmethod
    def with_defaults(cls, config: dict[str, Any], target: Target) -> dict[str, Any]:
        return config if "feature_levels" in config else config | {"feature_levels": levels_for(target)}

    @torch.no_grad()
    def reset_parameters(self, target: Target, vocabulary: Tensor | None = None) -> None:
        """Draws fresh weights; lm_head starts as a copy of the target's rows.

        Args:
            vocabulary: LongTensor [U], increasing target ids of the draft vocabulary; None = the first U.
        """
        self.apply(self._init_weights)
        size = self.config.hidden_size
        self.fc.weight[:, -size:] += torch.eye(size)
        ids = torch.arange(self.config.draft_vocab_size) if vocabulary is None else vocabulary
        self.set_vocabulary(ids)
        self.lm_head.weight.copy_(target.lm_head_weight[ids.to(target.device)].to(self.lm_head.weight))

    @property
    def levels(self) -> tuple[int, ...]:
        """Indices k of the target's hidden_states[k] that are fused."""
        return tuple(self.config.feature_levels)

    def fuse(self, features: Features) -> Tensor:
        """Returns g [B, T, D], fused from the target's feature levels."""
        return self.combine(torch.cat(features.levels, -1).to(self.fc.weight.dtype))

    def combine(self, levels: Tensor) -> Tensor:
        """Returns g [.., D] of feature levels side by side, [.., A * D]."""
        if self.input_norm is not None:
            levels = self.input_norm(levels)
        if self.fc_norm is not None:
            parts = levels.chunk(len(self.fc_norm), -1)
            levels = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(levels)

    def read(
        self, embeds_next: Tensor, features: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None, cache: Any
    ) -> Tensor:
        hidden = self.midlayer(embeds_next, features, rope, mask, cache)
        return self.norm(hidden) if self.config.norm_output else hidden

    def to_lm_head(self, hidden: Tensor) -> Tensor:
        """Returns the normed hidden states [.., D]."""
        return hidden if self.config.norm_output else self.norm(hidden)

    def lm_head_weight(self, target_rows: Tensor) -> Tensor:
        return self.lm_head.weight
