"""The conditional of a block head: corrections of its logits by the tokens that a node follows, in training and in decoding.

Shapes: F nodes, R requests, K levels, D hidden, U draft vocabulary, V target vocabulary, r rank of the conditional.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sage.runtime.pass_function import NODES, REQUESTS, PassFunction, PassInputs, argument
from sage.targets import Target
from sage.targets.tree_passes import describe_target, without_paths


class MarkovHead(nn.Module):
    """Correction of the logits below a node by its token: markov_w2 of row `token` of markov_w1."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.conditional_rank)
        self.markov_w2 = nn.Linear(config.conditional_rank, int(config.draft_vocab_size or 0), bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the state [.., r] of nodes with `tokens` [..]."""
        return self.markov_w1(tokens)


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
        """Draws maps to states of a size of about 1, and starts without a correction."""
        for linear in (self.token, self.parent, self.hidden):
            linear.weight.normal_(std=linear.in_features**-0.5)
        self.out.weight.zero_()

    def forward(self, tokens: Tensor, parents: Tensor, hidden: Tensor) -> Tensor:
        """Returns the state [.., r] of nodes from the embeddings [.., D] of their token and its parent, in slots `hidden`."""
        return self.activation(self.of_token(tokens) + self.of_parent(parents) + self.hidden(hidden))

    def of_token(self, embeds: Tensor) -> Tensor:
        """Returns what tokens with embeddings [.., D] add to the states of their nodes, before the activation, [.., r]."""
        return self.token(self._normalize(embeds))

    def of_parent(self, embeds: Tensor) -> Tensor:
        """Returns what tokens with embeddings [.., D] add to the states of the nodes below theirs, [.., r]."""
        return self.parent(self._normalize(embeds))

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


ROWS_AT_ONCE = 4096  # of the target's embedding, while tables are computed


class Correction(nn.Module):
    """What a block head's conditional adds to the logits below nodes.

    What it computes of one token alone is looked up in tables [V, r], and for a path head the product of lm_head and `out` is
    one matrix [U, r]; `refresh` computes them.
    """

    def __init__(self, draft: Any, target: Target) -> None:
        super().__init__()
        self.draft, self._target = draft, target
        self._of_versions: list[tuple[int, int]] = []
        if draft.markov_head is not None:
            self.token, self.to_logits = draft.markov_head.markov_w1, draft.markov_head.markov_w2
            return
        config, like = draft.config, {"device": draft.device, "dtype": draft.dtype}
        with torch.inference_mode(False):
            self.token, self.parent = (nn.Embedding(config.vocab_size, config.conditional_rank, **like) for _ in range(2))
            self.to_logits = nn.Linear(config.conditional_rank, draft.num_draft_tokens, bias=False, **like)
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

    def greedy_path(self, tokens: Tensor, parents: Tensor, hidden: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Follows the most probable token of every level from the roots `tokens` [R] below `parents` [R], for each request. A
        chain's nodes are on this path, and a call for each would take longer than its arithmetic.

        Args:
            hidden, logits: of the blocks, [R, K, D] and [R, K, U].

        Returns:
            corrected logits [R, K, U] below the nodes of the path, the root first, and the tokens that follow them, [R, K].
        """
        of_slots, rows, path = self.of_slots(hidden), [], []
        for level in range(logits.shape[1]):
            rows.append(logits[:, level] + self(tokens, parents, of_slots[:, level]))
            best = rows[-1].argmax(-1)
            tokens, parents = best + self.draft.d2t.index_select(0, best), tokens
            path.append(tokens)
        return torch.stack(rows, 1), torch.stack(path, 1)


def lm_head_rows(draft: Any, target: Target) -> nn.Module:
    """Returns the target's lm_head, or a layer with its rows of the draft vocabulary."""
    if draft.token_map is None:
        return target.lm_head
    with torch.inference_mode(False), torch.no_grad():
        rows = nn.Linear(target.hidden_size, draft.num_draft_tokens, bias=False, device="meta")
        rows.weight = nn.Parameter(target.lm_head_weight[draft.token_map.to(target.device)], requires_grad=False)
    return rows


@dataclass(kw_only=True)
class CorrectionInputs(PassInputs):
    """Arguments of a `CorrectionPass`.

    Attributes:
        tokens, parents: LongTensor [F], the nodes' tokens and those of their parents.
        numbers: LongTensor [F], the request of each node.
        hidden, logits: results [R, D] and [R, U] of the blocks at the nodes' levels.
    """

    tokens: Tensor = argument(NODES)
    parents: Tensor = argument(NODES)
    numbers: Tensor = argument(NODES)
    hidden: Tensor = argument(REQUESTS, "hidden_size", dtype=None)
    logits: Tensor = argument(REQUESTS, "num_tokens", dtype=None)


class CorrectionPass(PassFunction):
    """Logits below the nodes of one level: those of the slot, corrected for each node."""

    def __init__(self, draft: Any, target: Target, correction: Correction) -> None:
        names = ("the draft's correction of one node", "the draft's correction of several nodes")
        sizes = {"hidden_size": draft.config.hidden_size, "num_tokens": draft.num_draft_tokens}
        results = [(NODES, draft.num_draft_tokens)]
        facts = describe_target(target), without_paths(draft.config)
        super().__init__("draft", names, CorrectionInputs, sizes, draft.dtype, results, facts)
        self.correction = correction

    def compute(self, inputs: CorrectionInputs) -> tuple[Tensor]:
        """Returns logits [F, U]."""
        of_slots = self.correction.of_slots(inputs.hidden).index_select(0, inputs.numbers)
        corrected = self.correction(inputs.tokens, inputs.parents, of_slots)
        return (inputs.logits.index_select(0, inputs.numbers) + corrected,)
