"""Worker processes of this package: how many, how they start, and when they end."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from sage.io.machine import num_cores

MAX_PROCESSES = 16
MAX_LOADER_WORKERS = 8  # of a rank
MIN_PARALLEL = 20_000  # items; below, starting workers (seconds each, to import torch) costs more than it saves

Task = TypeVar("Task")
Result = TypeVar("Result")


def num_processes() -> int:
    return min(num_cores(), MAX_PROCESSES)


def loader_workers(given: int | None, ranks: int) -> int:
    """Returns the processes of a rank that prepare examples: `given` (`data.num_workers`), or by default one per core that is
    left beside training.

    Args:
        ranks: on this machine, which share its cores.
    """
    return min(MAX_LOADER_WORKERS, max(1, num_cores() // ranks - 1)) if given is None else given


def worker_context() -> Any:
    """Returns a `forkserver` context that preloads torch: workers inherit neither threads nor CUDA from this process.

    `sage.training` comes first, so that a user's own `data_prep.py` is not imported in place of this package.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sage.training", "data_prep.chat"])
    return context


def start_worker(_number: int = 0) -> None:
    """Initializes a worker process: one torch thread, and the end of the worker with its parent process."""
    threading.Thread(target=_exit_with_parent, name="exit-with-parent", daemon=True).start()
    torch.set_num_threads(1)


def mapped(work: Callable[[Task], Result], tasks: Sequence[Task], num_items: int, chunk_size: int = 1) -> Iterator[Result]:
    """Yields the results of tasks in order; from several processes if there are at least `MIN_PARALLEL` items.

    Args:
        work: is pickled once for each process.
        num_items: in all tasks together.
        chunk_size: tasks that a process receives at a time.
    """
    processes = num_processes()
    if num_items < MIN_PARALLEL or processes < 2:
        yield from map(work, tasks)
        return
    with worker_context().Pool(processes, initializer=_start_mapping, initargs=(work,)) as pool:
        yield from pool.imap(_work_on, tasks, chunksize=chunk_size)


_work: list[Callable[[Any], Any]] = []


def _start_mapping(work: Callable[[Any], Any]) -> None:
    start_worker()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there are as many processes as cores
    _work[:] = [work]


def _work_on(task: Any) -> Any:
    return _work[0](task)


def _exit_with_parent() -> None:
    """Ends this worker when the process that started it has ended, also after SIGKILL.

    For the operating system the parent of a worker is the fork server, which lives as long as its workers.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
