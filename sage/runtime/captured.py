"""Pass functions with static buffers, captured as CUDA graphs: one graph per bucket of sizes, captured when first needed.

A replayed graph costs the host one launch. It reads and writes fixed addresses, so arguments are copied into static buffers
padded to a bucket, and the caches of finished requests are used again. A padding node writes a column after all others, which
no node of the tree sees. If a capture fails, passes run eagerly, with one warning. In the mode `auto`, the first pass of each
shape is compared with the eager one; if it differs, all passes of the process run eagerly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sage.io.model_files import in_one_line
from sage.runtime.cache import SharedCache, TreeCache
from sage.runtime.package_folder import warn_once
from sage.runtime.pass_function import (
    CAPACITY,
    KEYS,
    Argument,
    Dim,
    Executor,
    Padding,
    PassFunction,
    PassInputs,
    Run,
    key_bucket,
)
from sage.runtime.prefix_attention import why_masked
from sage.runtime.timing import preparation, synchronize

Outputs = Sequence[Tensor]
Replay = Callable[[], object]
Capture = Callable[[Callable[[], Outputs]], tuple[Replay, Outputs]]
MAX_FREE = 4  # caches that wait for a request
MAX_FAILURES = 3  # captures of a function; one that fails may be due to something else on the device
NO_CACHE = 0  # in place of an address
# of the norm of a row; kernels differ by the number of rows, and layers add up what they round
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.05}


def cuda_graph(function: Callable[[], Outputs]) -> tuple[Replay, Outputs]:
    """Captures a function on the current device; returns what replays it and its static results."""
    device = torch.cuda.current_device()
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # libraries allocate their workspaces in the first call
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # "global" would fail on calls of other threads, such as the loader's that pins memory (torch.cuda.graph)
    with torch.cuda.graph(graph, _pool(device), stream, capture_error_mode="thread_local"):
        outputs = function()
    return graph.replay, outputs


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """Returns the stream in which all graphs of a device are captured: cuBLAS keeps a workspace of 32 MiB for every stream."""
    return torch.cuda.Stream(device)


@cache
def _pool(device: int) -> Any:
    """Returns the memory pool that all graphs of a device share; none of them is replayed while another one runs."""
    return torch.cuda.graph_pool_handle()


class CachePool:
    """Buffers of finished requests, at most `MAX_FREE` of them, which are used again so that graphs stay valid.

    They are zeroed for every request: padding attends to rows that no pass has written, with a weight of 0, and 0 times the NaN
    of another request is NaN.
    """

    def __init__(self) -> None:
        self._free: list[SharedCache] = []  # the smallest first
        self._lent: weakref.WeakSet[TreeCache] = weakref.WeakSet()

    def __call__(self, size: int, make: Callable[[int], TreeCache]) -> TreeCache:
        """Returns an empty cache with a capacity of at least `size` tokens; `make` returns a new cache."""
        fits = next((shared for shared in self._free if shared.capacity >= size), None)
        if fits is None:
            cache = make(size)
        else:
            self._free.remove(fits)
            cache = fits.take()
        with torch.inference_mode():
            cache.zero_to(cache.capacity)
        cache.crop_to(0)
        self._lent.add(cache)
        weakref.finalize(cache, self._take_back, cache.shared)
        return cache

    def _take_back(self, shared: SharedCache) -> None:
        self._free = sorted([*self._free, shared], key=lambda each: each.capacity)[-MAX_FREE:]

    def addresses(self) -> set[int]:
        """Returns the addresses of the first layer's keys of all buffers, free and lent."""
        return {shared.buffers[0].data_ptr() for shared in [*self._free, *(cache.shared for cache in self._lent)]}


