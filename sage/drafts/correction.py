"""The correction of a block's logits by the tokens before a node, in decoding.

Shapes: F nodes, R requests, K levels, D hidden, U draft vocabulary, V target vocabulary, r rank of the conditional.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sage.targets import Target

if TYPE_CHECKING:
    from sage.drafts.block import BlockDraft

ROWS_AT_ONCE = 4096  # of the target's embedding, while tables are computed


class Correction(nn.Module):
    """What a block head's conditional adds to the logits below nodes.

    What it computes of one token alone is looked up in tables [V, r], and for a path head the product of lm_head and `out` is
    one matrix [U, r]; `refresh` computes them.
    """

    def __init__(self, draft: BlockDraft, target: Target) -> None:
        super().__init__()
        self.draft, self._target = draft, target
        self._of_versions: list[tuple[int, int]] = []
        if draft.markov_head is not None:
            self.token, self.to_logits = draft.markov_head.markov_w1, draft.markov_head.markov_w2
            return
        config, place = draft.config, {"device": draft.device, "dtype": draft.dtype}
        with torch.inference_mode(False):
            self.token, self.parent = (nn.Embedding(config.vocab_size, config.conditional_rank, **place) for _ in range(2))
            self.to_logits = nn.Linear(config.conditional_rank, draft.num_draft_tokens, bias=False, **place)
        for table in (self.token, self.parent, self.to_logits):
            table.requires_grad_(False)

    @torch.no_grad()
    def refresh(self) -> None:
        """Computes the tables of a path head anew if its weights have changed, as they do in training."""
        head = self.draft.path_head
        if head is None:
            return
        weights = (head.token.weight, head.parent.weight, head.out.weight)
        versions = [(weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in weights]
        if versions == self._of_versions:
            return
        rows, out = lm_head_rows(self.draft, self._target).weight, head.out.weight
        self.to_logits.weight.copy_(rows.float() @ out.float() if rows.dtype != torch.float64 else rows @ out)
        for ids in torch.arange(self.draft.config.vocab_size, device=self.draft.device).split(ROWS_AT_ONCE):
            embeds = self._target.embed_tokens(ids).to(self.draft.dtype)
            self.token.weight[ids], self.parent.weight[ids] = head.of_token(embeds), head.of_parent(embeds)
        self._of_versions = versions

    def of_slots(self, hidden: Tensor) -> Tensor:
        """Returns what slots with hidden states [.., D] add to the states of their nodes, [.., r]."""
        head = self.draft.path_head
        return hidden[..., :0] if head is None else head.hidden(hidden)

    def forward(self, tokens: Tensor, parents: Tensor, of_slots: Tensor) -> Tensor:
        """Returns the correction [F, U] of the logits below nodes with `tokens` [F] below `parents` [F]."""
        state = self.token(tokens)
        if self.draft.path_head is not None:
            state = self.draft.path_head.activation(state + self.parent(parents) + of_slots)
        return self.to_logits(state)


def lm_head_rows(draft: BlockDraft, target: Target) -> nn.Module:
    """Returns the target's lm_head, or a layer with its rows of the draft vocabulary."""
    if draft.token_map is None:
        return target.lm_head
    with torch.inference_mode(False), torch.no_grad():
        rows = nn.Linear(target.hidden_size, draft.num_draft_tokens, bias=False, device="meta")
        rows.weight = nn.Parameter(target.lm_head.weight[draft.token_map.to(target.device)], requires_grad=False)
    return rows
