"""The pass of a head with slots as a function of tensors: accepted tokens, and the slots behind them, that draft all levels.

Shapes: T tokens of all requests, R requests, B cache rows, N queries of a request at most, S slots, K levels, D hidden, U draft
vocabulary, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sage.drafts.correction import Correction, lm_head_rows
from sage.drafts.head_passes import HeadPass, PairInputs
from sage.runtime.cache import PackedCache, Queries, by_row
from sage.runtime.pass_function import CALLS, NODES, PER_ROW, ROWS, Padding, Result, argument
from sage.targets import Target


@dataclass(kw_only=True)
class SlotInputs(PairInputs):
    """Arguments of a `SlotPass`.

    Attributes:
        offsets, places: as of a `Layout`, of tokens and slots or of slots alone.
        slot_cos, slot_sin: rope of the slots, [R, 1, S, d].
        slot_columns: LongTensor [R, S], the columns of the cache that slots write.
        last_tokens: LongTensor [R, 2], of each request the token before the root, and the root.
    """

    offsets: Tensor = argument(NODES)
    places: Tensor = argument(ROWS, PER_ROW)
    slot_cos: Tensor = argument(CALLS, 1, "num_slots", "head_dim", dtype=None)
    slot_sin: Tensor = argument(CALLS, 1, "num_slots", "head_dim", dtype=None)
    slot_columns: Tensor = argument(CALLS, "num_slots", padding=Padding.spare)
    last_tokens: Tensor = argument(CALLS, 2)


class SlotPass(HeadPass):
    """A pass of a `SlotHead` over the accepted tokens of one request or of several, and the slots behind those of each.

    Args:
        correction: of the logits below a node, if the head has a conditional.
    """

    def __init__(self, draft: Any, target: Target, correction: Correction | None = None) -> None:
        names = ("the draft's block after one token", "the draft's block after several tokens")
        sizes: list[tuple[int, ...]] = [(draft.config.hidden_size,), (draft.num_draft_tokens,)]
        sizes += [] if correction is None else [(draft.num_draft_tokens,), ()]
        results = [Result((CALLS, draft.num_levels, *size)) for size in sizes]
        super().__init__(draft, target, names, SlotInputs, results, num_slots=draft.num_slots)
        self.correction = correction
        self.num_slots, self.has_token_queries = draft.num_slots, draft.computes_tokens
        if not draft.has_own_lm_head:
            self.lm_head = lm_head_rows(draft, target)

    def compute(self, inputs: SlotInputs) -> tuple[Tensor, ...]:
        """Extends the cache by the tokens and drafts from the last one of each request.

        Returns:
            the input of `DraftHead.logits` [R, K, D] and logits [R, K, U] of the levels; with a correction, also those of
            `Correction.greedy_path`.
        """
        slots, queries = inputs.slot_columns, self._queries(inputs)
        owners = torch.cat((inputs.owners, self._slot_owners(inputs)))
        columns = torch.cat((inputs.columns, slots.flatten()))
        cache = PackedCache(inputs.keys, inputs.values, owners, columns, inputs.steps.shape[0], queries)
        mask = self.mask(inputs.columns, slots, inputs.steps, queries)
        rope = (
            torch.cat((inputs.cos, _in_sequence(inputs.slot_cos)), 2),
            torch.cat((inputs.sin, _in_sequence(inputs.slot_sin)), 2),
        )
        fused = self.draft.fuse(inputs.features)
        hidden: Tensor = self.draft.run_slots(inputs.embeds, fused, inputs.ends, rope, mask, cache)
        return self._results(hidden, inputs.last_tokens)

    def read_prompt(
        self,
        embeds: Tensor,
        fused: Tensor,
        rope: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: Any,
        last_tokens: Tensor,
    ) -> tuple[Tensor, ...]:
        """Returns what `compute` does, of one request; arguments as of `SlotHead.run_slots` and `SlotInputs`."""
        ends = torch.arange(embeds.shape[1], device=embeds.device)[-1:]
        return self._results(self.draft.run_slots(embeds, fused, ends, rope, mask, cache), last_tokens)

    def _results(self, hidden: Tensor, last_tokens: Tensor) -> tuple[Tensor, ...]:
        logits = self.logits(hidden)
        if self.correction is None:
            return hidden, logits
        parents, roots = last_tokens.unbind(1)
        return hidden, logits, *self.correction.greedy_path(roots, parents, hidden, logits)

    def mask(self, columns: Tensor, slot_columns: Tensor, steps: Tensor, queries: Queries | None = None) -> Tensor:
        """Returns the additive mask of the queries over the keys; arguments as the attributes of `SlotInputs`."""
        seen = slot_columns if self.draft.is_causal else slot_columns[:, -1:].expand_as(slot_columns)
        last = torch.cat((columns, seen.flatten())) if self.has_token_queries else seen.flatten()
        return self.tiled(by_row(steps <= last[:, None], queries))

    def _slot_owners(self, inputs: SlotInputs) -> Tensor:
        """Returns the cache row of each slot, LongTensor [R * S]."""
        return inputs.owners.index_select(0, inputs.ends)[:, None].expand_as(inputs.slot_columns).flatten()

    def _queries(self, inputs: SlotInputs) -> Queries | None:
        """Returns tokens and slots, or slots alone, as queries; None for a single row."""
        count, steps = inputs.columns.shape[0], torch.arange(self.num_slots, device=inputs.columns.device)
        if inputs.places.shape[0] == 1:
            return None
        slots = inputs.slot_columns
        if not self.has_token_queries:
            return Queries(self._slot_owners(inputs), steps.expand_as(slots).flatten(), -1 - inputs.places.clamp(max=-1))
        behind = inputs.offsets.index_select(0, inputs.ends)[:, None] + 1 + steps
        places = torch.where(inputs.places < 0, count - 1 - inputs.places, inputs.places)
        owners = torch.cat((inputs.owners, self._slot_owners(inputs)))
        return Queries(owners, torch.cat((inputs.offsets, behind.flatten())), places)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits [.., U] of the draft vocabulary for hidden states [.., D]."""
        logits: Tensor = self.draft.logits(hidden, self._target) if self.draft.has_own_lm_head else self.lm_head(hidden)
        return logits


def _in_sequence(states: Tensor) -> Tensor:
    """Returns states [R, 1, S, d] as [1, 1, R * S, d]."""
    return states.flatten(0, 2)[None, None]