class Captured(Executor):
    """Runs functions as graphs.

    Args:
        capture: `cuda_graph`, or what stands in for it where there are no graphs.
        is_compared: whether the first pass of each shape is compared with the eager one.

    Attributes:
        problem: how a pass differed from the eager one; then all run eagerly.
        failures: why passes of the target, or of the draft, cannot be captured.
    """

    def __init__(self, capture: Capture = cuda_graph, is_compared: bool = False) -> None:
        self.capture, self.is_compared, self.problem = capture, is_compared, ""
        self.failures: dict[str, str] = {}
        self._pools: weakref.WeakKeyDictionary[Any, CachePool] = weakref.WeakKeyDictionary()
        self._functions: weakref.WeakSet[PassFunction] = weakref.WeakSet()  # that have graphs

    def bind(self, function: PassFunction) -> Run:
        if self.problem:
            return function.compute
        weights = [weight.data_ptr() for weight in function.parameters()]
        kept = function.kept.get(self)
        if kept is None or kept.weights != weights:
            kept = function.kept[self] = CapturedFunction(function, self, weights)
            self._functions.add(function)
        run: CapturedFunction = kept
        addresses = {NO_CACHE}.union(*(pool.addresses() for pool in self._pools.values()))
        run.graphs = {key: call for key, call in run.graphs.items() if key[0] in addresses}  # others keep memory of lost caches
        return run

    @property
    def has_buckets(self) -> bool:  # type: ignore[override]
        return not self.problem

    def splits_keys(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
        return not self.problem and not why_masked(device, dtype, head_dim)

    def describe(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
        if self.problem:
            return f"eager, because {self.problem}"
        reason = why_masked(device, dtype, head_dim)
        text = f"captured, with all keys masked: {reason}" if reason else "captured, with keys in two parts"
        return "; ".join([text, *self.failures.values()])

    def capacity(self, num_tokens: int) -> int:
        return key_bucket(num_tokens + 1)  # and one row that padding writes

    def new_cache(self, owner: Any, num_tokens: int, make: Callable[[int], TreeCache]) -> TreeCache:
        return self._pools.setdefault(owner, CachePool())(self.capacity(num_tokens), make)

    def release(self) -> None:
        """Frees free caches, all graphs with the pool of their memory, and the workspaces of cuBLAS."""
        for function in self._functions:
            function.kept.pop(self, None)
        self._functions.clear()
        self._pools.clear()
        _pool.cache_clear()  # the pool of destroyed graphs cannot be captured into
        if torch.cuda.is_initialized():
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()


class CapturedFunction:
    """The graphs of a function with weights at fixed addresses, by bucket and by the addresses of the cache."""

    def __init__(self, function: PassFunction, executor: Captured, weights: Sequence[int]) -> None:
        self.weights = weights
        self._function, self._executor = function, executor
        self._cache = next((each.name for each in function.arguments if each.padding is Padding.cache), None)
        self.graphs: dict[tuple[Hashable, ...], StaticCall] = {}
        self._agreed: set[tuple[Hashable, ...]] = set()  # shapes whose first pass equals the eager one
        self._num_failures = 0

    def __call__(self, inputs: PassInputs) -> Outputs:
        sizes = self._function.sizes(inputs)
        padded = {dim: dim.bucket(size) for dim, size in sizes.items()}
        address = NO_CACHE if self._cache is None else getattr(inputs, self._cache)[0].data_ptr()
        key = (address, *padded.values())
        if self._executor.problem or (key not in self.graphs and not self._try_capture(key, inputs, padded)):
            return self._function.compute(inputs)
        call = self.graphs[key]
        if self._executor.is_compared:
            shape = (*padded.values(), *(padded[dim] > size for dim, size in sizes.items()))
            if shape not in self._agreed and not self._agrees(call, shape, inputs, sizes):
                return self._function.compute(inputs)
        return call(inputs, sizes)

    def _agrees(self, call: StaticCall, shape: tuple[Hashable, ...], inputs: PassInputs, sizes: dict[Dim, int]) -> bool:
        with preparation():
            problem = describe_difference(self._function, call, inputs, sizes)
        if problem:
            self._executor.problem = problem
            self._executor.release()
            warn_once(f"passes: {problem}; all passes of this process run eagerly")
        self._agreed.add(shape)
        return not problem

    def _try_capture(self, key: tuple[Hashable, ...], inputs: PassInputs, sizes: dict[Dim, int]) -> bool:
        """Captures a graph; returns whether there is one. After `MAX_FAILURES`, nothing is tried again."""
        if self._num_failures == MAX_FAILURES:
            return False
        device = inputs.flat()[0].device
        try:
            synchronize(device)
            with preparation():
                self.graphs[key] = StaticCall(self._function, inputs, sizes, self._executor.capture)
                synchronize(device)
        except RuntimeError as error:
            self._num_failures += 1
            owner, reason = self._function.owner, in_one_line(error)[:300]
            problem = f"the {owner}'s pass cannot be captured ({reason}); its passes run eagerly"
            warn_once(f"passes: {problem}")
            if self._num_failures == MAX_FAILURES:
                self._executor.failures[owner] = problem
            return False
        return True


class StaticCall:
    """A function captured with static arguments.

    Args:
        inputs: arguments of a call; the buffers of its cache become static arguments.
        sizes: of the static arguments.
    """

    def __init__(self, function: PassFunction, inputs: PassInputs, sizes: dict[Dim, int], capture: Capture) -> None:
        self._function, self._sizes = function, sizes
        given = zip(function.arguments, vars(inputs).values(), strict=True)
        static = function.inputs_type(**{argument.name: self._static(argument, value) for argument, value in given})
        self._values = list(vars(static).values())
        with self.unchanged_cache():
            self._replay, self._outputs = capture(lambda: function.compute(static))

    def __call__(self, inputs: PassInputs, sizes: dict[Dim, int]) -> Outputs:
        """Replays the function on `inputs`, whose dynamic dimensions have `sizes`."""
        self.write(inputs, sizes)
        self._replay()
        pairs = zip(self._function.results, self._outputs, strict=True)
        return [self._contents(dims, out, sizes).clone() for dims, out in pairs]

    def write(self, inputs: PassInputs, sizes: dict[Dim, int]) -> None:
        """Copies arguments into the static ones."""
        for argument, static, value in zip(self._function.arguments, self._values, vars(inputs).values(), strict=True):
            if argument.padding is Padding.cache or argument.padding is Padding.counting:
                continue
            pairs = ((static, value),) if argument.count is None else zip(static, value, strict=True)
            for buffer, tensor in pairs:
                contents = self._contents(argument.dims, buffer, sizes)
                if contents is not buffer:
                    self._pad(argument, buffer)
                contents.copy_(tensor)

    @contextmanager
    def unchanged_cache(self) -> Iterator[None]:
        """Restores the columns of the cache that the static arguments name, whatever padding makes of them."""
        given = list(zip(self._function.arguments, self._values, strict=True))
        spare = (value for argument, value in given if argument.padding is Padding.spare)
        columns = [value.flatten() for value in spare if isinstance(value, Tensor)]
        buffers = [buffer for argument, value in given if argument.padding is Padding.cache for buffer in value]
        before = [buffer.index_select(-2, torch.cat(columns)) for buffer in buffers]
        yield
        for buffer, states in zip(buffers, before, strict=True):
            buffer.index_copy_(-2, torch.cat(columns), states)

    def _static(self, argument: Argument, value: Any) -> Any:
        """Returns the static buffers of an argument, filled with padding: the function runs on them while it is captured."""
        if argument.padding is Padding.cache:
            return value
        if argument.count is not None:
            return [self._static(replace(argument, count=None), tensor) for tensor in value]
        return self._pad(argument, argument.empty(self._sizes, value.device))

    def _pad(self, argument: Argument, static: Tensor) -> Tensor:
        if argument.padding is Padding.spare:
            return static.fill_(self._sizes[KEYS if KEYS in self._sizes else CAPACITY] - 1)
        if argument.padding is Padding.masked:  # excludes a key from attention
            return static.fill_(False if argument.dtype is torch.bool else torch.finfo(argument.dtype).min)
        return static

    def _contents(self, dims: Sequence[int | str | Dim], static: Tensor, sizes: dict[Dim, int]) -> Tensor:
        """Returns the part of a static tensor that is not padding."""
        for axis, dim in enumerate(dims):
            if isinstance(dim, Dim) and sizes[dim] != self._sizes[dim]:
                static = static.narrow(axis, 0, sizes[dim])
        return static


def describe_difference(function: PassFunction, call: StaticCall, inputs: Any, sizes: dict[Dim, int]) -> str:
    """Runs a pass eagerly, then captured; returns how the results differ, empty if they agree.

    The cache is left as by the eager pass.
    """
    expected = [result for result in function.compute(inputs) if result.is_floating_point()]
    call.write(inputs, sizes)  # which names the columns to restore
    with call.unchanged_cache():
        found = [result for result in call(inputs, sizes) if result.is_floating_point()]
    error = max(row_error(*both) for both in zip(found, expected, strict=True))
    allowed = max(TOLERANCES[result.dtype] for result in expected)
    if error <= allowed:
        return ""
    shape = ", ".join(f"{dim.name} {size}" for dim, size in sizes.items())
    return f"a captured pass of the {function.owner} ({shape}) differs from the eager one by {error:.2g} (allowed: {allowed:g})"


def row_error(found: Tensor, expected: Tensor) -> float:
    """Returns the largest distance of two rows [.., d] relative to the expected one's norm; NaN if only one of them has NaN."""
    is_same = (found == expected) | (found.isnan() & expected.isnan())
    distance = (found.double() - expected.double()).masked_fill(is_same, 0).norm(dim=-1)
    norm = expected.double().masked_fill(~expected.isfinite(), 0).norm(dim=-1)
    return float((distance / norm.clamp(min=torch.finfo(torch.float32).tiny)).amax())
