"""A P-EAGLE head in decoding: its session, and its pass as a function of tensors.

Shapes: T prompt tokens, M tokens committed, S slots, K = S + 1 levels, D hidden, L feature levels, U draft vocabulary, C cache
capacity, H KV heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sage.drafts.block_passes import JointSlotPass, SlotPass, join_slots
from sage.drafts.block_session import BlockSession
from sage.drafts.head_session import pairs_of_prompt
from sage.runtime.attention import tile_mask
from sage.runtime.cache import RowCache
from sage.runtime.joint import Call, layout, layout_arguments, row_of
from sage.runtime.pass_function import ALL_NODES, JointFunction
from sage.runtime.shared_cache import JointCache, JointQueries
from sage.targets import Features, Prompt, Target

if TYPE_CHECKING:
    from sage.drafts.peagle import PEagleDraft


class PEagleSession(BlockSession):
    """Session of a P-EAGLE head: the cache holds pairs, and slots have the positions of the tokens that they stand for."""

    def _set_origin(self, length: int, position: Tensor) -> None:
        steps = torch.arange(self.capacity, device=position.device)
        positions = self.target.family.decode_positions(position + steps)
        self.cos, self.sin = self.draft.rope(positions, self.dtype)
        self.offset = 0

    def _read_prompt(self, prompt: Prompt, features: Features, root: Tensor) -> Sequence[Tensor]:
        draft: PEagleDraft = self.draft
        pairs = pairs_of_prompt(draft, self.target, prompt, features, root)
        length = pairs.features.shape[1]
        if length > prompt.input_ids.shape[1]:  # tiny images become longer
            self._set_capacity(self.capacity + length - prompt.input_ids.shape[1])
        self._set_origin(length, prompt.next_position)
        slot_embeds, slot_features = draft.slots(1, draft.num_slots)
        embeds, fused = torch.cat((pairs.embeds_next, slot_embeds), 1), torch.cat((pairs.features, slot_features), 1)
        parts = zip(draft.rope(pairs.position_ids, self.dtype), self._rope(0, draft.num_slots), strict=True)
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
        self.lm_head = target.lm_head

    def _new_joint(self) -> JointFunction | None:
        return JointPEaglePass(self.draft, self._target)

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
        draft = self.draft
        slot_embeds, slot_features = draft.slots(1, draft.num_slots)
        embeds = torch.cat((self.embed_tokens(tokens)[None], slot_embeds), 1)
        features = torch.cat((draft.fuse(Features(last, tuple(levels))), slot_features), 1)
        rope = (torch.cat((cos, slot_cos), 2), torch.cat((sin, slot_sin), 2))
        all_rows = torch.cat((rows, slot_rows))
        cache = RowCache(keys, values, all_rows, columns.shape[0])
        mask = tile_mask(columns <= all_rows[:, None], self._group, features.dtype)
        hidden = draft.read(embeds, features, rope, mask, cache)[0, -draft.num_levels :]
        return hidden, draft.logits(hidden, self._target)


class JointPEaglePass(JointSlotPass):
    """A P-EAGLE head's pass over the tokens and slots of several requests.

    Shapes: T tokens, R requests, B cache rows, N tokens and slots of a request at most.
    """

    draft: PEagleDraft

    def __init__(self, draft: PEagleDraft, target: Target) -> None:
        super().__init__(draft, target, layout_arguments(ALL_NODES))
        self.lm_head = target.lm_head

    def _layout(self, calls: Sequence[Call], counts: Sequence[int], num_rows: int) -> Sequence[Tensor]:
        device = calls[0].values[0].device
        parts = layout(calls, counts, num_rows, device)
        rows = tuple(row_of(call) for call in calls)
        return parts.owners, parts.offsets, _places(rows, tuple(counts), self.draft.num_slots, num_rows, device)

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
        owners: Tensor,
        offsets: Tensor,
        places: Tensor,
        ends: Tensor,
        columns: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Runs the pass.

        Args:
            tokens, last, levels, cos, sin, rows, columns: as for `PEaglePass.forward`, T tokens of all requests.
            slot_cos, slot_sin: rope of the slots, [R, 1, S, d].
            slot_rows: LongTensor [R, S].
            owners, offsets: LongTensor [T], the cache row of each token, and its place among those of its request.
            places: LongTensor [B, N], as of `_places`.
            ends: LongTensor [R], the last token of each request.
            keys, values: buffers of every layer, [B, H, C, d].

        Returns:
            the outputs [R, K, D] and logits [R, K, U] of the levels.
        """
        draft, count = self.draft, tokens.shape[0]
        slot_embeds, slot_features = draft.slots(1, draft.num_slots)
        num_blocks = ends.shape[0]
        embeds = torch.cat((self.embed_tokens(tokens)[None], slot_embeds.repeat(1, num_blocks, 1)), 1)
        features = torch.cat((draft.fuse(Features(last, tuple(levels))), slot_features.repeat(1, num_blocks, 1)), 1)
        rope = (torch.cat((cos, join_slots(slot_cos)), 2), torch.cat((sin, join_slots(slot_sin)), 2))
        steps = torch.arange(draft.num_slots, device=rows.device)
        behind = offsets.index_select(0, ends)[:, None] + 1 + steps
        all_owners = torch.cat((owners, owners.index_select(0, ends)[:, None].expand_as(slot_rows).flatten()))
        all_rows = torch.cat((rows, slot_rows.flatten()))
        queries = JointQueries(
            all_owners, torch.cat((offsets, behind.flatten())), torch.where(places < 0, count - 1 - places, places)
        )
        cache = JointCache(keys, values, all_owners, all_rows, columns.shape[0], queries)
        seen = all_rows.index_select(0, queries.places.flatten()).view(places.shape)
        mask = tile_mask(columns <= seen[..., None], self._group, features.dtype)
        out = draft.read(embeds, features, rope, mask, cache)[0]
        slots = out.narrow(0, count, slot_rows.numel()).unflatten(0, slot_rows.shape)
        hidden = torch.cat((out.index_select(0, ends)[:, None], slots), 1)
        return hidden, draft.logits(hidden, self._target)


@lru_cache(maxsize=256)
def _places(rows: tuple[int, ...], counts: tuple[int, ...], slots: int, num_rows: int, device: torch.device) -> Tensor:
    """Returns the queries of each cache row, LongTensor [B, N]: tokens, and slot s of all as -1 - s; 0 for padding.

    Args:
        rows, counts: of each request, its cache row and its number of tokens.
    """
    places = [[0] * (max(counts) + slots) for _ in range(num_rows)]
    first = 0
    for number, (row, count) in enumerate(zip(rows, counts, strict=True)):
        places[row][: count + slots] = [*range(first, first + count), *(-1 - number * slots - slot for slot in range(slots))]
        first += count
    return torch.tensor(places, dtype=torch.long).to(device)
