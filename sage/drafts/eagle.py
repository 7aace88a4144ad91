"""The EAGLE, EAGLE-3 and P-EAGLE draft heads.

EAGLE predicts the target's next feature from its last feature and the next token. EAGLE-3 fuses three feature levels and has a
norm and an lm_head of its own, and optionally a draft vocabulary. Its residual stream is the feature without
`norm_before_residual`, as in all serving engines; with `fc_norm` and `norm_output` it is EAGLE-3.1, as vLLM and SGLang compute
it.

Index shift, for a prompt of three tokens x0 x1 x2 whose target features are f0 f1 f2, and a first answer token x3:
    pair 0 = (f0, e(x1)) predicts f1; pair 1 = (f1, e(x2)) predicts f2; pair 2 = (f2, e(x3)) predicts f3,
    and lm_head(f3) is the distribution of x4. Pair t sits at the rope position of token t.
EAGLE-3 has pairs (g_t, e_{t+1}), where g_t fuses the target's feature levels of token t; deeper in a tree the head's own output
replaces f or g.

Ref: EAGLE, arXiv 2401.15077, section 4.1; with all visual tokens, SpecVLM, arXiv 2509.11815 (EagleVLM baseline); EAGLE-3, arXiv
2503.01840, section 3.

Shapes: B batch, T tokens, D hidden, A feature levels, V target vocabulary, U draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any

import torch
from torch import Tensor, nn

from sage.drafts.compressor import Compressor, check_compressor
from sage.drafts.head import DraftHead, HeadConfig
from sage.drafts.layer import MLP, Angles, Attention, DraftLayer, GatedLayer, Rope, queries_of
from sage.drafts.registry import ImageInputs
from sage.drafts.slots import SlotHead, mask_token_of
from sage.drafts.spans import HeadInput
from sage.drafts.unroll import Rollout, steps_of_rows, visible_to_rows
from sage.io.ranges import choose
from sage.targets import Features, Target


class EagleConfig(HeadConfig):
    """Configuration of an EAGLE head; further arguments are those of `HeadConfig`.

    Args:
        input_norm: normalize the input of the layer's attention (EagleVLM does, EAGLE-1 does not).
        image_inputs: `embed` feeds visual embeddings at image and video positions, `token` the placeholder's embedding.
        compressor: visual compressor, such as `{"kind": "pool", "ratio": 20}` (see `Compressor`); None keeps all visual tokens.
    """

    model_type = "sage_eagle"

    input_norm: bool = True
    image_inputs: str = "embed"
    compressor: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.image_inputs = str(choose("draft.image_inputs", self.image_inputs, ImageInputs))
        if self.compressor is not None:
            check_compressor(self.compressor)
        super().__post_init__(**kwargs)


class EagleDraft(DraftHead):
    """One decoder layer over fc(concat(e(x_{t+1}), f_t)); the output predicts the target's feature f_{t+1}."""

    config_class = EagleConfig
    _no_split_modules = ["DraftLayer"]

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = DraftLayer(config)
        self.rope = Rope(config)
        self.compressor = None if config.compressor is None else Compressor(config)
        self.post_init()

    @torch.no_grad()
    def reset_parameters(self, target: Target, vocabulary: Tensor | None = None) -> None:
        """Draws fresh weights: fc starts as feature + embedding and both residual blocks at zero, which learns fastest."""
        self.apply(self._init_weights)
        self.fc.weight += torch.eye(self.config.hidden_size).repeat(1, 2)
        self.layer.self_attn.o_proj.weight.zero_()
        self.layer.mlp.down_proj.weight.zero_()

    def fuse(self, features: Features) -> Tensor:
        return features.last

    def read(self, embeds_next: Tensor, features: Tensor, rope: Angles, mask: Tensor | None, cache: Any) -> Tensor:
        hidden = self.fc(torch.cat((embeds_next, features), -1))
        return self.layer(hidden, rope, mask, cache)


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

    def forward(self, embeds: Tensor, features: Tensor, rope: Angles, mask: Tensor | None, cache: Any) -> Tensor:
        """[B, T, D] each -> [B, T, D]; [B, R, D] where the cache selects R queries.

        Mask and cache are those of `DraftLayer.forward`.
        """
        normed = self.hidden_norm(features)
        pair = torch.cat((self.input_layernorm(embeds), normed), -1)
        residual = normed if self.norm_before_residual else features
        hidden = queries_of(cache, residual) + self.self_attn(pair, rope, mask, cache)
        return self.feed_forward(hidden)


