"""Pass functions with static buffers, captured as CUDA graphs: one graph per bucket of sizes, captured when first needed.

A replayed graph costs the host one launch. It reads and writes fixed addresses, so arguments are copied into static buffers
padded to a bucket, and the caches of finished requests are used again. A padding node writes a row after all others, which no
node of the tree sees. If a capture fails, passes run eagerly, with one warning.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from sage.io.model_files import in_one_line
from sage.runtime.buckets import key_bucket
from sage.runtime.cache import TreeCache
from sage.runtime.executors import Executor, Run
from sage.runtime.package_folder import warn_once
from sage.runtime.pass_function import KEYS, Argument, Dim, Padding, PassFunction, Result

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
    """Buffers of finished requests, which are used again so that graphs stay valid; zeroed once, because padding attends to
    rows that no pass has written.
    """

    def __init__(self) -> None:
        self._free: list[list[Tensor]] = []

    def __call__(self, size: int, make: Callable[[int], TreeCache]) -> TreeCache:
        """Returns an empty cache with a capacity of at least `size` tokens; `make` returns a new cache."""
        fits = [buffers for buffers in self._free if buffers[0].shape[-2] >= size]
        cache = make(0 if fits else size)
        if fits:
            buffers = min(fits, key=lambda buffers: buffers[0].shape[-2])
            self._free.remove(buffers)
            cache.adopt(buffers)
        else:
            cache.zero_to(size)
            cache.crop_to(0)
        weakref.finalize(cache, self._free.append, cache.buffers)
        return cache


class Captured(Executor):
    """Runs functions as graphs.

    Args:
        capture: `cuda_graph`, or for tests `call_again`.
    """

    def __init__(self, capture: Capture = cuda_graph) -> None:
        self._capture = capture
        self._pools: weakref.WeakKeyDictionary[Any, CachePool] = weakref.WeakKeyDictionary()

    def bind(self, function: PassFunction) -> Run:
        addresses = [weight.data_ptr() for weight in function.parameters()]
        kept = function.kept.get(self)
        if kept is None or kept.addresses != addresses:
            kept = function.kept[self] = CapturedFunction(function, self._capture, addresses)
        run: CapturedFunction = kept
        return run

    def capacity(self, num_tokens: int) -> int:
        return key_bucket(num_tokens + 1)  # and one row that padding writes

    def new_cache(self, owner: Any, num_tokens: int, make: Callable[[int], TreeCache]) -> TreeCache:
        return self._pools.setdefault(owner, CachePool())(self.capacity(num_tokens), make)


class CapturedFunction:
    """The graphs of a function with weights at fixed addresses, by bucket and by the addresses of the cache."""

    def __init__(self, function: PassFunction, capture: Capture, addresses: Sequence[int]) -> None:
        self.addresses = addresses
        self._function, self._capture = function, capture
        self.graphs: dict[tuple[Hashable, ...], StaticCall] = {}
        self._is_failed = False

    def __call__(self, *values: Any) -> Outputs:
        sizes = self._function.sizes(values)
        padded = {dim: dim.bucket(size) for dim, size in sizes.items()}
        addresses = [value[0].data_ptr() for argument, value in self._described(values) if argument.padding is Padding.cache]
        key = (*padded.values(), *addresses)
        if key not in self.graphs:
            if self._is_failed:
                return self._function(*values)
            try:
                self.graphs[key] = StaticCall(self._function, values, padded, self._capture)
            except RuntimeError as error:
                self._is_failed = True
                reason = in_one_line(error)[:300]
                warn_once(f"passes: the {self._function.owner}'s pass cannot be captured ({reason}); its passes run eagerly")
                return self._function(*values)
        return self.graphs[key](values, sizes)

    def _described(self, values: Sequence[Any]) -> zip[tuple[Argument, Any]]:
        return zip(self._function.arguments, values, strict=True)


class StaticCall:
    """A function captured with static arguments.

    Args:
        values: arguments of a call; the buffers of its cache become static arguments.
        sizes: of the static arguments.
    """

    def __init__(self, function: PassFunction, values: Sequence[Any], sizes: dict[Dim, int], capture: Capture) -> None:
        self._function, self._sizes = function, sizes
        self._inputs = [self._static(argument, value) for argument, value in zip(function.arguments, values, strict=True)]
        self._replay, self._outputs = capture(lambda: function(*self._inputs))

    def __call__(self, values: Sequence[Any], sizes: dict[Dim, int]) -> Outputs:
        """Replays the function on `values`, whose dynamic dimensions have `sizes`."""
        for argument, static, value in zip(self._function.arguments, self._inputs, values, strict=True):
            if argument.padding is Padding.cache or argument.padding is Padding.counting:
                continue
            pairs = ((static, value),) if argument.count is None else zip(static, value, strict=True)
            for buffer, tensor in pairs:
                self._write(argument, buffer, tensor, sizes)
        self._replay()
        return [self._read(result, out, sizes) for result, out in zip(self._function.results, self._outputs, strict=True)]

    def _write(self, argument: Argument, static: Tensor, value: Tensor, sizes: dict[Dim, int]) -> None:
        contents = self._contents(argument.dims, static, sizes)
        if contents is not static:
            self._pad(argument, static)
        contents.copy_(value)

    def _static(self, argument: Argument, value: Any) -> Any:
        """Returns the static buffers of an argument, filled with padding: the function runs on them while it is captured."""
        if argument.padding is Padding.cache:
            return value
        if argument.count is None:
            return self._pad(argument, argument.empty(self._sizes, value.device))
        return [self._pad(argument, argument.empty(self._sizes, tensor.device)) for tensor in value]

    def _pad(self, argument: Argument, static: Tensor) -> Tensor:
        if argument.padding is Padding.spare_row:
            return static.fill_(self._sizes[KEYS] - 1)
        return static.fill_(masked_value(argument.dtype)) if argument.padding is Padding.masked else static

    def _read(self, result: Result, static: Tensor, sizes: dict[Dim, int]) -> Tensor:
        contents = self._contents(result.dims, static, sizes)
        return contents.clone() if result.is_kept else contents

    def _contents(self, dims: Sequence[int | Dim], static: Tensor, sizes: dict[Dim, int]) -> Tensor:
        """Returns the part of a static tensor that is not padding."""
        for axis, dim in enumerate(dims):
            if isinstance(dim, Dim) and sizes[dim] != self._sizes[dim]:
                first = self._sizes[dim] - sizes[dim] if dim.is_padded_in_front else 0
                static = static.narrow(axis, first, sizes[dim])
        return static


def masked_value(dtype: torch.dtype) -> float:
    """Returns the value that excludes a key from attention: False for a Boolean mask, the lowest value of an additive one."""
    return 0.0 if dtype is torch.bool else torch.finfo(dtype).min
