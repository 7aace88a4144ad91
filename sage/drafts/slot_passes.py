"""The pass of a head with slots as a function of tensors: accepted tokens, and the slots behind them, that draft all levels.

Shapes: M tokens committed, S slots, K levels, D hidden, A feature levels, U draft vocabulary, C cache capacity, H KV heads, d
head size. Of several requests: T tokens of all, R requests, B cache rows, N queries of a request at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from sage.drafts.head_passes import HeadPass, pair_arguments
from sage.runtime.attention import tile_mask
from sage.runtime.cache import RowCache
from sage.runtime.joint import Call, layout, layout_arguments, length_of, row_of, shared_cache
from sage.runtime.pass_function import (
    ALL_NODES,
    CALLS,
    KEYS,
    ROWS,
    TOKENS,
    Argument,
    Dim,
    JointFunction,
    Padding,
    Result,
    Value,
)
from sage.runtime.shared_cache import JointCache, JointQueries
from sage.targets import Features, Target


class SlotPass(HeadPass):
    """A pass over the accepted tokens of a request and the slots behind them.

    Args:
        draft: a `SlotHead`.
        names: as of a `PassFunction`.
        count: the dimension of the tokens.
        blocks: of several requests, the dimension of their blocks of slots; None for one.
        attention: further arguments.
        num_rows: rows of the cache.
    """

    def __init__(
        self,
        draft: Any,
        target: Target,
        names: tuple[str, str] = ("the draft's block after one token", "the draft's block after several tokens"),
        count: Dim = TOKENS,
        blocks: Dim | None = None,
        attention: Sequence[Argument] = (),
        num_rows: Dim | int = 1,
    ) -> None:
        rope, of_each = (blocks or 1, 1, draft.num_slots, draft.config.head_dim), () if blocks is None else (blocks,)
        slots = (
            Argument("slot_cos", rope, draft.dtype),
            Argument("slot_sin", rope, draft.dtype),
            Argument("slot_rows", (*of_each, draft.num_slots), torch.long, Padding.spare_row),  # of one, while captured
            *attention,
            Argument("columns", (KEYS,), torch.long, Padding.counting),
        )
        sizes = (draft.config.hidden_size, draft.num_draft_tokens)
        results = [Result((*of_each, draft.num_levels, size)) for size in sizes]
        super().__init__(draft, target, names, count, pair_arguments(count, draft, target), count, results, slots, num_rows)
        if not draft.has_own_lm_head:
            self.lm_head = lm_head_rows(draft, target)

    def _new_joint(self) -> JointFunction | None:
        return JointSlotPass(self.draft, self._target)

    def forward(
        self,
        embeds: Tensor,
        last: Tensor,
        levels: Sequence[Tensor],
        cos: Tensor,
        sin: Tensor,
        rows: Tensor,
        slot_cos: Tensor,
        slot_sin: Tensor,
        slot_rows: Tensor,
        columns: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Extends the cache by M tokens and drafts from the last one.

        Args:
            embeds: [1, M, D], embeddings of the token after each of the M tokens.
            last, levels: `Features` of the M tokens, 1 + A tensors [1, M, D].
            cos, sin, slot_cos, slot_sin: rope of the M tokens and of the slots, [1, 1, M or S, d].
            rows, slot_rows: LongTensor [M] and [S], their cache rows.
            columns: LongTensor [keys], 0, 1, .. up to the last slot's row.
            keys, values: buffers of every layer, [1, H, C, d].

        Returns:
            the input of `DraftHead.logits` [K, D] and logits [K, U] of the levels.
        """
        fused = self.draft.fuse(Features(last, tuple(levels)))
        rope = (torch.cat((cos, slot_cos), 2), torch.cat((sin, slot_sin), 2))
        cache = RowCache(keys, values, torch.cat((rows, slot_rows)), columns.shape[0])
        hidden, logits = self.run(embeds, fused, rope, self.mask(rows, slot_rows, columns), cache)
        return hidden, logits

    def run(
        self, embeds: Tensor, fused: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None, cache: Any
    ) -> tuple[Tensor, Tensor]:
        """Returns what `forward` does, of one request; arguments as of `SlotHead.run_slots`."""
        ends = torch.arange(embeds.shape[1], device=embeds.device)[-1:]
        (hidden,) = self.draft.run_slots(embeds, fused, ends, rope, mask, cache)
        return hidden, self.logits(hidden)

    def mask(self, rows: Tensor, slot_rows: Tensor, columns: Tensor) -> Tensor:
        """Returns the additive mask of the queries over the keys, [1, 1, G * queries, keys]; arguments as of `forward`."""
        return tile_mask(columns <= self._seen(rows, slot_rows)[:, None], self._group, self.draft.dtype)

    def _seen(self, rows: Tensor, slot_rows: Tensor) -> Tensor:
        """Returns the last cache row that each query attends to; `slot_rows` [.., S]."""
        seen = slot_rows if self.draft.is_causal else slot_rows[..., -1:].expand_as(slot_rows)
        return torch.cat((rows, seen.flatten())) if self.draft.computes_tokens else seen.flatten()

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits [.., U] of the draft vocabulary for hidden states [.., D]."""
        logits: Tensor = self.draft.logits(hidden, self._target) if self.draft.has_own_lm_head else self.lm_head(hidden)
        return logits


class JointSlotPass(SlotPass, JointFunction):
    """A pass over the accepted tokens of several requests and the slots behind those of each."""

    def __init__(self, draft: Any, target: Target) -> None:
        names = ("the draft's block after one token of every request", "the draft's block of several requests")
        attention = (*layout_arguments(ALL_NODES), Argument("ends", (CALLS,), torch.long))
        super().__init__(draft, target, names, ALL_NODES, CALLS, attention, ROWS)

    def forward(  # type: ignore[override]
        self,
        embeds: Tensor,
        last: Tensor,
        levels: Sequence[Tensor],
        cos: Tensor,
        sin: Tensor,
        rows: Tensor,
        slot_cos: Tensor,
        slot_sin: Tensor,
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
            embeds, last, levels, cos, sin, rows, columns: as for `SlotPass.forward`, T tokens of all requests.
            slot_cos, slot_sin: rope of the slots, [R, 1, S, d].
            slot_rows: LongTensor [R, S].
            owners, offsets: LongTensor [T], the cache row of each token, and its place among those of its request.
            places: LongTensor [B, N], as of `_places`.
            ends: LongTensor [R], the last token of each request.
            keys, values: buffers of every layer, [B, H, C, d].

        Returns:
            the input of `DraftHead.logits` [R, K, D] and logits [R, K, U] of the levels.
        """
        draft = self.draft
        first = 0 if draft.computes_tokens else rows.shape[0]
        steps = torch.arange(draft.num_slots, device=rows.device)
        behind = offsets.index_select(0, ends)[:, None] + 1 + steps if draft.computes_tokens else steps.expand_as(slot_rows)
        all_owners = torch.cat((owners, owners.index_select(0, ends)[:, None].expand_as(slot_rows).flatten()))
        places = torch.where(places < 0, rows.shape[0] - first - 1 - places, places)
        queries = JointQueries(all_owners[first:], torch.cat((offsets, behind.flatten()))[first:], places)
        all_rows = torch.cat((rows, slot_rows.flatten()))
        cache = JointCache(keys, values, all_owners, all_rows, columns.shape[0], queries)
        seen = self._seen(rows, slot_rows).index_select(0, places.flatten()).view(places.shape)
        mask = tile_mask(columns <= seen[..., None], self._group, draft.dtype)
        rope = (torch.cat((cos, join_slots(slot_cos)), 2), torch.cat((sin, join_slots(slot_sin)), 2))
        hidden = draft.run_slots(embeds, draft.fuse(Features(last, tuple(levels))), ends, rope, mask, cache)
        return hidden, self.logits(hidden)

    def join(self, calls: Sequence[Call], num_rows: int) -> Sequence[Value]:
        embeds, last, levels, cos, sin, rows, slot_cos, slot_sin, slot_rows = (
            [call.values[place] for call in calls] for place in range(9)
        )
        counts, shared, device = [len(one) for one in rows], shared_cache(calls), rows[0].device
        parts = layout(calls, counts, num_rows, device)
        queries = tuple(counts) if self.draft.computes_tokens else (0,) * len(calls)
        return (
            torch.cat(embeds, 1),
            torch.cat(last, 1),
            [torch.cat(level, 1) for level in zip(*levels, strict=True)],
            torch.cat(cos, 2),
            torch.cat(sin, 2),
            torch.cat(rows),
            torch.cat(slot_cos),
            torch.cat(slot_sin),
            torch.stack(slot_rows),
            parts.owners,
            parts.offsets,
            _places(tuple(row_of(call) for call in calls), queries, self.draft.num_slots, num_rows, device),
            parts.ends,
            shared.steps.narrow(0, 0, max(length_of(call) for call in calls)),
            *shared.layers(num_rows),
        )

    def split(self, calls: Sequence[Call], results: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        return list(zip(*(result.unbind() for result in results), strict=True))


def join_slots(states: Tensor) -> Tensor:
    """Returns states [R, 1, S, d] as [1, 1, R * S, d]."""
    return states.flatten(0, 2)[None, None]


def lm_head_rows(draft: Any, target: Target) -> nn.Module:
    """Returns the target's lm_head, or a layer with its rows of the draft vocabulary."""
    if draft.token_map is None:
        return target.lm_head
    with torch.inference_mode(False), torch.no_grad():
        rows = nn.Linear(target.hidden_size, draft.num_draft_tokens, bias=False, device="meta")
        rows.weight = nn.Parameter(target.lm_head.weight[draft.token_map.to(target.device)], requires_grad=False)
    return rows


@lru_cache(maxsize=256)
def _places(rows: tuple[int, ...], counts: tuple[int, ...], slots: int, num_rows: int, device: torch.device) -> Tensor:
    """Returns the queries of each cache row, LongTensor [B, N]: tokens, and slot s of all as -1 - s; 0 for padding.

    Args:
        rows, counts: of each request, its cache row and its number of tokens that are queries.
    """
    places = [[0] * (max(counts) + slots) for _ in range(num_rows)]
    first = 0
    for number, (row, count) in enumerate(zip(rows, counts, strict=True)):
        places[row][: count + slots] = [*range(first, first + count), *(-1 - number * slots - slot for slot in range(slots))]
        first += count
    return torch.tensor(places, dtype=torch.long).to(device)
