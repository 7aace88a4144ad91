"""A P-EAGLE head in decoding: its session, and its pass as a function of tensors.

Shapes: T prompt tokens, M tokens committed, S slots, K = S + 1 levels, D hidden, L feature levels, U draft vocabulary, C cache
capacity, H KV heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sage.drafts.block_passes import SlotPass
from sage.drafts.block_session import BlockSession
from sage.drafts.head_session import pairs_of_prompt
from sage.runtime.attention import tile_mask
from sage.runtime.cache import RowCache
from sage.targets import Features, Prompt, Target

if TYPE_CHECKING:
    from sage.drafts.peagle import PEagleDraft


class PEagleSession(BlockSession):
    """Session of a P-EAGLE head: the cache holds pairs, and slots have the positions of the tokens that they stand for."""

    def _positions(self, places: Tensor) -> Tensor:
        return self.target.family.decode_positions(places)

    def _read_prompt(self, prompt: Prompt, features: Features, root: Tensor) -> tuple[Tensor, Tensor]:
        draft: PEagleDraft = self.draft
        pairs = pairs_of_prompt(draft, self.target, prompt, features, root)
        length = pairs.features.shape[1]
        if length > prompt.input_ids.shape[1]:  # tiny images become longer
            self._set_capacity(self.capacity + length - prompt.input_ids.shape[1])
        self._set_origin(prompt.next_position)
        slot_embeds, slot_features = draft.slots(1, draft.num_slots)
        embeds, fused = torch.cat((pairs.embeds_next, slot_embeds), 1), torch.cat((pairs.features, slot_features), 1)
        parts = zip(draft.rope(pairs.position_ids, draft.dtype), self._rope(0, draft.num_slots), strict=True)
        cos, sin = (torch.cat(both, 2) for both in parts)
        self.cache.crop_to(0)
        hidden = draft.read(embeds, fused, (cos, sin), None, self.cache)[0, -draft.num_levels :]
        self.committed = length
        return hidden, draft.logits(hidden, self.target)


class PEaglePass(SlotPass):
    """A P-EAGLE head's pass over accepted tokens and the slots behind them."""

    draft: PEagleDraft

    def __init__(self, draft: PEagleDraft, target: Target) -> None:
        super().__init__(draft, target)
        self.lm_head, self._target = target.lm_head, target

    def forward(
        self,
        tokens: Tensor,
        last: Tensor,
        levels: Sequence[Tensor],
        cos: Tensor,
        sin: Tensor,
        slot_cos: Tensor,
        slot_sin: Tensor,
        rows: Tensor,
        slot_rows: Tensor,
        columns: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Extends the cache by M pairs and drafts from the last one.

        Args:
            tokens: LongTensor [M], the token after each of the M tokens.
            last, levels: `Features` of the M tokens, 1 + L tensors [1, M, D].
            cos, sin, slot_cos, slot_sin: rope of the M tokens and of the slots, [1, 1, M or S, d].
            rows, slot_rows: LongTensor [M] and [S], their cache rows.
            columns: LongTensor [keys], 0, 1, .. up to the last slot's row.
            keys, values: buffers of every layer, [1, H, C, d].

        Returns:
            the outputs [K, D] and logits [K, U] of the levels.
        """
        draft, config = self.draft, self.draft.config
        slot_embeds, slot_features = draft.slots(1, draft.num_slots)
        embeds = torch.cat((self.embed_tokens(tokens)[None], slot_embeds), 1)
        features = torch.cat((draft.fuse(Features(last, tuple(levels))), slot_features), 1)
        rope = (torch.cat((cos, slot_cos), 2), torch.cat((sin, slot_sin), 2))
        all_rows = torch.cat((rows, slot_rows))
        cache = RowCache(keys, values, all_rows, columns.shape[0])
        group = config.num_attention_heads // config.num_key_value_heads
        mask = tile_mask(columns <= all_rows[:, None], group, features.dtype)
        hidden = draft.read(embeds, features, rope, mask, cache)[0, -draft.num_levels :]
        return hidden, draft.logits(hidden, self._target)
