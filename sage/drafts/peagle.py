"""The P-EAGLE draft head: EAGLE-3's layer on masked inputs, so that one pass drafts all levels of a round.

Ref: P-EAGLE, arXiv 2602.01469. Differs by: the layer is that of `sage.drafts.eagle`, with the target's rope; the embedding of
the masked inputs is a parameter of the head, since the target's embedding is frozen and shared.

Pairs, index shift and positions are those of EAGLE-3 (see sage.drafts.eagle). Where EAGLE-3 would read the last drafted token
and its own output, this head reads the mask: for a prompt x0 x1 x2 with fused features g0 g1 g2, a first answer token x3, and a
block of three tokens

    pairs    (g0, e(x1)) (g1, e(x2)) (g2, e(x3))        at positions 0 1 2; the last one predicts x4
    slots    (g_mask, e_mask) (g_mask, e_mask)          at positions 3 4; they predict x5 and x6

where g_mask = fc(mask_hidden). All inputs attend to those before them. The keys and values of pairs stay in the cache, those of
slots are dropped.

Shapes: B batch, T tokens, P pairs, A rollouts, K levels, R rows of all rollouts, M slots, D hidden, L feature levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sage.drafts.eagle import Eagle3Config, Eagle3Draft
from sage.drafts.layer import DraftLayer
from sage.drafts.slots import SlotHead, mask_token_of
from sage.drafts.unroll import Rollout, steps_of_rows, visible_to_rows
from sage.targets import Target


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
    """EAGLE-3's head with further layers and the masked input of slots.

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

    def read(
        self, embeds_next: Tensor, features: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None, cache: Any
    ) -> Tensor:
        hidden = self.midlayer(embeds_next, features, rope, mask, cache)
        for layer in self.layers:
            hidden = layer(hidden, rope, mask, cache)
        return hidden

    def run_slots(
        self, embeds: Tensor, fused: Tensor, ends: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None, cache: Any
    ) -> Tensor:
        slot_embeds, slot_features = self.slots(1, self.num_slots)
        repeats, length = (1, ends.shape[0], 1), embeds.shape[1]
        embeds = torch.cat((embeds, slot_embeds.repeat(repeats)), 1)
        fused = torch.cat((fused, slot_features.repeat(repeats)), 1)
        out = self.read(embeds, fused, rope, mask, cache)[0]
        slots = out.narrow(0, length, ends.shape[0] * self.num_slots).unflatten(0, (ends.shape[0], self.num_slots))
        return torch.cat((out.index_select(0, ends)[:, None], slots), 1)

    def roll_out(
        self,
        embeds_next: Tensor,
        features: Tensor,
        position_ids: Tensor,
        roots: Tensor,
        sizes: Sequence[int],
        weight: Tensor | None = None,
    ) -> Tensor:
        batch, num_pairs, _ = embeds_next.shape
        step, rollout = steps_of_rows(sizes, roots.device)
        first = slice(sizes[0], None)
        places = (roots[:, rollout[first]] + step[first]).clamp(max=num_pairs - 1)
        positions = torch.cat((position_ids, position_ids.gather(-1, places.expand(*position_ids.shape[:-1], -1))), -1)
        slot_embeds, slot_features = self.slots(batch, places.shape[1])
        embeds, hidden = torch.cat((embeds_next, slot_embeds), 1), torch.cat((features, slot_features), 1)
        rope = self.rope(positions, embeds.dtype)
        visible = visible_to_rows(roots, sizes, num_pairs)
        slot_rows = torch.arange(num_pairs, num_pairs + places.shape[1], device=roots.device).expand(batch, -1)
        rows = [*[None] * (self.num_layers - 1), torch.cat((roots, slot_rows), 1)]
        caches = [Rollout(visible, sizes[0], of_layer, weight) for of_layer in rows]
        hidden = self.midlayer(embeds, hidden, rope, None, caches[0])
        for layer, cache in zip(self.layers, caches[1:], strict=True):
            hidden = layer(hidden, rope, None, cache)
        return hidden
