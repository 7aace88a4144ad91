"""Worker processes of this package: how many, how they start, and when they end."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from sage.io.machine import num_cores

MAX_PROCESSES = 16
MAX_LOADER_WORKERS = 8  # of a rank
TASKS_AHEAD = 8
MIN_PARALLEL = 20_000  # items; below, starting workers (seconds each, to import torch) costs more than it saves

Task = TypeVar("Task")
Result = TypeVar("Result")


def loader_workers(given: int | None, ranks: int) -> int:
    """Returns the processes of a rank that prepare examples: `given` (`data.num_workers`), or by default one per core that is
    left beside training by the ranks on this machine.
    """
    return min(MAX_LOADER_WORKERS, max(1, num_cores() // ranks - 1)) if given is None else given


def worker_context() -> Any:
    """Returns a `forkserver` context that preloads torch: workers inherit neither threads nor CUDA from this process.

    `sage.training` comes before `data_prep`, so that a user's own `data_prep.py` is not imported in place of this package.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sage.commands.quiet", "sage.training", "data_prep.chat"])
    return context


def start_worker(_number: int = 0) -> None:
    """Initializes a worker process: one torch thread, and the end of the worker with its parent process."""
    threading.Thread(target=_exit_with_parent, name="exit-with-parent", daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches workers as well, whose batches the parent's last step needs
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there are as many processes as cores


def mapped(work: Callable[[Task], Result], tasks: Iterable[Task], num_items: int) -> Iterator[Result]:
    """Yields the results of tasks in order; from several processes if there are at least `MIN_PARALLEL` items in them."""
    processes = min(num_cores(), MAX_PROCESSES)
    return from_workers(work, tasks, processes if num_items >= MIN_PARALLEL and processes > 1 else 0, TASKS_AHEAD)


def from_workers(work: Callable[[Task], Result], tasks: Iterable[Task], num_workers: int, ahead: int) -> Iterator[Result]:
    """Yields the results of tasks in order, from processes that work up to `ahead` tasks each ahead; 0: from this process."""
    if not num_workers:
        yield from map(work, tasks)
        return
    options = {"multiprocessing_context": worker_context(), "worker_init_fn": start_worker, "collate_fn": _unchanged}
    loader: DataLoader[Any] = DataLoader(
        _Work(work), None, sampler=tasks, num_workers=num_workers, prefetch_factor=ahead, **options
    )
    for result in loader:
        if isinstance(result, ValueError):
            raise result
        yield result


class _Work(Dataset[Any]):
    """Task -> its result; a ValueError as a value: torch would raise that of a worker as a RuntimeError with two tracebacks."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self.work = work

    def __getitem__(self, task: Any) -> Any:
        try:
            return self.work(task)
        except ValueError as error:
            return error


def _unchanged(result: Any) -> Any:
    return result


def _exit_with_parent() -> None:
    """Ends this worker when the process that started it has ended, also after SIGKILL.

    For the operating system the parent of a worker is the fork server, which lives as long as its workers.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
