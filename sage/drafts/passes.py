"""The passes of a draft head in decoding, as functions of tensors.

Shapes: F frontier nodes, P parents, M committed tokens, S keys, C cache capacity, D hidden, A feature levels, U draft
vocabulary, H KV heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sage.runtime.attention import repeat_mask
from sage.runtime.cache import RowCache
from sage.runtime.pass_function import CAPACITY, KEYS, NODES, PARENTS, TOKENS, Argument, Dim, Padding, PassFunction, Result
from sage.targets import Features, Target
from sage.targets.tree_passes import describe_target, family_modules, without_paths

if TYPE_CHECKING:
    from sage.drafts.head import DraftHead


class HeadPass(PassFunction):
    """A pass of a draft head over pairs.

    Args:
        count: the dimension of the pairs.
        own: arguments between the tokens and those that every pass of a head has.
        num_positions: of the rope: those of the pairs, or one for all of them.
    """

    def __init__(
        self,
        draft: DraftHead,
        target: Target,
        names: tuple[str, str],
        count: Dim,
        own: Sequence[Argument],
        num_positions: Dim | int,
        results: Sequence[Result],
    ) -> None:
        config, dtype = draft.config, draft.dtype
        buffers = (1, config.num_key_value_heads, CAPACITY, config.head_dim)
        arguments = (
            Argument("tokens", (count,), torch.long),
            *own,
            Argument("cos", (1, 1, num_positions, config.head_dim), dtype),
            Argument("sin", (1, 1, num_positions, config.head_dim), dtype),
            Argument("rows", (count,), torch.long, Padding.spare_row),
            Argument("mask", (count, KEYS), dtype, Padding.masked),
            Argument("keys", buffers, dtype, Padding.cache, 1),
            Argument("values", buffers, dtype, Padding.cache, 1),
        )
        modules = (type(draft).__module__, *family_modules(target))
        super().__init__("draft", names, arguments, results, (describe_target(target), without_paths(config)), modules)
        self.draft, self.embed_tokens, self.lm_head = draft, target.embed_tokens, target.lm_head
        self._target = target

    def _read(
        self,
        tokens: Tensor,
        features: Tensor,
        cos: Tensor,
        sin: Tensor,
        rows: Tensor,
        mask: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> Tensor:
        config = self.draft.config
        cache = RowCache(keys, values, rows, mask.shape[1])
        embeds = self.embed_tokens(tokens)[None]
        group = config.num_attention_heads // config.num_key_value_heads
        return self.draft.read(embeds, features, (cos, sin), repeat_mask(mask, group), cache)[0]


class LevelPass(HeadPass):
    """A draft head's pass over one level of a tree."""

    def __init__(self, draft: DraftHead, target: Target) -> None:
        size = draft.config.hidden_size
        names = ("the draft's level of one token", "the draft's level of several tokens")
        own = (Argument("parents", (NODES,), torch.long), Argument("hidden", (PARENTS, size), draft.dtype))
        results = (Result((NODES, size)), Result((NODES, draft.num_draft_tokens)))
        super().__init__(draft, target, names, NODES, own, 1, results)

    def forward(
        self,
        tokens: Tensor,
        parents: Tensor,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        rows: Tensor,
        mask: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Runs the level.

        Args:
            tokens, parents, rows: LongTensor [F]: the nodes' tokens, their parents as rows of `hidden`, and their cache rows.
            hidden: [P, D], the outputs of the last pass.
            cos, sin: [1, 1, 1, d], rope of the level.
            mask: [F, S], additive.
            keys, values: one buffer each, [1, H, C, d].

        Returns:
            outputs [F, D] and logits [F, U].
        """
        out = self._read(tokens, hidden.index_select(0, parents)[None], cos, sin, rows, mask, keys, values)
        return out, self.draft.logits(out, self._target)


class CommitPass(HeadPass):
    """A draft head's pass over the tokens that the target accepted."""

    def __init__(self, draft: DraftHead, target: Target) -> None:
        names = ("the draft's commit of one token", "the draft's commit of several tokens")
        of_target = (1, TOKENS, target.hidden_size)
        own = (
            Argument("last", of_target, target.dtype),
            Argument("levels", of_target, target.dtype, count=len(draft.levels)),
        )
        results = (Result((1, draft.config.hidden_size)), Result((1, draft.num_draft_tokens)))
        super().__init__(draft, target, names, TOKENS, own, TOKENS, results)

    def forward(
        self,
        tokens: Tensor,
        last: Tensor,
        levels: Sequence[Tensor],
        cos: Tensor,
        sin: Tensor,
        rows: Tensor,
        mask: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Runs the head over M pairs.

        Args:
            tokens, rows: LongTensor [M].
            last, levels: `Features` of the tokens, 1 + A tensors [1, M, D].
            cos, sin: [1, 1, M, d].
            mask: [M, S], additive.
            keys, values: one buffer each, [1, H, C, d].

        Returns:
            the output of the last pair [1, D], and its logits [1, U].
        """
        features = self.draft.fuse(Features(last, tuple(levels)))
        out = self._read(tokens, features, cos, sin, rows, mask, keys, values)[-1:]
        return out, self.draft.logits(out, self._target)
