"""The passes of a block head in decoding as functions of tensors.

Shapes: M tokens committed, S slots, K levels, F nodes of one tree level, D hidden, L feature levels, U draft vocabulary, C
cache capacity, H KV heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sage.runtime.attention import tile_mask
from sage.runtime.cache import RowCache
from sage.runtime.pass_function import CAPACITY, KEYS, NODES, TOKENS, Argument, Padding, PassFunction, Result
from sage.targets import Features, Target
from sage.targets.tree_passes import describe_target, family_modules, without_paths

if TYPE_CHECKING:
    from sage.drafts.block import BlockDraft
    from sage.drafts.peagle import PEagleDraft


class SlotPass(PassFunction):
    """A pass over accepted tokens and the slots behind them; a subclass implements `forward`."""

    def __init__(self, draft: BlockDraft | PEagleDraft, target: Target) -> None:
        config, dtype = draft.config, draft.dtype
        of_target = (1, TOKENS, target.hidden_size)
        of_rope, buffers = config.head_dim, (1, config.num_key_value_heads, CAPACITY, config.head_dim)
        arguments = (
            Argument("tokens", (TOKENS,), torch.long),
            Argument("last", of_target, target.dtype),
            Argument("levels", of_target, target.dtype, count=len(draft.levels)),
            Argument("cos", (1, 1, TOKENS, of_rope), dtype),
            Argument("sin", (1, 1, TOKENS, of_rope), dtype),
            Argument("slot_cos", (1, 1, draft.num_slots, of_rope), dtype),
            Argument("slot_sin", (1, 1, draft.num_slots, of_rope), dtype),
            Argument("rows", (TOKENS,), torch.long, Padding.spare_row),
            Argument("slot_rows", (draft.num_slots,), torch.long, Padding.spare_row),  # while a graph is captured
            Argument("columns", (KEYS,), torch.long, Padding.counting),
            Argument("keys", buffers, dtype, Padding.cache, draft.num_layers),
            Argument("values", buffers, dtype, Padding.cache, draft.num_layers),
        )
        names = ("the draft's block after one token", "the draft's block after several tokens")
        results = (Result((draft.num_levels, config.hidden_size)), Result((draft.num_levels, draft.num_draft_tokens)))
        modules = (type(draft).__module__, *family_modules(target))
        super().__init__("draft", names, arguments, results, (describe_target(target), without_paths(config)), modules)
        self.draft, self.embed_tokens = draft, target.embed_tokens


class BlockPass(SlotPass):
    """A pass of a block head."""

    draft: BlockDraft

    def __init__(self, draft: BlockDraft, target: Target) -> None:
        super().__init__(draft, target)
        self.lm_head = lm_head_rows(draft, target)

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
        group = draft.config.num_attention_heads // draft.config.num_key_value_heads
        mask = tile_mask(columns <= seen[:, None], group, context.dtype)
        hidden = draft.at_levels(draft.run(context, slots, rope, mask, cache)[0])
        return hidden, self.lm_head(hidden)


class ConditionalPass(PassFunction):
    """Logits below the nodes of one level: those of the slot, corrected for each node."""

    def __init__(self, draft: BlockDraft) -> None:
        num_tokens = draft.num_draft_tokens
        arguments = (
            Argument("tokens", (NODES,), torch.long),
            Argument("parents", (NODES,), torch.long),
            Argument("hidden", (1, draft.config.hidden_size), draft.dtype),
            Argument("logits", (1, num_tokens), draft.dtype),
        )
        names = ("the draft's correction of one node", "the draft's correction of several nodes")
        modules = (type(draft).__module__,)
        super().__init__("draft", names, arguments, (Result((NODES, num_tokens)),), without_paths(draft.config), modules)
        self.markov_head = draft.markov_head

    def forward(self, tokens: Tensor, parents: Tensor, hidden: Tensor, logits: Tensor) -> tuple[Tensor]:
        """Returns logits [F, U].

        Args:
            tokens, parents: LongTensor [F], the nodes' tokens and those of their parents.
            hidden, logits: results [1, D] and [1, U] of the block at the nodes' level.
        """
        assert self.markov_head is not None
        return (logits + self.markov_head.markov_w2(self.markov_head(tokens, parents, hidden)),)


def lm_head_rows(draft: BlockDraft, target: Target) -> nn.Module:
    """Returns the target's lm_head, or a layer with its rows of the draft vocabulary."""
    if draft.token_map is None:
        return target.lm_head
    with torch.inference_mode(False), torch.no_grad():
        rows = nn.Linear(target.hidden_size, draft.num_draft_tokens, bias=False, device="meta")
        rows.weight = nn.Parameter(target.lm_head.weight[draft.token_map.to(target.device)], requires_grad=False)
    return rows
