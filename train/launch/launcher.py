"""Starts the ranks of a run on this machine, or runs one rank of torchrun, deepspeed or srun.

A single rank runs in this process. Of several ranks, which are spawned, rank 0 keeps the terminal, others log to a temporary
folder, and each writes its error there. A rank of an external launcher prints its error if it is the first one to fail.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from typing import NoReturn, TextIO

from checkpoints.run_folder import is_locked, waiting_line
from sage.commands.cli import EXIT_STOPPED, plain_warnings
from sage.training import call
from train.config.checks import check_deepspeed
from train.config.derived import check_batch
from train.config.schema import Config, ConfigError, Device, LaunchConfig
from train.launch import cluster_env
from train.launch.supervisor import StopFlag, Supervisor, describe, interrupted

logger = logging.getLogger(__name__)
IGNORE_LEAKS = "ignore:resource_tracker:UserWarning"  # of the semaphores that a killed rank leaves; they are cleaned up
ENDED = b"ended"  # is sent when the process ends in any other way
WATCH = f"import sys; sys.exit() if sys.stdin.buffer.read() == {ENDED!r} else print('error: ' + sys.argv[1], file=sys.stderr)"
KILLED = (
    "{run}: the process was killed by a signal, SIGKILL if the kernel did (out of memory? see dmesg); continue from the last "
    "saved state with sage-train --resume {run}"
)
LOGGED_PACKAGES = ("train", "data_prep", "checkpoints", "sage")
RankWork = Callable[[Config], int]  # the work of one rank, picklable; returns an exit code


def launch(config: Config, work: RankWork) -> int:
    """Runs `work(config)` on the configured number of ranks; returns 0 when done, 3 if stopped by a signal after saving.

    ConfigError if an external launcher's number of ranks contradicts the configuration, RankFailed if a rank failed.
    """
    if cluster_env.is_main_rank() and is_locked(Path(config.run.dir)):  # found again when target and data are loaded
        logger.warning(waiting_line(Path(config.run.dir)))
    _set_warnings()
    configured = config.launch.gpus or config.launch.ranks
    started = cluster_env.detect_launcher()
    if started is not None:
        if configured is not None and configured != started:
            key = ranks_key(config.launch)
            raise ConfigError(f"{key}={configured}: an external launcher has started {started} rank(s); leave {key} unset")
        if configured is None:  # `check` has checked the configured number
            check_batch(config, started)
            check_deepspeed(config, started)
        configure_logging(config.debug, is_main=cluster_env.is_main_rank())
        return _run_external_rank(config, work)
    num_ranks = configured or 1
    check_devices(config.launch, num_ranks)
    if num_ranks > 1:
        return spawn(partial(work, config), num_ranks, config.debug, config.run.dir)
    try:
        with reported_if_killed(config.run.dir):
            return work(config)
    except KeyboardInterrupt as error:
        raise interrupted(config.run.dir) from error


def _set_warnings() -> None:
    """Sets what this process and its children do not warn of."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # lost connections are reported by train.launch.supervisor
    if IGNORE_LEAKS not in (warned := os.environ.get("PYTHONWARNINGS", "")):
        os.environ["PYTHONWARNINGS"] = f"{warned},{IGNORE_LEAKS}".lstrip(",")


def ranks_key(launch: LaunchConfig) -> str:
    """Returns the key that sets the number of ranks."""
    return "launch.gpus" if launch.gpus else "launch.ranks"


def check_devices(launch: LaunchConfig, num_ranks: int) -> None:
    """Raises ConfigError for more ranks than GPUs, before any of them starts."""
    import torch

    from train.launch.ranks import NO_GPU

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if launch.device is Device.cuda and not count:
        raise ConfigError(NO_GPU)
    if count and launch.device is not Device.cpu and num_ranks > count:
        remedy = f"give at most {count}, or launch.device=cpu"
        raise ConfigError(f"{ranks_key(launch)}={num_ranks}: this machine has {count} GPU(s); {remedy}")
    if launch.gpus and not count and launch.device is not Device.cpu:
        remedy = f"give launch.ranks={launch.gpus} for ranks on the CPU, or start the command on a machine with GPUs"
        raise ConfigError(f"launch.gpus={launch.gpus}: this machine has no GPU that torch can use; {remedy}")


def spawn(work: Callable[[], int], num_ranks: int, debug: bool, run_dir: str | None = None) -> int:
    """Runs picklable work on ranks of this machine and waits for them; raises the first failure as RankFailed.

    This process hosts their store. An interrupt is reported for the states in `run_dir`.
    """
    _set_warnings()
    from torch.distributed import TCPStore
    from torch.multiprocessing import start_processes

    with tempfile.TemporaryDirectory(prefix="sage-train-") as folder, Supervisor(Path(folder)) as supervisor:
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        start = partial(call, _run_spawned_rank, work, folder, num_ranks, store.port, debug, run_dir)
        return supervisor.wait(start_processes(start, nprocs=num_ranks, join=False).processes, run_dir)


def _run_spawned_rank(
    work: Callable[[], int], folder: str, num_ranks: int, port: int, debug: bool, run_dir: str | None, rank: int
) -> NoReturn:
    """Runs a spawned rank; writes its error to `folder` for the launcher."""
    cluster_env.set_rank(rank, num_ranks, port)
    files = Path(folder) / f"rank_{rank}"
    if rank:
        output = files.with_suffix(".log").open("w")
        os.dup2(output.fileno(), sys.stderr.fileno())
    configure_logging(debug, is_main=rank == 0)
    try:
        code = work()
    except BaseException as error:
        failure = describe(error, rank, run_dir)
        failure.write(files.with_suffix(".json"))
        _exit_at_once(failure.exit_code)
    sys.exit(code)


def _run_external_rank(config: Config, work: RankWork) -> int:
    """Runs a rank of an external launcher; prints its error if it is the first one to fail."""
    import torch.distributed as dist

    from train.launch.ranks import is_first_failure

    StopFlag.ends_process = True
    try:
        code = work(config)
    except BaseException as error:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            raise
        failure = describe(error, cluster_env.rank(), config.run.dir)
        if is_first_failure():
            print(f"{failure.details}error: {failure}", file=sys.stderr)
        _exit_at_once(failure.exit_code)
    finally:
        StopFlag.ends_process = False
    if code == EXIT_STOPPED and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # srun terminates the others once one has exited with 3, as all should
    return code


def _exit_at_once(exit_code: int) -> NoReturn:
    """Exits without clean-up, which could wait for ranks that have exited."""
    for child in active_children():  # loader workers would keep the terminal open for some seconds
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


@contextmanager
def reported_if_killed(run_dir: str) -> Iterator[None]:
    """Reports on stderr if this process dies inside the block without leaving it; a second process waits for that."""
    command = [sys.executable, "-ISc", WATCH, KILLED.format(run=run_dir)]
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        with suppress(OSError):
            watcher.communicate(ENDED)


def configure_logging(debug: bool, is_main: bool = True) -> None:
    """Logs to stderr: everything on rank 0, only errors on the other ranks. Warnings are lines, unless `debug`."""
    if not debug:
        plain_warnings()
    level = (logging.DEBUG if debug else logging.INFO) if is_main else logging.ERROR
    handler = StderrHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    for name in LOGGED_PACKAGES:
        package = logging.getLogger(name)
        package.handlers, package.propagate = [handler], False
        package.setLevel(level)


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`, which a live progress bar replaces in order to redraw itself below the messages."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)
