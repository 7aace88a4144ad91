"""The passes of a block head in decoding as functions of tensors.

Shapes: M tokens committed, S slots, K levels, F nodes of one tree level, D hidden, L feature levels, U draft vocabulary, C
cache capacity, H KV heads, d head size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sage.drafts.correction import lm_head_rows
from sage.runtime.attention import tile_mask
from sage.runtime.cache import RowCache
from sage.runtime.host_tensors import cached_index
from sage.runtime.joint import Call, layout, length_of, row_of, shared_cache
from sage.runtime.pass_function import (
    ALL_NODES,
    CALLS,
    CAPACITY,
    KEYS,
    ROWS,
    TOKENS,
    Argument,
    Dim,
    JointFunction,
    Padding,
    PassFunction,
    Result,
    Value,
)
from sage.runtime.shared_cache import JointCache, JointQueries
from sage.targets import Features, Target
from sage.targets.tree_passes import describe_target, family_modules, without_paths

if TYPE_CHECKING:
    from sage.drafts.block import BlockDraft
    from sage.drafts.peagle import PEagleDraft


class SlotPass(PassFunction):
    """A pass over accepted tokens and the slots behind them; a subclass implements `forward`.

    Args:
        names: as of a `PassFunction`.
        count: the dimension of the tokens.
        blocks: of several requests, the dimension of their blocks of slots; None for one.
        attention: arguments between the cache rows and the buffers.
        num_rows: rows of the cache.
    """

    def __init__(
        self,
        draft: BlockDraft | PEagleDraft,
        target: Target,
        names: tuple[str, str] = ("the draft's block after one token", "the draft's block after several tokens"),
        count: Dim = TOKENS,
        blocks: Dim | None = None,
        attention: Sequence[Argument] = (Argument("columns", (KEYS,), torch.long, Padding.counting),),
        num_rows: Dim | int = 1,
    ) -> None:
        config, dtype, slots = draft.config, draft.dtype, draft.num_slots
        of_target, rope = (1, count, target.hidden_size), (1, 1, count, config.head_dim)
        slot_rope, buffers = (blocks or 1, 1, slots, config.head_dim), (num_rows, config.num_key_value_heads, CAPACITY)
        of_each = () if blocks is None else (blocks,)
        arguments = (
            Argument("tokens", (count,), torch.long),
            Argument("last", of_target, target.dtype),
            Argument("levels", of_target, target.dtype, count=len(draft.levels)),
            Argument("cos", rope, dtype),
            Argument("sin", rope, dtype),
            Argument("slot_cos", slot_rope, dtype),
            Argument("slot_sin", slot_rope, dtype),
            Argument("rows", (count,), torch.long, Padding.spare_row),
            Argument("slot_rows", (*of_each, slots), torch.long, Padding.spare_row),  # of one, while a graph is captured
            *attention,
            Argument("keys", (*buffers, config.head_dim), dtype, Padding.cache, draft.num_layers),
            Argument("values", (*buffers, config.head_dim), dtype, Padding.cache, draft.num_layers),
        )
        sizes: list[tuple[int, ...]] = [(draft.num_levels, config.hidden_size), (draft.num_levels, draft.num_draft_tokens)]
        results = [Result((*of_each, *size)) for size in sizes]
        modules = (type(draft).__module__, *family_modules(target))
        facts = describe_target(target), without_paths(config)
        super().__init__("draft", names, arguments, results, facts, modules)
        self.draft, self.embed_tokens, self._target = draft, target.embed_tokens, target

    @property
    def _group(self) -> int:
        """Query heads per KV head."""
        config = self.draft.config
        return int(config.num_attention_heads // config.num_key_value_heads)


class BlockPass(SlotPass):
    """A pass of a block head."""

    draft: BlockDraft

    def __init__(self, draft: BlockDraft, target: Target) -> None:
        super().__init__(draft, target)
        self.lm_head = lm_head_rows(draft, target)

    def _new_joint(self) -> JointFunction | None:
        return JointBlockPass(self.draft, self._target, self.lm_head)

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
        """Extends the cache by M tokens and runs the block of the last one's successor.

        Args:
            tokens: LongTensor [M], the token after each of the M tokens, the anchor last; the others are not read.
            last, levels: `Features` of the M tokens, 1 + L tensors [1, M, D].
            cos, sin, slot_cos, slot_sin: rope of the M tokens and of the slots, [1, 1, M or S, d].
            rows, slot_rows: LongTensor [M] and [S], their cache rows.
            columns: LongTensor [keys], 0, 1, .. up to the last slot's row.
            keys, values: buffers of every layer, [1, H, C, d].

        Returns:
            the input of the lm_head [K, D] and logits [K, U] of the levels.
        """
        draft = self.draft
        context = draft.fuse(Features(last, tuple(levels)))
        slots = draft.slots(self.embed_tokens(tokens[-1:])[None], context[:, -1:])[0]
        cache = RowCache(keys, values, torch.cat((rows, slot_rows)), columns.shape[0])
        rope = (torch.cat((cos, slot_cos), 2), torch.cat((sin, slot_sin), 2))
        seen = slot_rows if draft.config.causal else slot_rows[-1:].expand(slot_rows.shape[0])
        mask = tile_mask(columns <= seen[:, None], self._group, context.dtype)
        hidden = draft.at_levels(draft.run(context, slots, rope, mask, cache)[0])
        return hidden, self.lm_head(hidden)


class JointSlotPass(SlotPass, JointFunction):
    """A pass over the accepted tokens of several requests and the slots behind those of each."""

    def __init__(self, draft: BlockDraft | PEagleDraft, target: Target, layout_: Sequence[Argument]) -> None:
        names = ("the draft's block after one token of every request", "the draft's block of several requests")
        attention = (
            *layout_,
            Argument("ends", (CALLS,), torch.long),
            Argument("columns", (KEYS,), torch.long, Padding.counting),
        )
        super().__init__(draft, target, names, ALL_NODES, CALLS, attention, ROWS)

    @abstractmethod
    def _layout(self, calls: Sequence[Call], counts: Sequence[int], num_rows: int) -> Sequence[Tensor]:
        """Returns the arguments that `layout_` describes, for calls with `counts` [R] tokens each."""

    def join(self, calls: Sequence[Call], num_rows: int) -> Sequence[Value]:
        tokens, last, levels, cos, sin, slot_cos, slot_sin, rows, slot_rows = (
            [call.values[place] for call in calls] for place in range(9)
        )
        counts, shared = [len(one) for one in tokens], shared_cache(calls)
        return (
            torch.cat(tokens),
            torch.cat(last, 1),
            [torch.cat(level, 1) for level in zip(*levels, strict=True)],
            torch.cat(cos, 2),
            torch.cat(sin, 2),
            torch.cat(slot_cos),
            torch.cat(slot_sin),
            torch.cat(rows),
            torch.stack(slot_rows),
            *self._layout(calls, counts, num_rows),
            layout(calls, counts, num_rows, rows[0].device).ends,
            shared.steps.narrow(0, 0, max(length_of(call) for call in calls)),
            *shared.layers(num_rows),
        )

    def split(self, calls: Sequence[Call], results: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        return list(zip(*(result.unbind() for result in results), strict=True))


class JointBlockPass(JointSlotPass):
    """A pass of a block head over the blocks of several requests. Shapes: T tokens, R requests, B cache rows."""

    draft: BlockDraft

    def __init__(self, draft: BlockDraft, target: Target, lm_head: nn.Module) -> None:
        own = (Argument("owners", (ALL_NODES,), torch.long), Argument("calls", (ROWS,), torch.long))
        super().__init__(draft, target, own)
        self.lm_head = lm_head

    def _layout(self, calls: Sequence[Call], counts: Sequence[int], num_rows: int) -> Sequence[Tensor]:
        device = calls[0].values[0].device
        call_of = {row_of(call): place for place, call in enumerate(calls)}
        numbers = tuple(call_of.get(row, 0) for row in range(num_rows))
        return layout(calls, counts, num_rows, device).owners, cached_index(numbers, device)

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
        calls: Tensor,
        ends: Tensor,
        columns: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Runs the pass.

        Args:
            tokens, last, levels, cos, sin, rows, columns: as for `BlockPass.forward`, T tokens of all requests.
            slot_cos, slot_sin: rope of the slots, [R, 1, S, d].
            slot_rows: LongTensor [R, S].
            owners: LongTensor [T], the cache row of each token.
            calls: LongTensor [B], the request of each cache row, 0 for none.
            ends: LongTensor [R], the last token of each request.
            keys, values: buffers of every layer, [B, H, C, d].

        Returns:
            the input of the lm_head [R, K, D] and logits [R, K, U].
        """
        draft, slots = self.draft, self.draft.num_slots
        context = draft.fuse(Features(last, tuple(levels)))
        anchors = tokens.index_select(0, ends)
        blocks = draft.slots(self.embed_tokens(anchors)[None], context.index_select(1, ends)).flatten(1, 2)
        steps = torch.arange(slots, device=rows.device)
        slot_owners = owners.index_select(0, ends)[:, None].expand_as(slot_rows).flatten()
        places = calls[:, None] * slots + steps
        queries = JointQueries(slot_owners, steps.expand_as(slot_rows).flatten(), places)
        written = torch.cat((owners, slot_owners)), torch.cat((rows, slot_rows.flatten()))
        cache = JointCache(keys, values, *written, columns.shape[0], queries)
        rope = (torch.cat((cos, join_slots(slot_cos)), 2), torch.cat((sin, join_slots(slot_sin)), 2))
        seen = slot_rows if draft.config.causal else slot_rows[:, -1:].expand_as(slot_rows)
        mask = tile_mask(columns <= seen.index_select(0, calls)[..., None], self._group, context.dtype)
        hidden = draft.at_levels(draft.run(context, blocks, rope, mask, cache)[0].unflatten(0, slot_rows.shape))
        return hidden, self.lm_head(hidden)


def join_slots(states: Tensor) -> Tensor:
    """Returns states [R, 1, S, d] as [1, 1, R * S, d]."""
    return states.flatten(0, 2)[None, None]
