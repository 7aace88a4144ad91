"""Worker processes of this package: how many, how they start, and when they end."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import threading
from typing import Any

import torch

MAX_PROCESSES = 16


def num_processes() -> int:
    """Returns the number of worker processes for preparing examples."""
    return min(len(os.sched_getaffinity(0)), MAX_PROCESSES)


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


def _exit_with_parent() -> None:
    """Ends this worker when the process that started it has ended, also after SIGKILL.

    For the operating system the parent of a worker is the fork server, which lives as long as its workers.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
