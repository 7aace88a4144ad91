"""Passes of several requests as one: a request describes the pass that it needs, and a driver runs those of all requests.

A computation of one request is a generator that yields a `Call` wherever it needs a pass and is sent the pass's results.
`alone` runs one of them; `together` runs several and joins the calls of the same function. Both give the same results: decoding
is written once, for one request.

A joint pass takes the tokens of all requests as one sequence without padding, so layers that work token by token compute what
they have to. Attention alone is batched: queries are padded to the most of any request, keys are the rows of a `SharedCache`,
one for each request, with a length of its own.

    request     0 0 0 | 1 | 3 3          T = 6 queries of the requests in rows 0, 1 and 3 of the cache
    owners      0 0 0   1   3 3
    offsets     0 1 2   0   0 1
    places      0 1 2 | 3 . . | . . . | 4 5 .      [B, N] = [4, 3]; a dot is padding, which is masked

Shapes: T queries of all requests, B cache rows, N queries of a request at most, M calls, S keys.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from sage.runtime.cache import TreeCache
from sage.runtime.executors import Executor, Run
from sage.runtime.host_tensors import cached_index
from sage.runtime.pass_function import PER_ROW, ROWS, Argument, Dim, JointFunction, PassFunction, Value
from sage.runtime.shared_cache import CacheRow, SharedCache
from sage.runtime.timing import Clock, now_s, prepared_s

R = TypeVar("R")
COMMIT_ORDER, LEVEL_ORDER, VERIFY_ORDER = 0, 1, 2  # of a `BoundPass`


class BoundPass:
    """A pass function bound to an executor, for one request.

    Args:
        order: of the passes that several requests wait for, those of the lowest order run first.
    """

    def __init__(self, executor: Executor, function: PassFunction, order: int) -> None:
        self.executor, self.function, self.order = executor, function, order
        self.run: Run = executor.bind(function)
        self._joint: tuple[JointFunction, Run] | None = None

    def joint(self) -> tuple[JointFunction, Run] | None:
        """Returns the function for several requests, bound to the executor; None if there is none."""
        if self._joint is None and (function := self.function.joint()) is not None:
            self._joint = function, self.executor.bind(function)
        return self._joint

    def steps(self, cache: TreeCache | None, *values: Value) -> Steps[Sequence[Tensor]]:
        """Asks for a pass over `values`, the arguments of the function; returns its results.

        Args:
            cache: the one that the pass extends; its new rows are reserved already. None for a pass without a cache.
        """
        results: Sequence[Tensor] = yield Call(self, values, cache)
        return results


@dataclass(frozen=True)
class Call:
    """A pass that a request needs; attributes as the arguments of `BoundPass.steps`."""

    bound: BoundPass
    values: Sequence[Any]
    cache: TreeCache | None

    def run(self) -> Sequence[Tensor]:
        """Runs the pass of this request alone."""
        return self.bound.run(*self.values)


Steps: TypeAlias = Generator[Call, Sequence[Tensor], R]


def alone(steps: Steps[R]) -> R:
    """Runs the computation of one request; returns its result."""
    try:
        call = next(steps)
        while True:
            call = steps.send(call.run())
    except StopIteration as end:
        result: R = end.value
        return result


@dataclass(eq=False)
class Joined:
    """A computation that runs together with others.

    Attributes:
        clock: counts the time of this computation, and its share of the time of joint passes.
        call: the pass that it waits for; None before it has started and when it has ended.
        result: what it has returned.
        error: what it has raised.
    """

    steps: Steps[Any]
    clock: Clock
    call: Call | None = None
    result: Any = None
    error: Exception | None = None

    def advance(self, results: Sequence[Tensor] | None, shared_s: float = 0.0) -> None:
        """Runs the computation up to its next pass; `results` and `shared_s` are those of the last one, and its time."""
        self.clock.resume(shared_s)
        try:
            self.call = next(self.steps) if results is None else self.steps.send(results)
        except StopIteration as end:
            self.call, self.result = None, end.value
        except Exception as error:
            self.call, self.error = None, error
        self.clock.pause()


def together(computations: Sequence[Joined], device: torch.device, shared_s: float = 0.0) -> None:
    """Runs the computations of several requests to their ends, with one pass where they wait for passes of one function.

    Args:
        shared_s: seconds of each computation's clock that were spent for it before.
    """
    for computation in computations:
        computation.advance(None, shared_s)
    while calls := [computation.call for computation in computations if computation.call is not None]:
        order = min(call.bound.order for call in calls)
        for function in {call.bound.function: None for call in calls if call.bound.order == order}:
            waiting = [one for one in computations if one.call is not None and one.call.bound.function is function]
            start = now_s(device)
            results = run_together([one.call for one in waiting if one.call is not None])
            end = now_s(device)
            shared_s = (end - start - prepared_s(start, end)) / len(waiting)
            for one, own in zip(waiting, results, strict=True):
                one.advance(own, shared_s)


def run_together(calls: Sequence[Call]) -> list[Sequence[Tensor]]:
    """Runs calls of one function in one pass, if there is a function for several requests; returns the results of each."""
    bound = calls[0].bound
    if len(calls) == 1 and not bound.executor.joins_single_calls:
        return [calls[0].run()]
    rows = [call.cache for call in calls if isinstance(call.cache, CacheRow)]
    if len(rows) != sum(call.cache is not None for call in calls) or (joint := bound.joint()) is None:
        return [call.run() for call in calls]
    function, run = joint
    size = 0
    if rows:
        size = bound.executor.num_rows(max(row.row for row in rows) + 1, rows[0].shared.num_rows)
    return function.split(calls, run(*function.join(calls, size)))


def shared_cache(calls: Sequence[Call]) -> SharedCache:
    """Returns the cache whose rows belong to the calls."""
    cache = calls[0].cache
    assert isinstance(cache, CacheRow), "calls without a cache row are not joined"
    return cache.shared


def row_of(call: Call) -> int:
    """Returns the cache row of a call."""
    assert isinstance(call.cache, CacheRow), "calls without a cache row are not joined"
    return call.cache.row


def length_of(call: Call) -> int:
    """Returns the number of cached tokens S of a call, the new ones included."""
    assert call.cache is not None, "calls without a cache row are not joined"
    return call.cache.length


@dataclass(frozen=True)
class Layout:
    """Where the queries of several calls are in a joint pass.

    Attributes:
        owners: LongTensor [T], the cache row of each query.
        offsets: LongTensor [T], its place among the queries of its request.
        places: LongTensor [B, N], the queries of each row; 0 for padding.
        ends: LongTensor [M], the last query of each call.
    """

    owners: Tensor
    offsets: Tensor
    places: Tensor
    ends: Tensor


def layout(calls: Sequence[Call], counts: Sequence[int], num_rows: int, device: torch.device) -> Layout:
    """Returns the layout of calls with `counts` [M] queries each, one after another, in a cache of which B rows are read."""
    return _layout(tuple(map(row_of, calls)), tuple(counts), num_rows, device)


@lru_cache(maxsize=256)
def _layout(rows: tuple[int, ...], counts: tuple[int, ...], num_rows: int, device: torch.device) -> Layout:
    owners = [row for row, count in zip(rows, counts, strict=True) for _ in range(count)]
    offsets = [offset for count in counts for offset in range(count)]
    places = [[0] * max(counts) for _ in range(num_rows)]
    for query, (row, offset) in enumerate(zip(owners, offsets, strict=True)):
        places[row][offset] = query
    ends = [end - 1 for end in accumulate(counts)]
    tensors = [torch.tensor(numbers, dtype=torch.long).to(device) for numbers in (owners, offsets, places, ends)]
    return Layout(*tensors)


def layout_arguments(queries: Dim) -> tuple[Argument, Argument, Argument]:
    """Describes the owners, offsets and places of a `Layout` as arguments of a function."""
    return (
        Argument("owners", (queries,), torch.long),
        Argument("offsets", (queries,), torch.long),
        Argument("places", (ROWS, PER_ROW), torch.long),
    )


def pad_rows(parts: Sequence[Tensor], rows: Sequence[int], shape: Sequence[int], value: float) -> Tensor:
    """Returns matrices [n, s] as the upper left corners of rows of a tensor [B, N, S] of `value`."""
    out = parts[0].new_full(shape, value)
    for row, part in zip(rows, parts, strict=True):
        out[row, : part.shape[0], : part.shape[1]] = part
    return out


def starts_of(counts: Sequence[int], sizes: Sequence[int], device: torch.device) -> Tensor:
    """Returns, for `counts` [M] entries of each call, where the call's part of a concatenation of `sizes` [M] begins, [T]."""
    starts = [0, *accumulate(sizes)]
    repeated = [start for start, count in zip(starts, counts, strict=False) for _ in range(count)]
    return cached_index(tuple(repeated), device)
