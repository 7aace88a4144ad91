"""Heads with slots: one pass over accepted tokens and the slots behind them drafts all levels of a round.

Shapes: T tokens of all requests, R requests, B cache rows, N queries of a request at most, S slots, K levels, D hidden, U draft
vocabulary, d head size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sage.drafts.conditional import Correction, CorrectionPass, lm_head_rows
from sage.drafts.head import DraftHead
from sage.drafts.head_passes import HeadPass, PairInputs
from sage.drafts.layer import Angles
from sage.drafts.spans import HeadInput
from sage.runtime.cache import PackedCache, Queries, by_row
from sage.runtime.pass_function import NODES, PER_ROW, REQUESTS, ROWS, Padding, PassFunction, argument
from sage.targets import Target

SPARE_NAMES = ("reserved", "unused")  # in the names of tokens that tokenizers keep for later use


class SlotHead(DraftHead):
    """A head whose pass drafts K levels from S slots behind the last token.

    Attributes:
        computes_tokens: whether accepted tokens run through the layers, too, instead of being keys and values alone.
        markov_head, path_head: correction of the logits below a node by the tokens before it; at most one of them.
        confidence_head: predicts the acceptance of a slot, for engines.
        num_slots: S, the rows of a block that follow the accepted tokens.
        num_levels: K, the levels that a block drafts.
        is_causal: whether a slot attends to the slots before it alone.
    """

    computes_tokens: ClassVar[bool]
    markov_head: nn.Module | None
    path_head: nn.Module | None
    confidence_head: nn.Module | None

    @property
    def num_slots(self) -> int:
        return int(self.config.block_size) - self.computes_tokens  # where tokens are computed, the last one drafts a level

    @property
    def num_levels(self) -> int:
        return int(getattr(self.config, "num_levels", self.config.block_size))

    @property
    def is_causal(self) -> bool:
        return bool(getattr(self.config, "causal", True))

    @property
    def has_conditional(self) -> bool:
        """Whether the logits below a node depend on the tokens before it."""
        return self.markov_head is not None or self.path_head is not None

    def _new_functions(self, target: Target) -> tuple[PassFunction, ...]:
        if not self.has_conditional:
            return (SlotPass(self, target),)
        correction = Correction(self, target)
        return SlotPass(self, target, correction), CorrectionPass(self, target, correction)

    @abstractmethod
    def run_slots(self, embeds: Tensor, fused: Tensor, ends: Tensor, rope: Angles, mask: Tensor | None, cache: Any) -> Tensor:
        """Reads accepted tokens and drafts from the last one of each of R requests; returns the input of `logits`, [R, K, D].

        Args:
            embeds, fused: [1, T, D], embeddings of the token after each token, and `fuse(..)` of the tokens.
            ends: LongTensor [R], the last token of each request.
            rope: cos and sin of the tokens and of all slots, [1, 1, T + R * S, d] each.
            mask: additive, of the slots or, with `computes_tokens`, of tokens and slots; None attends causally.
            cache: of all layers, to extend by tokens and slots.
        """

    @abstractmethod
    def roll_out(self, pairs: HeadInput, roots: Tensor, sizes: Sequence[int]) -> Tensor:
        """Drafts from several pairs of complete sequences in one pass, for training.

        Args:
            pairs: as in `unroll`.
            roots: LongTensor [B, A], pairs to draft from.
            sizes: number of blocks that reach each level, K numbers, the first of them A; level k has the first `sizes[k]`.
                Equal unless slots are causal.

        Returns:
            [B, sum of sizes, D], the rows of level 0, then those of level 1, ..; undefined where root + level is beyond the
            last pair.
        """


def mask_token_of(target: Target, chosen: int | None, *, is_read: bool = False) -> int:
    """Returns the token chosen in `draft.mask_token`, or one that the target does not use.

    In this order: a row of the embedding beyond the tokenizer, a token named as reserved or unused, a placeholder of images or
    videos, which no answer contains, the padding token unless it ends an answer. A target on the meta device has no tokenizer;
    its last row stands for the token. With `is_read`, engines feed the draft the embeddings of prompts, placeholders included:
    they come last.

    Raises:
        ValueError: the chosen token is no row of the embedding, or the target has no such token.
    """
    if chosen is not None:
        if chosen >= target.vocab_size:
            raise ValueError(f"draft.mask_token={chosen}: allowed: below the target's {target.vocab_size} tokens; change it")
        return chosen
    if target.is_meta:
        return target.vocab_size - 1
    tokenizer: Any = None if target.processor is None else target.processor.tokenizer
    names: dict[str, int] = {} if tokenizer is None else tokenizer.get_vocab()
    first = max(names.values(), default=target.vocab_size) + 1
    if first < target.vocab_size:
        return first
    spare = [token for name, token in names.items() if any(word in name.lower() for word in SPARE_NAMES)]
    if spare:
        return min(spare)
    placeholders = [max(target.family.slots.values())] if target.family.slots else []
    padding = getattr(target.text_config, "pad_token_id", None)
    unused = [] if padding is None or padding in target.eos_token_ids else [int(padding)]
    if candidates := unused + placeholders if is_read else placeholders + unused:
        return candidates[0]
    raise ValueError(
        f"draft.mask_token: {target.name} has no unused token: its tokenizer fills all {target.vocab_size} rows of the "
        f"embedding, and it has neither placeholders of images nor a padding token of its own; give "
        "draft.mask_token=ID, a token that no answer contains"
    )


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
    slot_cos: Tensor = argument(REQUESTS, 1, "num_slots", "head_dim", dtype=None)
    slot_sin: Tensor = argument(REQUESTS, 1, "num_slots", "head_dim", dtype=None)
    slot_columns: Tensor = argument(REQUESTS, "num_slots", padding=Padding.spare)
    last_tokens: Tensor = argument(REQUESTS, 2)


class SlotPass(HeadPass):
    """A pass of a `SlotHead` over the accepted tokens of one request or of several, and the slots behind those of each."""

    def __init__(self, draft: Any, target: Target, correction: Correction | None = None) -> None:
        sizes: list[tuple[int, ...]] = [(draft.config.hidden_size,), (draft.num_draft_tokens,)]
        sizes += [] if correction is None else [(draft.num_draft_tokens,), ()]
        results = [(REQUESTS, draft.num_levels, *size) for size in sizes]
        super().__init__(draft, target, "block after", SlotInputs, results, num_slots=draft.num_slots)
        self.correction = correction
        self.num_slots, self.has_token_queries = draft.num_slots, draft.computes_tokens
        if not draft.has_own_lm_head:
            self.lm_head = lm_head_rows(draft, target)

    def compute(self, inputs: SlotInputs) -> tuple[Tensor, ...]:
        """Extends the cache by the tokens and drafts from the last one of each request.

        Returns:
            the input of `DraftHead.logits` [R, K, D] and logits [R, K, U] of the levels; with a correction, also the result of
            `Correction.greedy_path`.
        """
        slots, queries = inputs.slot_columns, self._queries(inputs)
        owners = torch.cat((inputs.owners, self._slot_owners(inputs)))
        columns = torch.cat((inputs.columns, slots.flatten()))
        cache = PackedCache(inputs.keys, inputs.values, owners, columns, inputs.steps.shape[0], queries)
        mask = self.mask(inputs.columns, slots, inputs.steps, queries)
        both = ((inputs.cos, inputs.slot_cos), (inputs.sin, inputs.slot_sin))
        rope = tuple(torch.cat((of_tokens, of_slots.flatten(0, 2)[None, None]), 2) for of_tokens, of_slots in both)
        fused = self.draft.fuse(inputs.features)
        hidden: Tensor = self.draft.run_slots(inputs.embeds, fused, inputs.ends, rope, mask, cache)
        return self._results(hidden, inputs.last_tokens)

    def read_prompt(
        self, embeds: Tensor, fused: Tensor, rope: Any, mask: Tensor | None, cache: Any, last_tokens: Tensor
    ) -> tuple[Tensor, ...]:
        """Returns what `compute` does, of one request; arguments as of `SlotHead.run_slots` and `SlotInputs`."""
        ends = torch.arange(embeds.shape[1], device=embeds.device)[-1:]
        return self._results(self.draft.run_slots(embeds, fused, ends, rope, mask, cache), last_tokens)

    def _results(self, hidden: Tensor, last_tokens: Tensor) -> tuple[Tensor, ...]:
        logits = self.draft.logits(hidden, self._target) if self.draft.has_own_lm_head else self.lm_head(hidden)
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
