"""The target's pass over a tree, as a function of tensors, and the tree passes of one request.

Shapes: N tree nodes, X visible rows, S keys, C cache capacity, D hidden, V vocabulary, H KV heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from sage.runtime.attention import tile_mask, use_tree_attention
from sage.runtime.cache import RowCache, TreeCache
from sage.runtime.executors import Executor, executor_of
from sage.runtime.host_tensors import long_tensor
from sage.runtime.joint import (
    VERIFY_ORDER,
    BoundPass,
    Call,
    Steps,
    alone,
    layout,
    layout_arguments,
    length_of,
    pad_rows,
    row_of,
    shared_cache,
)
from sage.runtime.pass_function import (
    ALL_NODES,
    CAPACITY,
    KEYS,
    NODES,
    PER_ROW,
    ROWS,
    SEEN,
    VISIBLE,
    Argument,
    Dim,
    JointFunction,
    Padding,
    PassFunction,
    Result,
    Value,
)
from sage.runtime.prefix_attention import PassKeys, full_keys, sliding_keys
from sage.runtime.shared_cache import JointCache, JointQueries
from sage.targets.family import FULL, SLIDING, Family, Mask
from sage.targets.target import Features, Target

NAN_TOKEN = -1  # in place of a token where a logit is NaN


@dataclass
class TreeOutput:
    """Result of a tree pass: features of all nodes [1, N, D], logits [N, V], and the greedy tokens [N]."""

    features: Features
    logits: Tensor
    greedy: Tensor | None = None


class TreeFunction(PassFunction):
    """The target's pass over a tree, with its lm_head and its greedy choice at every node.

    Args:
        levels: indices k of `hidden_states` to return as well.
        nodes: the dimension of the nodes.
        rows: number of cache rows.
        own: arguments between the nodes' cache rows and the buffers.
    """

    labels = ("the target's pass over one node", "the target's pass over several nodes")

    def __init__(
        self, target: Target, levels: Sequence[int], own: Sequence[Argument], nodes: Dim = NODES, rows: Dim | int = 1
    ) -> None:
        buffers = (rows, target.num_kv_heads, CAPACITY, target.head_dim)
        arguments = (
            Argument("tokens", (nodes,), torch.long),
            Argument("positions", (nodes,), torch.long),
            Argument("rows", (nodes,), torch.long, Padding.spare_row),
            *own,
            Argument("keys", buffers, target.dtype, Padding.cache, target.num_layers),
            Argument("values", buffers, target.dtype, Padding.cache, target.num_layers),
        )
        features = Result((1, nodes, target.hidden_size))
        results = (Result((nodes,), False), Result((nodes, target.vocab_size), False), features, *[features] * len(levels))
        super().__init__(
            "target", self.labels, arguments, results, (describe_target(target), tuple(levels)), family_modules(target)
        )
        self.text_model, self.embed_tokens, self.lm_head = target.text_model, target.embed_tokens, target.lm_head
        self._target, self._levels = target, tuple(levels)

    def _read(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: RowCache | JointCache,
        mask: Mask,
        keys: PassKeys | None = None,
        queries: JointQueries | None = None,
    ) -> tuple[Tensor, ...]:
        """Returns greedy tokens [N] (`greedy_tokens`), logits [N, V], the last features [1, N, D] and those of the levels.
        Features equal those of a sequential pass along each node's path.
        """
        target = self._target
        embeds, places = self.embed_tokens(tokens)[None], target.family.decode_positions(positions)
        with use_tree_attention(self.text_model):
            features = target.run(embeds, places, mask, cache, self._levels, keys=keys, queries=queries)
        logits = self.lm_head(features.last[0])
        return greedy_tokens(logits), logits, features.last, *features.levels

    def _tile(self, visible: Tensor) -> Tensor:
        return tile_mask(visible, self._target.group, self._target.dtype)

    def _new_joint(self) -> JointFunction | None:
        return JointTreePass(self._target, self._levels)


class TreePass(TreeFunction):
    """A tree pass that masks all of its keys."""

    def __init__(self, target: Target, levels: Sequence[int]) -> None:
        columns = Argument("columns", (KEYS,), torch.long, Padding.counting)
        super().__init__(target, levels, (*_seen(VISIBLE), columns))

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
            keys, values: buffers of every layer, [1, H, C, d].

        Returns:
            the results of `TreeFunction._read`.
        """
        cache = RowCache(keys, values, rows, columns.shape[0])  # sizes come from `shape`: `len` is specialized in tracing
        return self._read(tokens, positions, cache, self._mask(visible, visible_rows, columns))

    def _mask(self, visible: Tensor, visible_rows: Tensor, columns: Tensor) -> Mask:
        """Returns the additive masks of the pass; None if its single node attends to all keys."""
        if visible.shape[1] == 1 and not self._target.family.window:
            return None
        seen = (columns < visible_rows[:1]).expand(visible.shape[0], -1).clone().index_copy_(1, visible_rows, visible)
        return self._target.family.tree_mask(seen, self._tile)


