"""Passes of one request or several: requests describe the passes they need, and `run_passes` makes one of all that it can.

Shapes: T queries of all requests, R requests, B cache rows, N queries of a request at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn

from sage.runtime.cache import TreeCache
from sage.runtime.host_tensors import CPU, cached_index, long_tensor, upload_together
from sage.runtime.pass_function import (
    CAPACITY,
    KEYS,
    NODES,
    ROWS,
    Argument,
    Dim,
    Executor,
    Padding,
    PassFunction,
    PassInputs,
    Run,
    Value,
    argument,
)


def buffers(rows: int | Dim) -> Any:
    """Describes keys or values of a cache, of every layer."""
    return argument(rows, "kv_heads", CAPACITY, "head_dim", dtype=None, padding=Padding.cache, count="num_layers")


@dataclass(kw_only=True)
class CachedInputs(PassInputs):
    """Arguments of every pass that extends a cache.

    Attributes:
        owners, columns: LongTensor [T], of each token the cache row of its request, and the place in it that it writes.
        steps: LongTensor [S], 0 to S - 1.
        keys, values: buffers of every layer, [B, H, C, d].
    """

    owners: Tensor = argument(NODES)
    columns: Tensor = argument(NODES, padding=Padding.spare)
    steps: Tensor = argument(KEYS, padding=Padding.counting)
    keys: Sequence[Tensor] = buffers(ROWS)
    values: Sequence[Tensor] = buffers(ROWS)


@dataclass(frozen=True)
class Layout:
    """Where the tokens of several requests are in a pass. Arguments of these names are filled in by `BoundPass`.

    Attributes:
        owners: LongTensor [T], the cache row of each token.
        offsets: LongTensor [T], its place among the tokens of its request.
        numbers: LongTensor [T], the request of each token, 0 to R - 1.
        places: LongTensor [B, N], the tokens of each row; slot s of all behind them as -1 - s; 0 for padding.
        ends: LongTensor [R], the last token of each request.
        requests: LongTensor [B], the request of each cache row; 0 for none.
    """

    owners: Tensor
    offsets: Tensor
    numbers: Tensor
    places: Tensor
    ends: Tensor
    requests: Tensor


@lru_cache(maxsize=512)
def layout(
    rows: tuple[int, ...],
    counts: tuple[int, ...],
    num_rows: int,
    device: torch.device,
    slots: int = 0,
    has_token_queries: bool = True,
) -> Layout:
    """Returns the layout of requests with `counts` [R] tokens in `rows` [R] of a cache of which B rows are read.

    Args:
        slots: queries behind the tokens of each request.
        has_token_queries: whether the tokens themselves are queries.
    """
    if num_rows == 1:  # without a copy to the device; the places of a single row are not read
        order = torch.arange(counts[0], device=device)
        zeros = torch.zeros_like(order)
        unread = zeros.new_zeros(1, (counts[0] if has_token_queries else 0) + slots)
        return Layout(zeros, order, zeros, unread, order[-1:], zeros[:1])
    numbers = [number for number, count in enumerate(counts) for _ in range(count)]
    offsets = [offset for count in counts for offset in range(count)]
    queries = [count if has_token_queries else 0 for count in counts]
    places, requests = [[0] * (max(queries) + slots) for _ in range(num_rows)], [0] * num_rows
    ends = list(accumulate(counts))
    for number, (row, count, end) in enumerate(zip(rows, queries, ends, strict=True)):
        behind = (-1 - number * slots - slot for slot in range(slots))
        places[row][: count + slots] = [*range(end - count, end), *behind]
        requests[row] = number
    owners, lasts, flat = [rows[number] for number in numbers], [end - 1 for end in ends], list(chain.from_iterable(places))
    tensors = [long_tensor(values, CPU) for values in (owners, offsets, numbers, flat, lasts, requests)]
    of_tokens, grid, of_requests = tensors[:3], tensors[3].view(num_rows, -1), tensors[4:]
    return Layout(*upload_together(device, *of_tokens, grid, *of_requests))


class BoundPass:
    """A pass function bound to an executor.

    Args:
        device: of the arguments.
        of_one: the function of the pass of a single request, if it is another one.
    """

    def __init__(
        self, executor: Executor, function: PassFunction, device: torch.device, of_one: PassFunction | None = None
    ) -> None:
        self.function, self.of_one, self._executor, self._device = function, of_one or function, executor, device
        self._run_one: Run = executor.bind(self.of_one)
        self._run_several: Run | None = self._run_one if of_one is None else None
        both, names = (self.function, self.of_one), [each.name for each in fields(Layout)]
        self._filled_in = {each: [own.name for own in each.arguments if own.name in names] for each in both}

    def run_one(self, needed: Pass) -> Sequence[Tensor]:
        """Runs the pass of one request."""
        values = needed.tensors | self._layout(self.of_one, (0,), (needed.count,), 1)
        if needed.cache is not None:
            values |= needed.cache.tensors()
        return self._run_one(self.of_one.inputs_type(**values))

    def _layout(
        self, function: PassFunction, rows: tuple[int, ...], counts: tuple[int, ...], num_rows: int
    ) -> dict[str, Tensor]:
        """Returns the part of the layout that the function takes."""
        whole = layout(rows, counts, num_rows, self._device, function.num_slots, function.has_token_queries)
        return {name: getattr(whole, name) for name in self._filled_in[function]}

    def run_several(self, needed: Sequence[Pass]) -> list[Sequence[Tensor]]:
        """Runs one pass of several requests; returns the results of each."""
        if self._run_several is None:
            self._run_several = self._executor.bind(self.function)
        results = self._run_several(self._packed(needed))
        counts = [each.count for each in needed]
        parts = [_split(dims, out, counts) for dims, out in zip(self.function.results, results, strict=True)]
        return list(zip(*parts, strict=True))

    def _packed(self, needed: Sequence[Pass]) -> PassInputs:
        """Returns the arguments of the pass of several requests."""
        function, values = self.function, dict[str, Value]()
        caches = [each.cache for each in needed if each.cache is not None]
        rows, num_rows = tuple(range(len(needed))), len(needed)
        if caches:
            shared, rows = caches[0].shared, tuple(cache.row for cache in caches)
            num_rows = max(rows) + 1
            values |= shared.tensors(num_rows)
            values["steps"] = shared.steps.narrow(0, 0, max(cache.length for cache in caches))
        values |= self._layout(function, rows, tuple(each.count for each in needed), num_rows)
        for described in function.arguments:
            if described.name not in values:
                values[described.name] = self._joined(described, needed, rows, num_rows)
        return function.inputs_type(**values)

    def _joined(self, described: Argument, needed: Sequence[Pass], rows: tuple[int, ...], num_rows: int) -> Value:
        """Returns one argument of several requests."""
        given = [each.tensors[described.name] for each in needed]
        if described.count is not None:
            return [_concatenated(described.dims, parts) for parts in zip(*given, strict=True)]
        joined = _concatenated(described.dims, given)
        if described.dims[0] is ROWS:
            return joined.new_zeros(num_rows, *joined.shape[1:]).index_copy_(0, cached_index(rows, self._device), joined)
        if described.indexes is None:
            return joined
        starts = [0, *accumulate(len(each.tensors[described.indexes]) for each in needed)]
        repeated = [start for start, part in zip(starts, given, strict=False) for _ in range(len(part))]
        return joined + cached_index(tuple(repeated), self._device)


@dataclass(slots=True)
class Pass:
    """A pass that a request needs.

    Attributes:
        count: tokens of the request in it.
        tensors: arguments of the function by name, without those of `Layout` and the buffers of the cache.
        finish: returns what the pass is needed for, given its results, or a further pass.
        cache: the one that the pass extends; its new columns are reserved already. None for a pass without a cache.
    """

    bound: BoundPass
    count: int
    tensors: dict[str, Any]
    finish: Callable[[Sequence[Tensor]], Any]
    cache: TreeCache | None = None

    def then(self, finish: Callable[[Any], Any]) -> Pass:
        """Returns the pass with a further step behind `finish`."""
        before = self.finish
        return replace(self, finish=lambda results: finish(before(results)))


def run_passes(passes: Sequence[Any]) -> list[Any]:
    """Runs passes of several requests, those of one function as one pass; returns what they are needed for.

    Args:
        passes: `Pass` of each request, or its result if it needs none.
    """
    if len(passes) == 1:  # without grouping, which takes as long as a small operator
        result = passes[0]
        while isinstance(result, Pass):
            result = result.finish(result.bound.run_one(result))
        return [result]
    results = list(passes)
    while waiting := [i for i, each in enumerate(results) if isinstance(each, Pass)]:
        for function in dict.fromkeys(results[i].bound.function for i in waiting):
            indices = [i for i in waiting if isinstance(results[i], Pass) and results[i].bound.function is function]
            group = [results[i] for i in indices]
            bound = group[0].bound
            outputs = [bound.run_one(group[0])] if len(group) == 1 else bound.run_several(group)
            for i, each, output in zip(indices, group, outputs, strict=True):
                results[i] = each.finish(output)
    return results


def _concatenated(dims: Sequence[Any], parts: Sequence[Tensor]) -> Tensor:
    """Concatenates tensors along their first dynamic dimension; pads the last one with zeros if it is another dynamic one."""
    dynamic = [axis for axis, dim in enumerate(dims) if isinstance(dim, Dim)]
    if len(dynamic) > 1:
        size = max(part.shape[dynamic[1]] for part in parts)
        parts = [nn.functional.pad(part, (0, size - part.shape[dynamic[1]])) for part in parts]
    return torch.cat(list(parts), dynamic[0])


def _split(dims: Sequence[int | Dim], out: Tensor, counts: Sequence[int]) -> Sequence[Tensor]:
    """Returns the part of each request of a result over `NODES` or `REQUESTS`."""
    axis = next(axis for axis, dim in enumerate(dims) if isinstance(dim, Dim))
    return out.split(list(counts) if dims[axis] is NODES else 1, axis)
