"""The draft vocabulary of a head: some of the target's tokens, or all of them.

Shapes: U draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class DraftVocabulary(nn.Module):
    """Base class of heads with a draft vocabulary, in the layout of serving engines.

    Buffers `d2t` [U] int64 (target id = draft id + d2t[draft id]) and `t2d` [V] bool are saved with the weights.
    """

    config: Any
    d2t: Tensor
    t2d: Tensor

    def register_vocabulary(self, config: Any) -> None:
        """Creates the buffers for the first `config.draft_vocab_size` tokens."""
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)

    def set_vocabulary(self, ids: Tensor) -> None:
        """Sets the draft vocabulary: U increasing target ids. Raises ValueError for anything else."""
        is_ordered = bool((ids[1:] > ids[:-1]).all()) and int(ids[0]) >= 0 and int(ids[-1]) < self.config.vocab_size
        if len(ids) != self.config.draft_vocab_size or not is_ordered:
            raise ValueError(
                f"draft.draft_vocab_size: need {self.config.draft_vocab_size} different ids below {self.config.vocab_size} in "
                f"increasing order, got {len(ids)}"
            )
        self.d2t.copy_(ids.to(self.d2t) - torch.arange(len(ids)).to(self.d2t))
        self.t2d.zero_()
        self.t2d[ids.to(self.t2d.device)] = True

    @property
    def num_draft_tokens(self) -> int:
        return int(self.config.draft_vocab_size)

    @property
    def token_map(self) -> Tensor | None:
        """LongTensor [U], draft id -> target id; None if they are equal."""
        if self.config.draft_vocab_size == self.config.vocab_size:
            return None
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t
