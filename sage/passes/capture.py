"""Passes with static buffers, captured as CUDA graphs: one graph per bucket of nodes and keys, captured when first needed.

A replayed graph costs the host one launch. It reads and writes fixed addresses, so inputs are copied into static buffers padded
to a bucket, and the caches of finished requests are used again. A padding node writes a row after all others, which no node of
the tree sees. If a capture fails, passes run eagerly, with one warning.

Shapes: N tree nodes, X visible rows, F frontier nodes, M committed tokens, S keys, C cache capacity, D hidden.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sage.drafts.eagle import EagleDraft
from sage.drafts.eagle3 import Eagle3Draft
from sage.drafts.session import EagleSession, new_draft_cache
from sage.io.model_files import in_one_line
from sage.passes.functions import CommitPass, LevelPass, TreePass
from sage.runtime.buckets import key_bucket, node_bucket
from sage.runtime.cache import TreeCache
from sage.runtime.host_tensors import Tokens
from sage.targets import Features, Target
from sage.targets.tree_passes import EagerTreePasses, TreeOutput

Outputs = Sequence[Tensor]
Replay = Callable[[], object]
Capture = Callable[[Callable[[], Outputs]], tuple[Replay, Outputs]]


def cuda_graph(function: Callable[[], Outputs]) -> tuple[Replay, Outputs]:
    """Captures a function on the current device; returns what replays it and its static results."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # libraries allocate their workspaces in the first call
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=_pool(torch.cuda.current_device())):
        outputs = function()
    return graph.replay, outputs


_POOLS: dict[int, Any] = {}


def _pool(device: int) -> Any:
    """Returns the memory pool that all graphs of a device share; none of them is replayed while another one runs."""
    if device not in _POOLS:
        _POOLS[device] = torch.cuda.graph_pool_handle()
    return _POOLS[device]


def call_again(function: Callable[[], Outputs]) -> tuple[Replay, Outputs]:
    """Replays by calling the function again, into the same results: `cuda_graph` for devices without graphs."""
    outputs = [result.clone() for result in function()]

    def replay() -> None:
        for static, result in zip(outputs, function(), strict=True):
            static.copy_(result)

    return replay, outputs


class CachePool:
    """Caches of one shape whose buffers are used again, so that graphs stay valid; zeroed once, because padding attends to
    rows that no pass has written.
    """

    def __init__(self, new_cache: Callable[[int], TreeCache]) -> None:
        self._new_cache = new_cache
        self._free: list[list[Tensor]] = []

    def __call__(self, capacity: int) -> TreeCache:
        """Returns an empty cache with a capacity of at least `capacity` tokens and a row for padding."""
        size = key_bucket(capacity + 1)
        fits = [buffers for buffers in self._free if buffers[0].shape[-2] >= size]
        cache = self._new_cache(0 if fits else size)
        if fits:
            buffers = min(fits, key=lambda buffers: buffers[0].shape[-2])
            self._free.remove(buffers)
            cache.adopt(buffers)
        else:
            cache.zero_to(size)
            cache.crop_to(0)
        weakref.finalize(cache, self._free.append, cache.buffers)
        return cache


class StaticCall:
    """A function captured with static inputs."""

    def __init__(self, function: Callable[..., Outputs], inputs: Sequence[Any], capture: Capture) -> None:
        self.inputs = inputs
        self._replay, self._outputs = capture(lambda: function(*inputs))

    def __call__(self) -> Outputs:
        """Replays the function on the contents of `inputs`; returns its static results."""
        self._replay()
        return self._outputs


