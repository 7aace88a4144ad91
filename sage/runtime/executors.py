"""The executor of a pass mode, and a block in which passes run in another mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sage.runtime.modes import PassMode, resolve_pass_mode
from sage.runtime.pass_function import EAGER, Executor

_EXECUTORS: dict[PassMode, Executor] = {PassMode.eager: EAGER}


def executor_of(mode: PassMode) -> Executor:
    """Returns the executor of a resolved pass mode."""
    if mode not in _EXECUTORS and mode is PassMode.compiled:
        from sage.runtime.compiled import Compiled

        _EXECUTORS[mode] = Compiled()
    elif mode not in _EXECUTORS:
        from sage.runtime.captured import Captured

        _EXECUTORS[mode] = Captured(is_compared=mode is PassMode.auto)
    return _EXECUTORS[mode]


def describe_passes(target: Any) -> str:
    """Returns how passes of a target run, for reports: the executor, and what keeps it from its fastest way."""
    executor = executor_of(target.passes)
    found = executor.describe(target.device, target.dtype, target.max_head_dim)
    is_partly = target.linear is not None and executor.has_buckets
    return f"eager, for it has linear layers; those of the draft {found}" if is_partly else found


@contextmanager
def passes_as(name: str, target: Any, num_answers: int) -> Iterator[None]:
    """Inside the block, a target's passes run in the mode that `resolve_pass_mode` returns.

    Afterwards they run as before, and the memory that executors kept for further requests is freed.
    """
    before = target.passes
    target.passes = resolve_pass_mode(name, target.device.type, num_answers, target.is_plain)
    try:
        yield
    finally:
        target.passes = before
        for executor in _EXECUTORS.values():
            executor.release()