class JointTreePass(TreeFunction, JointFunction):
    """A tree pass over the trees of several requests. Shapes: T nodes of all trees, B cache rows, N nodes of a tree at most."""

    labels = ("the target's pass over one node of every request", "the target's pass over trees of several requests")

    def __init__(self, target: Target, levels: Sequence[int]) -> None:
        own = (
            *layout_arguments(ALL_NODES),
            Argument("visible", (ROWS, PER_ROW, VISIBLE), torch.bool, Padding.masked),
            Argument("first", (ROWS,), torch.long),
            Argument("columns", (KEYS,), torch.long, Padding.counting),
        )
        super().__init__(target, levels, own, ALL_NODES, ROWS)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        rows: Tensor,
        owners: Tensor,
        offsets: Tensor,
        places: Tensor,
        visible: Tensor,
        first: Tensor,
        columns: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        """Runs the pass.

        Args:
            tokens, positions, rows: LongTensor [T], as for `TreePass.forward`.
            owners, offsets, places: as of `sage.runtime.joint.Layout`.
            visible: BoolTensor [B, N, X], as for `TreePass.forward` of each request; False for padding.
            first: LongTensor [B], the first of the visible rows; all before it are visible to all nodes of the request.
            columns: LongTensor [S], 0 to S - 1.
            keys, values: buffers of every layer, [B, H, C, d].

        Returns:
            the results of `TreeFunction._read`, over all nodes.
        """
        queries = JointQueries(owners, offsets, places)
        cache = JointCache(keys, values, owners, rows, columns.shape[0], queries)
        place = columns - first[:, None]
        last = visible.shape[2] - 1
        near = visible.gather(2, place.clamp(0, last)[:, None].expand(-1, places.shape[1], -1))
        seen = (place < 0)[:, None] | (near & (place <= last)[:, None])
        return self._read(tokens, positions, cache, self._target.family.tree_mask(seen, self._tile), queries=queries)

    def join(self, calls: Sequence[Call], num_rows: int) -> Sequence[Value]:
        shared, device = shared_cache(calls), self._target.device
        tokens, positions, rows = (torch.cat([call.values[place] for call in calls]) for place in range(3))
        seen = [call.values[3] for call in calls]
        parts = layout(calls, [len(visible) for visible in seen], num_rows, device)
        own_rows, ends = [row_of(call) for call in calls], [length_of(call) for call in calls]
        first = [0] * num_rows
        for row, end, visible in zip(own_rows, ends, seen, strict=True):
            first[row] = end - visible.shape[1]
        shape = (*parts.places.shape, max(visible.shape[1] for visible in seen))
        return (
            tokens,
            positions,
            rows,
            parts.owners,
            parts.offsets,
            parts.places,
            pad_rows(seen, own_rows, shape, False),
            long_tensor(first, device),
            shared.steps.narrow(0, 0, max(ends)),
            *shared.layers(num_rows),
        )

    def split(self, calls: Sequence[Call], results: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        counts = [len(call.values[0]) for call in calls]
        greedy, logits, *features = (
            result.split(counts, axis) for result, axis in zip(results, (0, 0, *[1] * (len(results) - 2)), strict=True)
        )
        return list(zip(greedy, logits, *features, strict=True))


class SplitTreePass(TreeFunction):
    """A tree pass that masks the rows of the tree only, for which the number of keys is a tensor of the device."""

    def __init__(self, target: Target, levels: Sequence[int]) -> None:
        super().__init__(target, levels, _seen(SEEN))

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        rows: Tensor,
        visible: Tensor,
        visible_rows: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        """Runs the pass; arguments and results as for `TreePass.forward`."""
        capacity = keys[0].shape[2]
        found = self._keys(visible, visible_rows, capacity)
        return self._read(tokens, positions, RowCache(keys, values, rows, capacity), None, found)

    def _keys(self, visible: Tensor, visible_rows: Tensor, capacity: int) -> PassKeys:
        window = self._target.family.window
        given = (visible, visible_rows, capacity, self._target.group, self._tile)
        types = getattr(self._target.text_config, "layer_types", None) or [SLIDING if window else FULL]
        full = full_keys(*given) if FULL in types else None
        return PassKeys(full, None if window is None else sliding_keys(*given, window))


class TreePasses:
    """Tree passes of a target for one request.

    Args:
        levels: indices k of `hidden_states` to return as well.
        executor: None for that of the target's pass mode.
        order: as of a `BoundPass`.

    Attributes:
        is_split: whether a pass costs the keys that there are, not those of a bucket (see `SplitTreePass`).
    """

    def __init__(
        self, target: Target, levels: Sequence[int], executor: Executor | None = None, order: int = VERIFY_ORDER
    ) -> None:
        self.target, self.executor = target, executor or executor_of(target.passes)
        self.is_split = self.executor.splits_keys(target.device, target.dtype, target.head_dim)
        key = (tuple(levels), target.dtype, self.is_split)
        if key not in target.functions:
            target.functions[key] = SplitTreePass(target, levels) if self.is_split else TreePass(target, levels)
        self._pass = BoundPass(self.executor, target.functions[key], order)
        self._steps = torch.empty(0, dtype=torch.long)

    def capacity(self, num_tokens: int) -> int:
        """Returns the capacity of a cache for `num_tokens` tokens."""
        return self.executor.capacity(num_tokens)

    def new_cache(self, num_tokens: int) -> TreeCache:
        """Returns an empty cache for `num_tokens` tokens."""
        return self.executor.new_cache(self.target, num_tokens, self.target.new_cache)

    def __call__(self, tokens: Tensor, positions: Tensor, visible: Tensor, cache: TreeCache) -> TreeOutput:
        """Runs one pass; arguments as of `steps`."""
        return alone(self.steps(tokens, positions, visible, cache))

    def steps(self, tokens: Tensor, positions: Tensor, visible: Tensor, cache: TreeCache) -> Steps[TreeOutput]:
        """Asks for one pass, which appends N rows to the cache.

        Args:
            tokens: LongTensor [N] node tokens, parents before children.
            positions: LongTensor [N] rope positions.
            visible: BoolTensor [N, X], X >= N: attention of each node to the last X - N cached tokens and to the N nodes;
                earlier tokens are visible to all nodes. With X = N it is the tree's `ancestors`.
        """
        nodes, seen = visible.shape
        first = cache.reserve(nodes)
        end = first + nodes
        if len(self._steps) < end:
            self._steps = torch.arange(max(end, cache.capacity), device=self.target.device)
        steps = self._steps
        greedy, logits, last, *levels = yield from self._pass.steps(
            cache,
            tokens,
            positions,
            steps.narrow(0, first, nodes),
            visible,
            steps.narrow(0, end - seen, seen),
            *(() if self.is_split else (steps.narrow(0, 0, end),)),
            cache.keys,
            cache.values,
        )
        return TreeOutput(Features(last, tuple(levels)), logits, greedy)


def _seen(seen: Dim) -> tuple[Argument, Argument]:
    """Describes which of X cache rows each node attends to, and these rows."""
    return (
        Argument("visible", (NODES, seen), torch.bool, Padding.masked),
        Argument("visible_rows", (seen,), torch.long, Padding.spare_row),
    )


def greedy_tokens(logits: Tensor) -> Tensor:
    """Returns the argmax of each row of logits [N, V], `NAN_TOKEN` where a logit is NaN, LongTensor [N]."""
    is_nan = logits.amax(-1).isnan()  # `max` also returns the index and is slower than `amax` and `argmax` together
    return logits.argmax(-1).masked_fill(is_nan, NAN_TOKEN)


def family_modules(target: Target) -> list[str]:
    """Returns the modules of the target's family, which are found by their names and imported by no module."""
    return [kind.__module__ for kind in type(target.family).__mro__ if issubclass(kind, Family)]


def describe_target(target: Target) -> dict[str, Any]:
    """Returns what passes of a target depend on, besides weights: the configuration of its text layers."""
    return {"model_type": target.family.model_type, **without_paths(target.text_config)}


def without_paths(config: PreTrainedConfig) -> dict[str, Any]:
    """Returns a configuration without the folders that it came from."""
    return {key: value for key, value in config.to_dict().items() if key not in ("_name_or_path", "target_path")}