class Eagle3Draft(DraftHead):
    """fc over the target's feature levels, one layer, norm and lm_head."""

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
        self.register_vocabulary()
        self.compressor = None if config.compressor is None else Compressor(config)
        self.post_init()

    @classmethod
    def with_defaults(cls, config: dict[str, Any], target: Target) -> dict[str, Any]:
        return config if "feature_levels" in config else config | {"feature_levels": levels_for(target)}

    @torch.no_grad()
    def reset_parameters(self, target: Target, vocabulary: Tensor | None = None) -> None:
        """Draws fresh weights; lm_head starts as a copy of the target's rows."""
        self.apply(self._init_weights)
        size = self.config.hidden_size
        self.fc.weight[:, -size:] += torch.eye(size)
        ids = torch.arange(self.config.draft_vocab_size) if vocabulary is None else vocabulary
        self.set_vocabulary(ids)
        self.lm_head.weight.copy_(target.lm_head_weight[ids.to(target.device)].to(self.lm_head.weight))

    def fuse(self, features: Features) -> Tensor:
        return self.combine(torch.cat(features.levels, -1).to(self.fc.weight.dtype))

    def combine(self, levels: Tensor) -> Tensor:
        """Returns g [.., D] of feature levels side by side, [.., A * D]."""
        if self.input_norm is not None:
            levels = self.input_norm(levels)
        if self.fc_norm is not None:
            chunks = levels.chunk(len(self.fc_norm), -1)
            levels = torch.cat([norm(level) for norm, level in zip(self.fc_norm, chunks, strict=True)], -1)
        return self.fc(levels)

    def read(self, embeds_next: Tensor, features: Tensor, rope: Angles, mask: Tensor | None, cache: Any) -> Tensor:
        hidden = self.midlayer(embeds_next, features, rope, mask, cache)
        return self.norm(hidden) if self.config.norm_output else hidden

    def to_lm_head(self, hidden: Tensor) -> Tensor:
        return hidden if self.config.norm_output else self.norm(hidden)

    def lm_head_weight(self, target_rows: Tensor) -> Tensor:
        return self.lm_head.weight


class PEagleConfig(Eagle3Config):
    """Configuration of a P-EAGLE head; further arguments are those of `Eagle3Config`.

    Args:
        block_size: K, tokens that a pass drafts.
        num_layers: decoder layers.
        mask_token: token whose embedding an export replaces by `mask_embedding`.
    """

    model_type = "sage_peagle"

    block_size: int = 8
    num_layers: int = 1
    mask_token: int = 0

    def __post_init__(self, **kwargs: Any) -> None:
        if self.block_size < 2:
            raise ValueError(f"draft.block_size: {self.block_size}; allowed: at least 2 tokens")
        super().__post_init__(**kwargs)


