"""The block draft head: a few layers that predict all levels of a round in one pass.

Ref: DFlash, arXiv 2602.06036, section 3 (context keys and values from fused features, one block of slots); DSpark, arXiv
2607.05147 (prediction from the anchor, markov head, confidence head). Differs by: `feed`, with which slots are functions of the
last fused feature and the anchor's embedding, and the conditional `mlp`, which corrects a slot's hidden state by the last two
tokens. Tensors are named as in the `dflash` and `dspark` formats of speculators.

The anchor is the last token that the target emitted; its own feature is not known yet. For tokens x0 x1 x2 with features
f0 f1 f2, the anchor x3 and a block of three slots:

    context             f0 f1 f2        keys and values of every layer, at positions 0 1 2
    slots               x3  mask mask   at positions 3 4 5; attend to the context and to one another
    predict             x4  x5   x6     (DFlash: the anchor's slot predicts nothing, and the others x4 x5)

Positions are indices in the sequence, also for a target with M-RoPE.

Shapes: B batch, T context tokens, A anchors, S slots, R = A * S, K levels, D hidden, L feature levels, U draft vocabulary, G
query heads per key head, d head size, r rank of the conditional.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from sage.drafts.conditional import ConfidenceHead, MarkovHead, PathHead
from sage.drafts.eagle import levels_for
from sage.drafts.head import HeadConfig
from sage.drafts.layer import MLP, Angles, Attention, GatedLayer, Rope, rotate
from sage.drafts.registry import Conditional
from sage.drafts.slots import SlotHead, mask_token_of
from sage.drafts.spans import HeadInput
from sage.drafts.unroll import at_rows, steps_of_rows, visible_to_rows
from sage.io.ranges import choose
from sage.runtime.cache import tile_mask
from sage.targets import Features, Prompt, Target


class BlockConfig(HeadConfig):
    """Configuration of a block head; further arguments are those of `HeadConfig`.

    Args:
        feature_levels: the L indices k of the target's hidden_states that are fused.
        draft_vocab_size: U; `vocab_size` for the complete vocabulary.
        mask_token: token whose embedding fills the slots after the anchor's.
        block_size, num_layers, conditional, conditional_rank, feed, causal, confidence: as of `BlockOptions`.
    """

    model_type = "sage_block"

    feature_levels: list[int] = field(default_factory=lambda: [2, 6, 9, 12])
    draft_vocab_size: int | None = None
    block_size: int = 8
    num_layers: int = 1
    conditional: str = Conditional.none
    conditional_rank: int = 128
    feed: bool = False
    causal: bool = False
    confidence: bool = False
    mask_token: int = 0

    def __post_init__(self, **kwargs: Any) -> None:
        self.draft_vocab_size = self.draft_vocab_size or self.vocab_size
        self.conditional = str(choose("draft.conditional", self.conditional, Conditional))
        if self.block_size < 2:
            raise ValueError(f"draft.block_size: {self.block_size}; allowed: at least 2 slots")
        super().__post_init__(**kwargs)

    @property
    def num_levels(self) -> int:
        """K, the tokens that a block predicts: slot k token k + 1 after the anchor, or in DFlash token k, slot 0 none."""
        return self.block_size - (not self.feed and self.conditional == Conditional.none)


class BlockAttention(Attention):
    """Attention of slots to the context and to one another, with normalized queries and keys (Qwen3's)."""

    compilable = ()

    def __init__(self, config: BlockConfig, layer: int) -> None:
        super().__init__(config, config.hidden_size, layer)
        self.q_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(  # type: ignore[override]
        self, context: Tensor, hidden: Tensor, rope: Angles, mask: Tensor, cache: Cache | None
    ) -> Tensor:
        """Returns [B, R, D]; arguments as of `BlockDraft.run`."""
        of_slots = (angles[:, :, -hidden.shape[1] :] for angles in rope)
        query = rotate(self.q_norm(self._heads(self.q_proj(hidden))), *of_slots)
        both = torch.cat((context, hidden), 1)
        key, value = (self._heads(proj(both)) for proj in (self.k_proj, self.v_proj))
        return self.attend(query, rotate(self.k_norm(key), *rope), value, mask, cache)


class BlockLayer(GatedLayer):
    """A decoder layer of slots. The fused context enters keys and values alone, the same in every layer."""

    compilable = ()

    def __init__(self, config: BlockConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = BlockAttention(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, context: Tensor, hidden: Tensor, rope: Angles, mask: Tensor, cache: Cache | None) -> Tensor:
        """[B, R, D] -> [B, R, D]; arguments as of `BlockDraft.run`."""
        return self.feed_forward(hidden + self.self_attn(context, self.input_layernorm(hidden), rope, mask, cache))


class Feed(nn.Module):
    """The inputs of slots as functions of the last fused feature and the anchor's embedding: one of the anchor's slot, one that
    the other slots share, and a learned vector of each slot.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        size = config.hidden_size
        self.feature = nn.Linear(size, 2 * size, bias=False)
        self.anchor = nn.Linear(size, 2 * size, bias=False)
        self.slot = nn.Parameter(torch.zeros(config.block_size, size))

    @torch.no_grad()
    def start_with_inputs(self) -> None:
        """Adds the identity to the maps: every slot starts as feature + embedding."""
        for linear in (self.feature, self.anchor):
            linear.weight += torch.eye(self.slot.shape[1]).repeat(2, 1)

    def forward(self, anchors: Tensor, context: Tensor) -> Tensor:
        """Returns [B, A, S, D]; arguments as of `BlockDraft.slots`."""
        both = (self.anchor(anchors) + self.feature(context)).unflatten(-1, (2, -1))
        others = both[..., 1:, :].expand(*anchors.shape[:-1], len(self.slot) - 1, -1)
        return torch.cat((both[..., :1, :], others), -2) + self.slot


class BlockDraft(SlotHead):
    """fc over the target's feature levels, layers of slots, norm; the lm_head is the target's and is not saved, either.

    With `feed`, slots start as the target's last feature, and the output replaces the next one as input of the lm_head, as in
    EAGLE: neither the fused feature nor the output is normalized.

    `mask_embedding` [D] is a copy of the target's embedding of `config.mask_token`, set when the draft is created or loaded.
    """

    config_class = BlockConfig
    _no_split_modules = ["BlockLayer"]
    compressor = None
    computes_tokens = False
    mask_embedding: Tensor

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.fc = nn.Linear(len(config.feature_levels) * size, size, bias=False)
        self.hidden_norm = nn.Identity() if config.feed else nn.RMSNorm(size, config.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(config, number) for number in range(config.num_layers))
        self.norm = nn.Identity() if config.feed else nn.RMSNorm(size, config.rms_norm_eps)
        self.feed = Feed(config) if config.feed else None
        self.markov_head = MarkovHead(config) if config.conditional == Conditional.markov else None
        self.path_head = PathHead(config) if config.conditional == Conditional.mlp else None
        rank = 0 if config.conditional == Conditional.none else config.conditional_rank
        self.confidence_head = ConfidenceHead(size + rank) if config.confidence else None
        self.rope = Rope(config)
        self.register_vocabulary()
        self.register_buffer("mask_embedding", torch.zeros(size), persistent=False)
        self.post_init()

    @classmethod
    def with_defaults(cls, config: dict[str, Any], target: Target) -> dict[str, Any]:
        if config.get("compressor") is not None:
            raise ValueError("draft.compressor: a block head reads the features of every visual token; drop it")
        levels = config.get("feature_levels")
        if not levels:
            levels = [*([0] if config.get("feed") else levels_for(target)), target.num_layers]
        token = mask_token_of(target, config.get("mask_token"))
        causal = config.get("causal")
        chosen = {
            "feature_levels": levels,
            "mask_token": token,
            "causal": bool(config.get("feed") if causal is None else causal),
        }
        rope = {"mrope_section": None, "mrope_interleaved": False}
        return {key: value for key, value in config.items() if key != "compressor"} | chosen | rope

    @torch.no_grad()
    def reset_parameters(self, target: Target, vocabulary: Tensor | None = None) -> None:
        """Draws fresh weights: fc starts with the last level (alone, with feed), feed with its inputs, layers and conditional
        with zero.
        """
        self.apply(self._init_weights)
        size = self.config.hidden_size
        if self.feed is not None:
            self.fc.weight.zero_()
        self.fc.weight[:, -size:] += torch.eye(size)
        for layer in self.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        if self.feed is not None:
            self.feed.start_with_inputs()
        if self.markov_head is not None:
            self.markov_head.markov_w2.weight.zero_()
        if self.path_head is not None:
            self.path_head.reset_parameters()
        self.set_vocabulary(torch.arange(self.config.draft_vocab_size) if vocabulary is None else vocabulary)
        self.borrow(target)

    @torch.no_grad()
    def borrow(self, target: Target) -> None:
        token = torch.tensor([self.config.mask_token], device=target.device)
        self.mask_embedding.copy_(target.embed_tokens(token)[0])

    def placed(self, prompt: Prompt) -> Prompt:
        length = prompt.input_ids.shape[1]
        steps = torch.arange(length + 1, device=prompt.input_ids.device)
        return replace(prompt, position_ids=steps[None, :length], next_position=steps[length:])

    def decode_positions(self, positions: Tensor, target: Target) -> Tensor:
        return positions[None]

    def fuse(self, features: Features) -> Tensor:
        *others, last = features.levels
        if self.feed is not None:
            others = [nn.functional.rms_norm(level, level.shape[-1:], eps=self.config.rms_norm_eps) for level in others]
        return self.hidden_norm(self.fc(torch.cat((*others, last), -1).to(self.fc.weight.dtype)))

    def slots(self, anchors: Tensor, context: Tensor) -> Tensor:
        """Returns the inputs [B, A, S, D] of blocks from the anchors' embeddings and `fuse(..)` before them, [B, A, D]."""
        if self.feed is not None:
            return self.feed(anchors, context)
        masks = self.mask_embedding.expand(*anchors.shape[:-1], self.num_slots - 1, -1)
        return torch.cat((anchors[..., None, :], masks), -2)

    def run(self, context: Tensor, slots: Tensor, rope: Angles, mask: Tensor, cache: Cache | None = None) -> Tensor:
        """Runs the layers over slots [B, R, D] of one or more blocks; returns [B, R, D], before the final norm.

        Args:
            context: [B, T, D], `fuse(..)` of the tokens to read; in decoding those that the cache does not hold yet.
            rope: cos and sin of context and slots, [B or 1, 1, T + R, d] each.
            mask: additive; without a cache [B, 1, R, T + R], with one [1, 1, G * R, keys], rows ordered like folded heads.
            cache: of all layers, to extend by context and slots.
        """
        for layer in self.layers:
            slots = layer(context, slots, rope, mask, cache)
        return slots

    def run_slots(self, embeds: Tensor, fused: Tensor, ends: Tensor, rope: Angles, mask: Tensor | None, cache: Any) -> Tensor:
        assert mask is not None, "slots that attend to one another need a mask"
        slots = self.slots(embeds.index_select(1, ends), fused.index_select(1, ends)).flatten(1, 2)
        hidden = self.run(fused, slots, rope, mask, cache)[0].unflatten(0, (ends.shape[0], self.num_slots))
        return self.norm(hidden[..., self.num_slots - self.num_levels :, :])

    def roll_out(self, pairs: HeadInput, roots: Tensor, sizes: Sequence[int]) -> Tensor:
        return self.read_blocks(pairs.features, roots + 1, at_rows(pairs.embeds_next, roots, 1), sizes)

    def read_blocks(self, context: Tensor, anchors: Tensor, embeds: Tensor, sizes: Sequence[int]) -> Tensor:
        """As `roll_out`, from anchors at positions [B, A], at least 1, with embeddings [B, A, D]; `context` [B, T, D]."""
        sizes = [sizes[0]] * (self.num_slots - self.num_levels) + list(sizes)
        blocks = self.slots(embeds, at_rows(context, anchors - 1, 1)).unbind(2)
        slots = torch.cat([slot[:, :count] for slot, count in zip(blocks, sizes, strict=True)], 1)
        step, block = steps_of_rows(sizes, anchors.device)
        steps = torch.arange(context.shape[1], device=anchors.device).expand(len(anchors), -1)
        rope = self.rope(torch.cat((steps, anchors[:, block] + step), 1), context.dtype)
        visible = visible_to_rows(anchors - 1, sizes, context.shape[1], is_root_slot=True, is_causal=self.is_causal)
        hidden = self.run(context, slots, rope, tile_mask(visible, 1, context.dtype))
        return self.norm(hidden[:, sum(sizes[: self.num_slots - self.num_levels]) :])
