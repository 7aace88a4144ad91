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

Shapes: B batch, T context tokens, A anchors, S slots, R = A * S, K levels, M tokens committed, N nodes, D hidden, L feature
levels, U draft vocabulary, V target vocabulary, H query heads, C key heads, G = H / C, d head size, r rank of the conditional.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from sage.drafts.block_heads import ConfidenceHead, Feed, MarkovHead, PathHead
from sage.drafts.config import HeadConfig
from sage.drafts.eagle3 import levels_for
from sage.drafts.layer import MLP, FusedLinear, GatedLayer, rotate
from sage.drafts.options import Conditional
from sage.drafts.rollout import masked_attention, steps_of_rows, visible_to_rows
from sage.drafts.rope import Rope
from sage.drafts.slots import SlotHead, mask_token_of
from sage.drafts.unroll import at_rows
from sage.drafts.vocabulary import DraftVocabulary
from sage.runtime.attention import packed_attention
from sage.runtime.cache import PackedCache, tile_mask
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
        if self.conditional not in tuple(Conditional):
            raise ValueError(f"draft.conditional: {self.conditional!r} is not one of {', '.join(Conditional)}")
        self.conditional = str(self.conditional)
        if self.block_size < 2:
            raise ValueError(f"draft.block_size: {self.block_size}; allowed: at least 2 slots")
        super().__post_init__(**kwargs)

    @property
    def predicts_from_anchor(self) -> bool:
        """Whether slot k predicts token k + 1 after the anchor; else slot 0 predicts nothing, and slot k token k (DFlash)."""
        return self.feed or self.conditional != Conditional.none

    @property
    def num_levels(self) -> int:
        """K, the tokens that a block predicts."""
        return self.block_size - (not self.predicts_from_anchor)