class PEagleDraft(Eagle3Draft, SlotHead):
    """EAGLE-3's head with further layers and masked inputs, so that one pass drafts all levels of a round.

    Where EAGLE-3 would read the last drafted token and its own output, slots read the mask. For the prompt x0 x1 x2 above and a
    block of three tokens, where g_mask = fc(mask_hidden):

        pairs    (g0, e(x1)) (g1, e(x2)) (g2, e(x3))        at positions 0 1 2; the last one predicts x4
        slots    (g_mask, e_mask) (g_mask, e_mask)          at positions 3 4; they predict x5 and x6

    All inputs attend to those before them. The keys and values of pairs stay in the cache, those of slots are dropped.

    Ref: P-EAGLE, arXiv 2602.01469. Differs by: the layer is that of EAGLE-3, with the target's rope; the embedding of the
    masked inputs is a parameter of the head, since the target's embedding is frozen and shared.

    Attributes:
        mask_embedding: [1, 1, D], in place of the embedding of a token.
        mask_hidden: [1, 1, L * D], in place of the target's feature levels.
    """

    config_class = PEagleConfig
    computes_tokens = True
    _no_split_modules = ["Eagle3Layer", "DraftLayer"]

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.markov_head = self.path_head = self.confidence_head = None
        self.layers = nn.ModuleList(DraftLayer(config, number) for number in range(1, config.num_layers))
        self.mask_embedding = nn.Parameter(torch.zeros(1, 1, size))
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, len(config.feature_levels) * size))
        self.post_init()

    @classmethod
    def with_defaults(cls, config: dict[str, Any], target: Target) -> dict[str, Any]:
        token = mask_token_of(target, config.get("mask_token"), is_read=True)
        return super().with_defaults(config, target) | {"mask_token": token}

    @torch.no_grad()
    def reset_parameters(self, target: Target, vocabulary: Tensor | None = None) -> None:
        """Draws fresh weights as EAGLE-3's head; further layers start as the identity."""
        super().reset_parameters(target, vocabulary)
        for layer in self.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        for mask in (self.mask_embedding, self.mask_hidden):
            mask.normal_(std=self.config.initializer_range)

    def is_of_context(self, name: str) -> bool:
        last = f"layers.{self.num_layers - 2}." if self.num_layers > 1 else "midlayer."
        return super().is_of_context(name) or ("layer" in name and not name.startswith(last))

    def slots(self, batch: int, count: int) -> tuple[Tensor, Tensor]:
        """Returns embeddings and fused features of `count` slots, [B, count, D] each."""
        return self.mask_embedding.expand(batch, count, -1), self.fc(self.mask_hidden).expand(batch, count, -1)

    def read(self, embeds_next: Tensor, features: Tensor, rope: Angles, mask: Tensor | None, cache: Any) -> Tensor:
        hidden = self.midlayer(embeds_next, features, rope, mask, cache)
        for layer in self.layers:
            hidden = layer(hidden, rope, mask, cache)
        return hidden

    def run_slots(self, embeds: Tensor, fused: Tensor, ends: Tensor, rope: Angles, mask: Tensor | None, cache: Any) -> Tensor:
        slot_embeds, slot_features = self.slots(1, self.num_slots)
        repeats, length = (1, ends.shape[0], 1), embeds.shape[1]
        embeds = torch.cat((embeds, slot_embeds.repeat(repeats)), 1)
        fused = torch.cat((fused, slot_features.repeat(repeats)), 1)
        out = self.read(embeds, fused, rope, mask, cache)[0]
        slots = out.narrow(0, length, ends.shape[0] * self.num_slots).unflatten(0, (ends.shape[0], self.num_slots))
        return torch.cat((out.index_select(0, ends)[:, None], slots), 1)

    def roll_out(self, pairs: HeadInput, roots: Tensor, sizes: Sequence[int]) -> Tensor:
        batch, num_pairs, _ = pairs.embeds_next.shape
        step, rollout = steps_of_rows(sizes, roots.device)
        first = slice(sizes[0], None)
        places = (roots[:, rollout[first]] + step[first]).clamp(max=num_pairs - 1)
        of_slots = pairs.position_ids.gather(-1, places.expand(*pairs.position_ids.shape[:-1], -1))
        positions = torch.cat((pairs.position_ids, of_slots), -1)
        slot_embeds, slot_features = self.slots(batch, places.shape[1])
        embeds, hidden = torch.cat((pairs.embeds_next, slot_embeds), 1), torch.cat((pairs.features, slot_features), 1)
        rope = self.rope(positions, embeds.dtype)
        visible = visible_to_rows(roots, sizes, num_pairs)
        slot_rows = torch.arange(num_pairs, num_pairs + places.shape[1], device=roots.device).expand(batch, -1)
        rows = [*[None] * (self.num_layers - 1), torch.cat((roots, slot_rows), 1)]
        caches = [Rollout(visible, sizes[0], of_layer, pairs.weight) for of_layer in rows]
        hidden = self.midlayer(embeds, hidden, rope, None, caches[0])
        for layer, cache in zip(self.layers, caches[1:], strict=True):
            hidden = layer(hidden, rope, None, cache)
        return hidden