class Graphs:
    """The graphs of a model's functions, by bucket and by the addresses of cache and weights.

    Args:
        label: names the model in the warning about a capture that fails; after it, there are no further captures.
    """

    def __init__(self, label: str, capture: Capture) -> None:
        self._label, self._capture = label, capture
        self._calls: dict[tuple[Any, ...], StaticCall] = {}
        self._is_failed = False

    def __call__(
        self,
        function: Callable[..., Outputs],
        sizes: tuple[int, ...],
        cache: TreeCache,
        weight: Tensor,
        new_inputs: Callable[..., tuple[Any, ...]],
    ) -> StaticCall | None:
        """Returns the graph of a bucket, captured if it is needed for the first time; None if that fails.

        Args:
            weight: of the model; its address changes when the weights move.
            new_inputs: returns static inputs for `sizes`, without the cache.
        """
        key = (function, *sizes, cache.buffers[0].data_ptr(), weight.data_ptr())
        if key not in self._calls and not self._is_failed:
            try:
                inputs = (*new_inputs(*sizes), cache.keys, cache.values)
                self._calls[key] = StaticCall(function, inputs, self._capture)
            except RuntimeError as error:
                self._is_failed = True
                reason = in_one_line(error)[:300]
                message = f"passes: the {self._label}'s pass cannot be captured ({reason}); its passes run eagerly"
                warnings.warn(message, stacklevel=3)
        return self._calls.get(key)

    def drop_moved(self, weight: Tensor) -> None:
        """Drops the graphs that read weights from other addresses than now."""
        self._calls = {key: call for key, call in self._calls.items() if key[-1] == weight.data_ptr()}


class CapturedTreePasses(EagerTreePasses):
    """Tree passes of a target as graphs.

    Args:
        levels: indices k of `hidden_states` to return as well.
        capture: `cuda_graph`, or for tests `call_again`.
    """

    def __init__(self, target: Target, levels: Sequence[int], capture: Capture = cuda_graph) -> None:
        super().__init__(target, levels)
        self._function, self._graphs = TreePass(target, levels), Graphs("target", capture)
        self._caches = CachePool(target.new_cache)

    def capacity(self, num_tokens: int) -> int:
        return key_bucket(num_tokens + 1)

    def new_cache(self, num_tokens: int) -> TreeCache:
        return self._caches(num_tokens)

    def refresh(self) -> None:
        """Drops graphs that read weights from other addresses than now."""
        self._graphs.drop_moved(self.target.lm_head.weight)

    def __call__(self, tokens: Tensor, positions: Tensor, visible: Tensor, cache: TreeCache) -> TreeOutput:
        nodes, seen = visible.shape
        end = cache.length + nodes
        sizes = node_bucket(nodes), node_bucket(seen), key_bucket(end + 1)
        call = self._graphs(self._function, sizes, cache, self.target.lm_head.weight, self._new_inputs)
        if call is None:
            return super().__call__(tokens, positions, visible, cache)
        cache.reserve(nodes)
        static_tokens, static_positions, rows, static_visible, visible_rows, columns, *_ = call.inputs
        static_tokens[:nodes].copy_(tokens)
        static_positions[:nodes].copy_(positions)
        _number(rows, end - nodes, end, len(columns) - 1)
        _number(visible_rows, end - seen, end, len(columns) - 1)
        static_visible.fill_(False)
        static_visible[:nodes, :seen].copy_(visible)
        greedy, logits, last, *levels = call()
        kept = Features(last[:, :nodes].clone(), tuple(level[:, :nodes].clone() for level in levels))
        return TreeOutput(kept, logits[:nodes], greedy[:nodes])

    def _new_inputs(self, nodes: int, seen: int, keys: int) -> tuple[Tensor, ...]:
        numbers, columns = torch.arange(nodes, device=self.target.device), torch.arange(keys, device=self.target.device)
        visible = torch.zeros(nodes, seen, dtype=torch.bool, device=self.target.device)
        return numbers * 0, numbers, keys - 1 + numbers * 0, visible, keys - 1 + columns[:seen] * 0, columns


