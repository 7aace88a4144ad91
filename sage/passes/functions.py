"""The passes of decoding as functions of tensors, so that they can be compiled and captured.

A function reads and writes cache rows through tensors: `keys` and `values` are the buffers of every layer, [1, H, C, d], whose
first S rows it attends to, and `rows` the rows that it writes. Nothing in it depends on a number of the host.

Shapes: N tree nodes, X visible rows, F frontier nodes, P parents, M committed tokens, S keys, C cache capacity, D hidden, V
vocabulary, U draft vocabulary, H KV heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sage.drafts.head import DraftHead
from sage.runtime.attention import use_tree_attention
from sage.runtime.cache import RowCache
from sage.runtime.greedy import greedy_tokens
from sage.targets import Features, Target


class TreePass(nn.Module):
    """The target's pass over a tree, with its lm_head and its greedy choice at every node."""

    def __init__(self, target: Target, levels: Sequence[int]) -> None:
        super().__init__()
        self.text_model, self.embed_tokens, self.lm_head = target.text_model, target.embed_tokens, target.lm_head
        self._target, self._levels = target, tuple(levels)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        rows: Tensor,
        visible: Tensor,
        visible_rows: Tensor,
        columns: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        """Runs the pass.

        Args:
            tokens, positions, rows: LongTensor [N], rope positions, and the cache rows of the nodes.
            visible: BoolTensor [N, X], attention of each node to X cache rows, those of the nodes among them.
            visible_rows: LongTensor [X], these rows; all before the first of them are visible to all nodes.
            columns: LongTensor [S], 0 to S - 1.

        Returns:
            greedy tokens [N] (`sage.runtime.greedy.greedy_tokens`), logits [N, V], the last
            features [1, N, D] and those of the levels.
        """
        target = self._target  # sizes come from `shape`: `len` would be a number of the trace
        seen = (columns < visible_rows[:1]).expand(tokens.shape[0], -1).clone().index_copy_(1, visible_rows, visible)
        mask = target.family.tree_mask(seen, self._tile)
        cache = RowCache(keys, values, rows, columns.shape[0])
        with use_tree_attention(self.text_model):
            embeds = self.embed_tokens(tokens)[None]
            features = target.run(embeds, target.family.decode_positions(positions), mask, cache, self._levels)
        logits = self.lm_head(features.last[0])
        return greedy_tokens(logits), logits, features.last, *features.levels

    def _tile(self, visible: Tensor) -> Tensor:
        """As `tile_mask`, without the alignment, whose sizes would be numbers of the trace."""
        mask = torch.zeros(visible.shape, dtype=self._target.dtype, device=visible.device)
        return mask.masked_fill(~visible, torch.finfo(self._target.dtype).min).repeat(self._target.group, 1)[None, None]


class _HeadPass(nn.Module):
    """A pass of a draft head over pairs."""

    def __init__(self, draft: DraftHead, target: Target) -> None:
        super().__init__()
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
        group = config.num_attention_heads // config.num_key_value_heads
        cache = RowCache(keys, values, rows, mask.shape[1])
        embeds = self.embed_tokens(tokens)[None]
        return self.draft.read(embeds, features, (cos, sin), mask.repeat(group, 1)[None, None], cache)[0]


class LevelPass(_HeadPass):
    """A draft head's pass over one level of a tree."""

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

        Returns:
            outputs [F, D] and logits [F, U].
        """
        out = self._read(tokens, hidden.index_select(0, parents)[None], cos, sin, rows, mask, keys, values)
        return out, self.draft.logits(out, self._target)


class CommitPass(_HeadPass):
    """A draft head's pass over the tokens that the target accepted."""

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
            last, levels: `Features` of the tokens, each [1, M, D].
            cos, sin: [1, 1, M, d].
            mask: [M, S], additive.

        Returns:
            the output of the last pair [1, D], and its logits [1, U].
        """
        features = self.draft.fuse(Features(last, tuple(levels)))
        out = self._read(tokens, features, cos, sin, rows, mask, keys, values)[-1:]
        return out, self.draft.logits(out, self._target)
