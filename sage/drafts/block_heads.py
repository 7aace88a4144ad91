"""Small parts of a block head: the inputs of its slots, and the corrections by the tokens that a node follows.

Shapes: B batch, A anchors, S slots, D hidden, U draft vocabulary, r rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Feed(nn.Module):
    """The inputs of slots as functions of the last fused feature and the anchor's embedding: one of the anchor's slot, one that
    the other slots share, and a learned vector of each slot.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        size = config.hidden_size
        self.feature = nn.Linear(size, 2 * size, bias=False)
        self.anchor = nn.Linear(size, 2 * size, bias=False)
        self.slot = nn.Parameter(torch.zeros(config.block_size, size))

    @torch.no_grad()
    def start_with_inputs(self) -> None:
        """Adds the identity to the maps: every slot starts as feature + embedding."""
        for linear in (self.feature, self.anchor):
            linear.weight += torch.eye(self.slot.shape[1]).repeat(2, 1)

    def forward(self, anchors: Tensor, context: Tensor) -> Tensor:
        """Returns [B, A, S, D]; arguments as of `BlockDraft.slots`."""
        both = (self.anchor(anchors) + self.feature(context)).unflatten(-1, (2, -1))
        others = both[..., 1:, :].expand(*anchors.shape[:-1], len(self.slot) - 1, -1)
        return torch.cat((both[..., :1, :], others), -2) + self.slot


class MarkovHead(nn.Module):
    """Correction of the logits below a node by its token: markov_w2 of row `token` of markov_w1."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.conditional_rank)
        self.markov_w2 = nn.Linear(config.conditional_rank, int(config.draft_vocab_size or 0), bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the state [.., r] of nodes with `tokens` [..]."""
        state: Tensor = self.markov_w1(tokens)
        return state


class PathHead(nn.Module):
    """Correction of a slot's hidden state by the last two tokens of the path to a node: `out` of a state of rank r.

    It reads the target's embeddings, normalized, and ends before the lm_head, so that what it learns of a token holds for
    similar ones. Since the lm_head is linear, the logits change by the product of lm_head and `out`, a matrix [U, r].
    """

    activation = staticmethod(nn.functional.silu)

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, rank = config.hidden_size, config.conditional_rank
        self.token = nn.Linear(size, rank, bias=False)
        self.parent = nn.Linear(size, rank, bias=False)
        self.hidden = nn.Linear(size, rank, bias=False)
        self.out = nn.Linear(rank, size, bias=False)
        self.eps = config.rms_norm_eps

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws maps whose state has a size of about 1, and starts without a correction."""
        for linear in (self.token, self.parent, self.hidden):
            linear.weight.normal_(std=linear.in_features**-0.5)
        self.out.weight.zero_()

    def forward(self, tokens: Tensor, parents: Tensor, hidden: Tensor) -> Tensor:
        """Returns the state [.., r] of nodes from the embeddings [.., D] of their token and its parent, in slots `hidden`."""
        return self.activation(self.of_token(tokens) + self.of_parent(parents) + self.hidden(hidden))

    def of_token(self, embeds: Tensor) -> Tensor:
        """Returns what tokens with embeddings [.., D] add to the states of their nodes, before the activation, [.., r]."""
        part: Tensor = self.token(self._normalize(embeds))
        return part

    def of_parent(self, embeds: Tensor) -> Tensor:
        """Returns what tokens with embeddings [.., D] add to the states of the nodes below theirs, [.., r]."""
        part: Tensor = self.parent(self._normalize(embeds))
        return part

    def _normalize(self, embeds: Tensor) -> Tensor:
        return nn.functional.rms_norm(embeds, embeds.shape[-1:], eps=self.eps)


class ConfidenceHead(nn.Module):
    """Predicts the logit of a slot's acceptance from its hidden state and the state of the conditional."""

    def __init__(self, input_size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(input_size, 1)

    def forward(self, states: Tensor) -> Tensor:
        """[.., D + r] -> [..]."""
        return self.proj(states)[..., 0]
