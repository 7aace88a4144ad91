"""The passes of a draft head in decoding as functions of tensors, for one request and for several.

Shapes: F frontier nodes of one tree level, P parents, M tokens committed, S keys, C cache capacity, D hidden, A feature levels,
U draft vocabulary, H KV heads, d head size. Of R requests: T nodes or tokens of all, N of one at most, B cache rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sage.drafts.layer import LastQuery
from sage.runtime.attention import repeat_mask
from sage.runtime.cache import RowCache
from sage.runtime.joint import Call, layout, layout_arguments, length_of, pad_rows, row_of, shared_cache, starts_of
from sage.runtime.pass_function import (
    ALL_NODES,
    ALL_PARENTS,
    CALLS,
    CAPACITY,
    KEYS,
    NODES,
    PARENTS,
    PER_ROW,
    ROWS,
    TOKENS,
    Argument,
    Dim,
    JointFunction,
    Padding,
    PassFunction,
    Result,
    Value,
)
from sage.runtime.shared_cache import JointCache, JointQueries
from sage.targets import Features, Target
from sage.targets.tree_passes import describe_target, family_modules, without_paths


class HeadPass(PassFunction):
    """A pass of a draft head over pairs.

    Args:
        draft: a `DraftHead`.
        count: the dimension of the pairs.
        pairs: arguments that describe the pairs, before those that every pass of a head has.
        num_positions: of the rope: those of the pairs, or one for all of them.
        attention: arguments between the pairs' cache rows and the buffers.
        num_rows: rows of the cache.
    """

    def __init__(
        self,
        draft: Any,
        target: Target,
        names: tuple[str, str],
        count: Dim,
        pairs: Sequence[Argument],
        num_positions: Dim | int,
        results: Sequence[Result],
        attention: Sequence[Argument] | None = None,
        num_rows: Dim | int = 1,
    ) -> None:
        config, dtype = draft.config, draft.dtype
        buffers = (num_rows, config.num_key_value_heads, CAPACITY, config.head_dim)
        arguments = (
            *pairs,
            Argument("cos", (1, 1, num_positions, config.head_dim), dtype),
            Argument("sin", (1, 1, num_positions, config.head_dim), dtype),
            Argument("rows", (count,), torch.long, Padding.spare_row),
            *([Argument("mask", (count, KEYS), dtype, Padding.masked)] if attention is None else attention),
            Argument("keys", buffers, dtype, Padding.cache, draft.num_layers),
            Argument("values", buffers, dtype, Padding.cache, draft.num_layers),
        )
        modules = (type(draft).__module__, *family_modules(target))
        super().__init__("draft", names, arguments, results, (describe_target(target), without_paths(config)), modules)
        self.draft, self.embed_tokens, self.lm_head = draft, target.embed_tokens, target.lm_head
        self._target = target

    def _read(
        self,
        embeds: Tensor,
        features: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor,
        cache: RowCache | JointCache | LastQuery,
    ) -> Tensor:
        return self.draft.read(embeds, features, (cos, sin), repeat_mask(mask, self._group), cache)[0]

    @property
    def _group(self) -> int:
        """Query heads per KV head."""
        config = self.draft.config
        return int(config.num_attention_heads // config.num_key_value_heads)


class LevelPass(HeadPass):
    """A draft head's pass over one level of a tree."""

    def __init__(self, draft: Any, target: Target) -> None:
        size = draft.config.hidden_size
        names = ("the draft's level of one token", "the draft's level of several tokens")
        results = (Result((NODES, size)), Result((NODES, draft.num_draft_tokens)))
        super().__init__(draft, target, names, NODES, _nodes(NODES, PARENTS, draft), 1, results)

    def _new_joint(self) -> JointFunction | None:
        return JointLevelPass(self.draft, self._target)

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
        cache = RowCache(keys, values, rows, mask.shape[1])
        out = self._read(self.embed_tokens(tokens)[None], hidden.index_select(0, parents)[None], cos, sin, mask, cache)
        return out, self.draft.logits(out, self._target)


