"""The decoder's interface to a draft of any kind, for one request.

Shapes: F frontier nodes of one tree level, M tokens committed, U draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sage.runtime.cache import TreeCache
from sage.runtime.host_tensors import Tokens
from sage.runtime.packing import Pass, run
from sage.targets import Features, Prompt


class Candidates(NamedTuple):
    """The draft's best next tokens below each node of a level, [F, K], in descending order.

    Attributes:
        probs: float32, the softmax of the scores: the draft's probability of a token, or with noise a confidence that the token
            is the target's draw.
        tokens: LongTensor, target ids.
    """

    probs: Tensor
    tokens: Tensor


class DraftSession(ABC):
    """Interface of the decoder to a draft of any kind, for one request.

    Attributes:
        levels: indices k of the target's hidden_states[k] that the draft reads in addition to the last.
        token_map: LongTensor [U], draft id -> target id; None when the draft vocabulary is the target's (U = V).
        max_depth: levels that a round can draft; None for any.
        cache: of the draft; a row of a shared one if requests are decoded together. None for a draft without one.
    """

    levels: tuple[int, ...] = ()
    token_map: Tensor | None = None
    max_depth: int | None = None
    cache: TreeCache | None = None

    @property
    @abstractmethod
    def context(self) -> int:
        """Committed rows in the draft's cache; drafted nodes are not counted."""

    @abstractmethod
    def prefill(self, prompt: Prompt, features: Features, root: Tensor) -> Tensor:
        """Reads the prompt and the first token [1]; returns the logits below it, [1, U]."""

    @abstractmethod
    def expand_pass(self, rows: Tensor, tokens: Tokens) -> Pass | Tensor:
        """Drafts one level deeper.

        Args:
            rows: LongTensor [F], each node's parent as a row of the previous call's result.
            tokens: [F], the nodes' tokens.

        Returns:
            [F, U], the logits below each node, or the pass that gives them, which several requests can share.
        """

    @abstractmethod
    def commit_pass(self, features: Features, tokens: Tokens) -> Pass | Tensor:
        """Drops the tree and reads the tokens that the target accepted since the last call.

        Args:
            features: the target's features [1, M, D] of the old root and the accepted tokens, without the next root.
            tokens: [M], the token after each of them, the next root last.

        Returns:
            [1, U], the logits below the next root, or the pass that gives them.
        """

    @torch.no_grad()
    def expand(self, rows: Tensor, tokens: Tokens) -> Tensor:
        """Runs `expand_pass` of this request alone."""
        logits: Tensor = run([self.expand_pass(rows, tokens)])[0]
        return logits

    @torch.no_grad()
    def commit(self, features: Features, tokens: Tokens) -> Tensor:
        """Runs `commit_pass` of this request alone."""
        logits: Tensor = run([self.commit_pass(features, tokens)])[0]
        return logits

    def propose(self, scores: Tensor, num_candidates: int) -> Candidates:
        """Selects the best next tokens below each node.

        Args:
            scores: [F, U], the result of `prefill`, `expand` or `commit`, or `TargetSampler.coupled` of it.
            num_candidates: K, at most U of them are returned.
        """
        probs, tokens = scores.float().softmax(-1).topk(min(num_candidates, scores.shape[-1]))
        return Candidates(probs, tokens if self.token_map is None else self.token_map.take(tokens))

    def set_synthetic_state(self, context: int, width: int) -> None:
        """Sets a context of `context` rows and a frontier of `width` nodes, both of zeros, so that `expand` and
        `commit` can be timed.
        """
        raise NotImplementedError


def check_probabilities(rows: Sequence[Sequence[float]], level: int, num_new: int) -> None:
    """Raises ValueError if one of the draft's probabilities [F, K] of a level is NaN: one NaN logit makes the entire softmax of
    its row NaN. `num_new`: tokens emitted before.
    """
    for row in rows:
        if row[0] != row[0]:
            where = f"level {level} after {num_new} new tokens"
            raise ValueError(f"draft: its pass over {where} gave NaN; check its weights and dtype")