class BlockAttention(nn.Module):
    """Grouped-query attention of slots to the context and to one another, with normalized queries and keys (Qwen3's)."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        size, self.head_dim = config.hidden_size, config.head_dim
        heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(size, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, size, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps)
        self.key_value = FusedLinear(self.k_proj, self.v_proj)

    def forward(
        self, context: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor, cache: Cache | None, layer: int
    ) -> Tensor:
        """Returns [B, R, D]; arguments as of `BlockDraft.run`."""
        cos, sin = rope
        slots = hidden.shape[1]
        query = rotate(self.q_norm(self._heads(self.q_proj(hidden))), cos[:, :, -slots:], sin[:, :, -slots:])
        key, value = self._heads(self.key_value(torch.cat((context, hidden), 1))).chunk(2, 1)
        key = rotate(self.k_norm(key), cos, sin)
        if cache is not None:
            key, value = cache.update(key, value, layer)
        if cache is None:
            out = masked_attention(query, key, value, mask)
        elif isinstance(cache, PackedCache) and cache.queries is not None:
            out = packed_attention(query, key, value, mask, cache.queries).transpose(1, 2)
        else:
            folded = query.reshape(len(query), self.kv_heads, -1, self.head_dim)
            out = nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=mask).reshape(query.shape)
        return self.o_proj(out.transpose(1, 2).reshape(*hidden.shape[:2], -1))

    def _heads(self, states: Tensor) -> Tensor:
        """[B, R, H * d] -> [B, H, R, d]."""
        return states.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class BlockLayer(GatedLayer):
    """A decoder layer of slots. The fused context enters keys and values alone, the same in every layer."""

    compilable = ()

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = BlockAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, context: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor, cache: Cache | None, layer: int
    ) -> Tensor:
        """[B, R, D] -> [B, R, D]; arguments as of `BlockDraft.run`."""
        hidden = hidden + self.self_attn(context, self.input_layernorm(hidden), rope, mask, cache, layer)
        return self.feed_forward(hidden)


class BlockDraft(DraftVocabulary, SlotHead):
    """fc over the target's feature levels, layers of slots, norm; embedding and lm_head are the target's and are not saved.

    With `feed`, slots start as the target's last feature, and the output replaces the next one as input of the lm_head, as in
    EAGLE: neither the fused feature nor the output is normalized.

    `mask_embedding` [D] is a copy of the target's embedding of `config.mask_token`, set when the draft is created or loaded.
    """

    config_class = BlockConfig
    _no_split_modules = ["BlockLayer"]
    compressor = None
    computes_tokens = False

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.fc = nn.Linear(len(config.feature_levels) * size, size, bias=False)
        self.hidden_norm = nn.Identity() if config.feed else nn.RMSNorm(size, config.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_layers))
        self.norm = nn.Identity() if config.feed else nn.RMSNorm(size, config.rms_norm_eps)
        self.feed = Feed(config) if config.feed else None
        has_conditional = config.conditional != Conditional.none
        self.markov_head = MarkovHead(config) if config.conditional == Conditional.markov else None
        self.path_head = PathHead(config) if config.conditional == Conditional.mlp else None
        rank = config.conditional_rank if has_conditional else 0
        self.confidence_head = ConfidenceHead(size + rank) if config.confidence else None
        self.rope = Rope(config)
        self.register_vocabulary(config)
        self.register_buffer("mask_embedding", torch.zeros(size), persistent=False)
        self.mask_embedding: Tensor
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
        own = {"feature_levels": levels, "mask_token": token, "causal": bool(config.get("feed")) if causal is None else causal}
        rope = {"mrope_section": None, "mrope_interleaved": False}
        return {key: value for key, value in config.items() if key != "compressor"} | own | rope

    @torch.no_grad()
    def reset_parameters(self, target: Target, vocabulary: Tensor | None = None) -> None:
        """Draws fresh weights: fc starts with the last level (alone, with feed), feed with its inputs, layers and conditional
        with zero.

        Args:
            vocabulary: LongTensor [U], increasing target ids of the draft vocabulary; None = the first U.
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
        """Copies the embedding of the mask token."""
        token = torch.tensor([self.config.mask_token], device=target.device)
        self.mask_embedding.copy_(target.embed_tokens(token)[0])

    @property
    def num_slots(self) -> int:
        return int(self.config.block_size)

    @property
    def num_levels(self) -> int:
        return int(self.config.num_levels)

    @property
    def is_causal(self) -> bool:
        return bool(self.config.causal)

    def placed(self, prompt: Prompt) -> Prompt:
        """Returns the prompt with the indices of its tokens as positions."""
        length = prompt.input_ids.shape[1]
        steps = torch.arange(length + 1, device=prompt.input_ids.device)
        return replace(prompt, position_ids=steps[None, :length], next_position=steps[length:])

    def decode_positions(self, positions: Tensor, target: Target) -> Tensor:
        return positions[None]

    @property
    def levels(self) -> tuple[int, ...]:
        return tuple(self.config.feature_levels)

    def options(self) -> dict[str, Any]:
        names = ("block_size", "num_layers", "conditional", "conditional_rank", "feed", "causal", "confidence")
        return {name: getattr(self.config, name) for name in names}

    def fuse(self, features: Features) -> Tensor:
        """Returns the context [B, T, D], fused from the target's feature levels."""
        *others, last = features.levels
        if self.feed is not None:
            others = [nn.functional.rms_norm(level, level.shape[-1:], eps=self.config.rms_norm_eps) for level in others]
        return self.hidden_norm(self.fc(torch.cat((*others, last), -1).to(self.fc.weight.dtype)))

    def slots(self, anchors: Tensor, context: Tensor) -> Tensor:
        """Returns the inputs of blocks, [B, A, S, D].

        Args:
            anchors: [B, A, D], embeddings of the anchors.
            context: [B, A, D], `fuse(..)` of the token before each.
        """
        if self.feed is not None:
            slots: Tensor = self.feed(anchors, context)
            return slots
        masks = self.mask_embedding.expand(*anchors.shape[:-1], self.num_slots - 1, -1)
        return torch.cat((anchors[..., None, :], masks), -2)

    def run(
        self, context: Tensor, slots: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor, cache: Cache | None = None
    ) -> Tensor:
        """Runs the layers over slots.

        Args:
            context: [B, T, D], `fuse(..)` of the tokens to read; in decoding those that the cache does not hold yet.
            slots: [B, R, D], of one or more blocks.
            rope: cos and sin of context and slots, [B or 1, 1, T + R, d] each.
            mask: additive; without a cache [B, 1, R, T + R], with one [1, 1, G * R, keys], rows ordered like folded heads.
            cache: of all layers, to extend by context and slots.

        Returns:
            [B, R, D], before the final norm.
        """
        for number, layer in enumerate(self.layers):
            slots = layer(context, slots, rope, mask, cache, number)
        return slots

    def at_levels(self, slots: Tensor) -> Tensor:
        """Returns the input [.., K, D] of the lm_head for the output [.., S, D] of blocks."""
        return self.norm(slots[..., self.num_slots - self.num_levels :, :])

    def run_slots(
        self, embeds: Tensor, fused: Tensor, ends: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None, cache: Any
    ) -> Tensor:
        assert mask is not None, "slots that attend to one another need a mask"
        slots = self.slots(embeds.index_select(1, ends), fused.index_select(1, ends)).flatten(1, 2)
        return self.at_levels(self.run(fused, slots, rope, mask, cache)[0].unflatten(0, (ends.shape[0], self.num_slots)))

    def roll_out(
        self,
        embeds_next: Tensor,
        features: Tensor,
        position_ids: Tensor,
        roots: Tensor,
        sizes: Sequence[int],
        weight: Tensor | None = None,
    ) -> Tensor:
        """Drafts from several pairs, as of `SlotHead`; `position_ids` are not read, and `weight` is None."""
        return self.read_blocks(features, roots + 1, at_rows(embeds_next, roots, 1), sizes)

    def read_blocks(self, context: Tensor, anchors: Tensor, embeds: Tensor, sizes: Sequence[int]) -> Tensor:
        """Runs the blocks of several anchors over complete sequences, for training.

        Args:
            context: [B, T, D], `fuse(..)` of complete, right-padded sequences.
            anchors: LongTensor [B, A], number of context tokens before each anchor, at least 1; the anchor has this position.
            embeds: [B, A, D], embeddings of the anchors.
            sizes: as of `roll_out`.

        Returns:
            as `roll_out`.
        """
        sizes = [sizes[0]] * (self.num_slots - self.num_levels) + list(sizes)
        blocks = self.slots(embeds, at_rows(context, anchors - 1, 1)).unbind(2)
        slots = torch.cat([slot[:, :count] for slot, count in zip(blocks, sizes, strict=True)], 1)
        step, block = steps_of_rows(sizes, anchors.device)
        steps = torch.arange(context.shape[1], device=anchors.device).expand(len(anchors), -1)
        rope = self.rope(torch.cat((steps, anchors[:, block] + step), 1), context.dtype)
        visible = visible_to_rows(anchors - 1, sizes, context.shape[1], is_root_slot=True, is_causal=self.is_causal)
        hidden = self.run(context, slots, rope, tile_mask(visible, 1, context.dtype))
        return self.norm(hidden[:, sum(sizes[: self.num_slots - self.num_levels]) :])
