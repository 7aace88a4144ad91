"""The executor of a pass mode."""

from __future__ import annotations

from sage.runtime.executors import EAGER, Executor
from sage.runtime.pass_modes import PassMode

_EXECUTORS: dict[PassMode, Executor] = {PassMode.eager: EAGER}


def executor_of(mode: PassMode) -> Executor:
    """Returns the executor of a resolved pass mode."""
    if mode not in _EXECUTORS:
        _EXECUTORS[mode] = _new_executor(mode)
    return _EXECUTORS[mode]


def _new_executor(mode: PassMode) -> Executor:
    if mode is PassMode.compiled:
        from sage.runtime.compiled import Compiled

        return Compiled()
    from sage.runtime.captured import Captured

    return Captured()