class CommitPass(HeadPass):
    """A draft head's pass over the tokens that the target accepted, or over a prompt."""

    def __init__(self, draft: Any, target: Target) -> None:
        names = ("the draft's commit of one token", "the draft's commit of several tokens")
        results = (Result((1, draft.config.hidden_size)), Result((1, draft.num_draft_tokens)))
        attention = [Argument("mask", (1, KEYS), draft.dtype, Padding.masked)]
        super().__init__(draft, target, names, TOKENS, pair_arguments(TOKENS, draft, target), TOKENS, results, attention)

    def _new_joint(self) -> JointFunction | None:
        return JointCommitPass(self.draft, self._target)

    def forward(
        self,
        embeds: Tensor,
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
            embeds: [1, M, D], embeddings of the second tokens.
            last, levels: `Features` of the first ones, 1 + A tensors [1, M, D].
            rows: LongTensor [M].
            cos, sin: [1, 1, M, d].
            mask: [1, S], additive, of the last pair.
            keys, values: one buffer each, [1, H, C, d].

        Returns:
            the output of the last pair [1, D], and its logits [1, U].
        """
        features = self.draft.fuse(Features(last, tuple(levels)))
        cache = LastQuery(RowCache(keys, values, rows, mask.shape[1]))
        out = self._read(embeds, features, cos, sin, mask, cache)
        return out, self.draft.logits(out, self._target)


class JointLevelPass(HeadPass, JointFunction):
    """A draft head's pass over one level of the trees of several requests."""

    def __init__(self, draft: Any, target: Target) -> None:
        size = draft.config.hidden_size
        names = ("the draft's level of one token of every request", "the draft's level of several requests")
        attention = (
            *layout_arguments(ALL_NODES),
            Argument("mask", (ROWS, PER_ROW, KEYS), draft.dtype, Padding.masked),
        )
        results = (Result((ALL_NODES, size)), Result((ALL_NODES, draft.num_draft_tokens)))
        super().__init__(
            draft, target, names, ALL_NODES, _nodes(ALL_NODES, ALL_PARENTS, draft), ALL_NODES, results, attention, ROWS
        )

    def forward(
        self,
        tokens: Tensor,
        parents: Tensor,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        rows: Tensor,
        owners: Tensor,
        offsets: Tensor,
        places: Tensor,
        mask: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Runs the level.

        Args:
            tokens, parents, rows: LongTensor [T], as for `LevelPass.forward`; parents are rows of `hidden` of all requests.
            hidden: [P, D].
            cos, sin: [1, 1, T, d], rope of every node.
            owners, offsets, places: as of `sage.runtime.joint.Layout`.
            mask: [B, N, S], additive.
            keys, values: one buffer each, [B, H, C, d].

        Returns:
            outputs [T, D] and logits [T, U].
        """
        cache = JointCache(keys, values, owners, rows, mask.shape[2], JointQueries(owners, offsets, places))
        out = self._read(self.embed_tokens(tokens)[None], hidden.index_select(0, parents)[None], cos, sin, mask, cache)
        return out, self.draft.logits(out, self._target)

    def join(self, calls: Sequence[Call], num_rows: int) -> Sequence[Value]:
        tokens, parents, hidden, cos, sin, rows, masks = ([call.values[place] for call in calls] for place in range(7))
        counts, device = [len(one) for one in tokens], hidden[0].device
        parts = layout(calls, counts, num_rows, device)
        longest = max(length_of(call) for call in calls)
        lowest = torch.finfo(hidden[0].dtype).min
        ropes = [
            torch.cat([one.expand(-1, -1, count, -1) for one, count in zip(of_all, counts, strict=True)], 2)
            for of_all in (cos, sin)
        ]
        return (
            torch.cat(tokens),
            torch.cat(parents) + starts_of(counts, [len(one) for one in hidden], device),
            torch.cat(hidden),
            *ropes,
            torch.cat(rows),
            parts.owners,
            parts.offsets,
            parts.places,
            pad_rows(masks, [row_of(call) for call in calls], (*parts.places.shape, longest), lowest),
            *shared_cache(calls).layers(num_rows),
        )

    def split(self, calls: Sequence[Call], results: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        counts = [len(call.values[0]) for call in calls]
        return list(zip(*(result.split(counts) for result in results), strict=True))


class JointCommitPass(HeadPass, JointFunction):
    """A draft head's pass over the tokens that the target accepted in several requests."""

    def __init__(self, draft: Any, target: Target) -> None:
        names = ("the draft's commit of one token of every request", "the draft's commit of several requests")
        attention = (
            *layout_arguments(ALL_NODES),
            Argument("ends", (CALLS,), torch.long),
            Argument("columns", (KEYS,), torch.long, Padding.counting),
        )
        results = (Result((CALLS, draft.config.hidden_size)), Result((CALLS, draft.num_draft_tokens)))
        pairs = pair_arguments(ALL_NODES, draft, target)
        super().__init__(draft, target, names, ALL_NODES, pairs, ALL_NODES, results, attention, ROWS)

    def forward(
        self,
        embeds: Tensor,
        last: Tensor,
        levels: Sequence[Tensor],
        cos: Tensor,
        sin: Tensor,
        rows: Tensor,
        owners: Tensor,
        offsets: Tensor,
        places: Tensor,
        ends: Tensor,
        columns: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Runs the head over T pairs.

        Args:
            embeds, last, levels: as for `CommitPass.forward`, [1, T, D] each.
            rows: LongTensor [T].
            cos, sin: [1, 1, T, d].
            owners, offsets, places, ends: as of `sage.runtime.joint.Layout`.
            columns: LongTensor [S], 0 to S - 1.
            keys, values: one buffer each, [B, H, C, d].

        Returns:
            the output of the last pair of each request [R, D], and its logits [R, U].
        """
        cache = JointCache(keys, values, owners, rows, columns.shape[0], JointQueries(owners, offsets, places))
        features = self.draft.fuse(Features(last, tuple(levels)))
        own_rows = rows.index_select(0, places.reshape(-1)).view(places.shape)
        lowest = torch.finfo(self.draft.dtype).min
        mask = torch.zeros((*places.shape, columns.shape[0]), dtype=self.draft.dtype, device=rows.device)
        mask = mask.masked_fill(columns > own_rows[..., None], lowest)
        out = self._read(embeds, features, cos, sin, mask, cache).index_select(0, ends)
        return out, self.draft.logits(out, self._target)

    def join(self, calls: Sequence[Call], num_rows: int) -> Sequence[Value]:
        embeds, last, levels, cos, sin, rows = ([call.values[place] for call in calls] for place in range(6))
        parts = layout(calls, [len(one) for one in rows], num_rows, last[0].device)
        shared = shared_cache(calls)
        return (
            torch.cat(embeds, 1),
            torch.cat(last, 1),
            [torch.cat(level, 1) for level in zip(*levels, strict=True)],
            torch.cat(cos, 2),
            torch.cat(sin, 2),
            torch.cat(rows),
            parts.owners,
            parts.offsets,
            parts.places,
            parts.ends,
            shared.steps.narrow(0, 0, max(length_of(call) for call in calls)),
            *shared.layers(num_rows),
        )

    def split(self, calls: Sequence[Call], results: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        return list(zip(*(result.split(1) for result in results), strict=True))


def _nodes(count: Dim, parents: Dim, draft: Any) -> list[Argument]:
    """Describes the nodes of a level: their tokens, their parents, and the outputs of the last pass, which parents index."""
    hidden = Argument("hidden", (parents, draft.config.hidden_size), draft.dtype)
    return [Argument("tokens", (count,), torch.long), Argument("parents", (count,), torch.long), hidden]


def pair_arguments(count: Dim, draft: Any, target: Target) -> list[Argument]:
    """Describes the pairs of tokens that the target has read: the embeddings of the second ones, features of the first."""
    of_target = (1, count, target.hidden_size)
    levels = Argument("levels", of_target, target.dtype, count=len(draft.levels))
    return [Argument("embeds", of_target, target.dtype), Argument("last", of_target, target.dtype), levels]