class CapturedHead:
    """Levels and commits of a draft head as graphs."""

    def __init__(self, draft: EagleDraft | Eagle3Draft, target: Target, capture: Capture = cuda_graph) -> None:
        self.draft, self.target, self.caches = draft, target, CachePool(partial(new_draft_cache, draft))
        self._level, self._commit = LevelPass(draft, target), CommitPass(draft, target)
        self._graphs = Graphs("draft", capture)

    def level(self, width: int, cache: TreeCache) -> StaticCall | None:
        """Returns the graph of a level of at least `width` nodes; None if it cannot be captured."""
        return self._graph(self._level, self._level_inputs, width, cache)

    def commit(self, length: int, cache: TreeCache) -> StaticCall | None:
        """Returns the graph of a commit of at least `length` tokens; None if it cannot be captured."""
        return self._graph(self._commit, self._commit_inputs, length, cache)

    def _graph(
        self, function: nn.Module, new_inputs: Callable[..., tuple[Any, ...]], count: int, cache: TreeCache
    ) -> StaticCall | None:
        sizes = node_bucket(count), key_bucket(cache.length + count + 1)
        return self._graphs(function, sizes, cache, next(self.draft.parameters()), new_inputs)

    def _level_inputs(self, width: int, keys: int) -> tuple[Any, ...]:
        numbers, mask, cos, sin = self._inputs(width, keys, 1)
        hidden = mask.new_zeros(width, self.draft.config.hidden_size)
        return numbers * 0, numbers, hidden, cos, sin, keys - 1 + numbers * 0, mask

    def _commit_inputs(self, length: int, keys: int) -> tuple[Any, ...]:
        numbers, mask, cos, sin = self._inputs(length, keys, length)
        features = [
            torch.zeros(1, length, self.target.hidden_size, dtype=self.target.dtype, device=self.target.device)
            for _ in range(1 + len(self.draft.levels))
        ]
        return numbers * 0, features[0], features[1:], cos, sin, keys - 1 + numbers * 0, mask

    def _inputs(self, count: int, keys: int, positions: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns numbers [count], a mask [count, keys], and rope for a number of positions."""
        weight = next(self.draft.parameters())
        rope = weight.new_zeros(1, 1, positions, self.draft.config.head_dim)
        return torch.arange(count, device=weight.device), weight.new_zeros(count, keys), rope, rope.clone()


class CapturedSession(EagleSession):
    """Session of a draft head whose levels and commits are graphs; prefill, whose length varies, is eager."""

    def __init__(self, draft: EagleDraft | Eagle3Draft, target: Target, capacity: int, calls: CapturedHead) -> None:
        super().__init__(draft, target, capacity, calls.caches(capacity))
        self.calls = calls

    @torch.no_grad()
    def expand(self, rows: Tensor, tokens: Tokens) -> Tensor:
        width, first = len(rows), self.cache.length
        call = self.calls.level(width, self.cache)
        if call is None:
            return super().expand(rows, tokens)
        visible = self._visible_to(rows, first)
        self.cache.reserve(width)
        parents = self.hidden.expand(width, -1) if len(self.hidden) == 1 else self.hidden.index_select(0, rows)
        static_tokens, _, hidden, cos, sin, written, static_mask, *_ = call.inputs
        static_tokens[:width].copy_(self._staging.stage(tokens))
        hidden[:width].copy_(parents)
        for static, own in zip((cos, sin), self._rope(self.offset + self.depth, 1), strict=True):
            static.copy_(own)
        _number(written, first, first + width, static_mask.shape[1] - 1)
        static_mask[:width].fill_(torch.finfo(self.dtype).min)
        static_mask[:width, : first + width] = 0 if visible is None else visible
        self.depth += 1
        out, logits = call()
        self.hidden = out[:width].clone()
        return logits[:width].clone()

    @torch.no_grad()
    def commit(self, features: Features, tokens: Tokens) -> Tensor:
        self.cache.crop_to(self.committed)
        length, first = len(tokens), self.committed
        call = self.calls.commit(length, self.cache)
        if call is None:
            return super().commit(features, tokens)
        self.cache.reserve(length)
        static_tokens, last, levels, cos, sin, written, static_mask, *_ = call.inputs
        for static, own in zip((last, *levels), (features.last, *features.levels), strict=True):
            static[:, -length:].copy_(own)  # padding comes first, because the last output is wanted
        for static, own in zip((cos, sin), self._rope(self.offset, length), strict=True):
            static[:, :, -length:].copy_(own)
        static_tokens[-length:].copy_(self._staging.stage(tokens))
        written.fill_(static_mask.shape[1] - 1)
        torch.arange(first, first + length, out=written[-length:])
        static_mask.fill_(torch.finfo(self.dtype).min).triu_(first + length - len(static_mask) + 1)
        out, logits = call()
        self.offset += length
        self.committed, self.depth, self.hidden, self.visible = self.cache.length, 0, out.clone(), None
        return logits.clone()


def _number(rows: Tensor, first: int, end: int, padding: int) -> None:
    """Writes `first` to `end - 1`, and `padding` after them."""
    rows[end - first :] = padding
    torch.arange(first, end, out=rows[: end - first])
