"""Starting ranks on this machine, or joining those that torchrun, deepspeed or srun has started.

Owns: who starts whom, signals between launcher and ranks, which rank's error a person sees. Does not own: what a rank does.

One rank runs in this process. For more, torch's own elastic launcher spawns them: rank 0 keeps the terminal, the others write
into a temporary folder. A rank that dies leaves its error in that folder; the others are killed a second later.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import active_children
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints.store import write_text
from train.checks import check_batch
from train.config import Config, ConfigError, Device
from train.hydra_app import EXIT_CRASH, EXIT_DONE, EXIT_STOPPED, EXIT_USER, configure_logging, is_crash
from train.stopping import STOP_SIGNALS, StopSignal

if TYPE_CHECKING:
    from train.loop import Run

logger = logging.getLogger(__name__)

GRACE_S = 1.0  # how long ranks may take to report their own error after the first one died
POLL_S = 0.1
PORTS = range(20_000, 40_000)  # SLURM jobs find their meeting port in here, by job number


class RankFailed(RuntimeError):
    """A rank went down and took the run with it. `details` holds its traceback, `exit_code` the run's code."""

    def __init__(self, message: str, exit_code: int, details: str = "") -> None:
        super().__init__(message)
        self.exit_code, self.details = exit_code, details


def launch(config: Config) -> int:
    """Runs `config` on the ranks it asks for.

    Returns:
        the exit code: 0 done, 3 stopped by a signal after saving.

    Raises:
        ConfigError: the number of ranks contradicts the launcher we are inside of, or the batch does not split evenly.
        RankFailed: a rank died.
    """
    asked = config.launch.gpus or config.launch.ranks
    started = join_environment()
    if started is not None:
        if asked is not None and asked != started:
            key = "launch.gpus" if config.launch.gpus else "launch.ranks"
            raise ConfigError(f"{key}={asked}: {started} rank(s) were started from outside; leave {key} unset there")
        check_batch(config, started)
        configure_logging(config.debug, is_speaking=os.environ["RANK"] == "0")
        return run_rank(config)
    check_batch(config, asked or 1)
    check_devices(config, asked or 1)
    return run_rank(config) if (asked or 1) == 1 else spawn(config, asked or 1)


def run_rank(config: Config) -> int:
    """This process's part of the run, from joining to leaving."""
    if config.launch.device is Device.cpu or not has_gpu():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when transformers first touches DeepSpeed; it would look around
    with ExitStack() as stack:
        stop = stack.enter_context(StopSignal())
        from train.build import building
        from train.loop import fit
        from train.ranks import joined

        ranks = stack.enter_context(joined(str(config.launch.device), config.launch.timeout_s))
        run = stack.enter_context(building(config, ranks))
        run.stop, stop.is_gentle = stop, True
        is_done = fit(run)
        summary = _summary(run, is_done) if ranks.is_main else None
    if summary is not None:
        print(summary)  # after the display has closed
    return EXIT_DONE if is_done else EXIT_STOPPED


def _summary(run: Run, is_done: bool) -> str:
    """What a person wants to read last: the table and where everything is."""
    from sage.bench import format_table

    folder = run.config.run.dir
    if not is_done:
        return f"{folder}: stopped at step {run.state.step} of {run.total_steps} and saved; go on with run.resume=true"
    assert run.report is not None
    return f"{format_table(run.report)}\nreport: {run.report['path']}/report.md\ndraft: {folder}/draft"


def join_environment() -> int | None:
    """The number of ranks somebody else has started, or None. Translates srun's variables into torch's.

    Raises:
        ConfigError: variables of a launcher are there, but not all of them.
    """
    environment = os.environ
    if "RANK" in environment or "WORLD_SIZE" in environment:
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in environment]
        if missing:
            raise ConfigError(f"{', '.join(missing)}: missing beside the other launcher variables; use torchrun or unset RANK")
        return int(environment["WORLD_SIZE"])
    if "SLURM_STEP_ID" in environment and int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        environment["RANK"] = environment["SLURM_PROCID"]
        environment["LOCAL_RANK"] = environment["SLURM_LOCALID"]
        environment["WORLD_SIZE"] = environment["SLURM_STEP_NUM_TASKS"]
        environment.setdefault("MASTER_ADDR", first_host(environment["SLURM_STEP_NODELIST"]))
        job = int(environment["SLURM_JOB_ID"]) * 7 + int(environment["SLURM_STEP_ID"])
        environment.setdefault("MASTER_PORT", str(PORTS[job % len(PORTS)]))
        return int(environment["WORLD_SIZE"])
    return None


def first_host(nodelist: str) -> str:
    """`gpu[003-007,9],big1` -> `gpu003`."""
    found = re.match(r"([^,\[]+)(?:\[([^,\-\]]+))?", nodelist)
    assert found, nodelist
    return found.group(1) + (found.group(2) or "")


def check_devices(config: Config, ranks: int) -> None:
    """Refuses more ranks than GPUs before any of them starts.

    Raises:
        ConfigError: too few GPUs.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.launch.device is Device.cuda and not count:
        raise ConfigError("launch.device=cuda: PyTorch sees no GPU; use launch.device=cpu, or install a CUDA build of torch")
    if count and config.launch.device is not Device.cpu and ranks > count:
        raise ConfigError(f"launch.gpus={ranks}: this machine has {count} GPU(s); give at most {count}, or launch.device=cpu")
    if config.launch.gpus and not count:
        logger.warning("launch.gpus=%d: no GPU here, so %d rank(s) on the CPU", ranks, ranks)


def has_gpu() -> bool:
    """Whether PyTorch sees a GPU."""
    import torch

    return torch.cuda.is_available()


def spawn(config: Config, ranks: int) -> int:
    """Starts the ranks, waits for them, and tells why if they fail.

    Raises:
        RankFailed: see `launch`.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    quiet("torch.distributed.elastic", "torch.multiprocessing")
    with tempfile.TemporaryDirectory(prefix="sage-train-") as folder, watching(Path(folder)) as watch:
        settings = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=Path(folder).name,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            monitor_interval=POLL_S,
            signals_to_handle="SIGHUP,SIGQUIT",  # SIGTERM and SIGINT are handed on by `watching` instead
            logs_specs=DefaultLogsSpecs(log_dir=folder, redirects={rank: Std.ALL for rank in range(1, ranks)}),
        )
        try:
            codes = elastic_launch(settings, _rank_main)(config, folder)
        except (ChildFailedError, SignalException) as error:
            raise watch.verdict() from error
    return max(codes.values())


def _rank_main(config: Config, folder: str) -> int:
    """A spawned rank: runs, and leaves its error as a file for the launcher to choose from."""
    rank = int(os.environ["RANK"])
    (Path(folder) / f"rank_{rank}.pid").write_text(str(os.getpid()))
    configure_logging(config.debug, is_speaking=rank == 0)
    try:
        return run_rank(config)
    except BaseException as error:
        _leave_error(Path(folder) / f"rank_{rank}.json", rank, error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_CRASH)  # no clean-up: it could wait for ranks that are gone


def _leave_error(path: Path, rank: int, error: BaseException) -> None:
    own_code = getattr(error, "exit_code", None)
    if own_code is None:
        own_code = EXIT_STOPPED if isinstance(error, KeyboardInterrupt) else EXIT_CRASH if is_crash(error) else EXIT_USER
    has_details = isinstance(error, Exception) and is_crash(error) and not hasattr(error, "exit_code")
    name = f"rank {rank}: {type(error).__name__}: " if has_details else ""
    facts = {
        "time": time.time(),
        "exit_code": own_code,
        "message": f"{name}{error}" or type(error).__name__,
        "details": "".join(traceback.format_exception(error)) if has_details else "",
    }
    write_text(path, json.dumps(facts))


class Watch:
    """Sees ranks die, kills the rest, and knows afterwards who was first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.first_dead: dict[int, int] = {}  # pid -> exit code, as found at the first death
        self.asked_to_stop = False
        self._others = set(active_children())
        self._children: dict[int, Any] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rank-watch", daemon=True)

    def _watch(self) -> None:
        while not self._done.wait(POLL_S):
            for child in set(active_children()) - self._others:
                self._children.setdefault(int(child.pid or 0), child)
            dead = {pid: child.exitcode for pid, child in self._children.items() if child.exitcode not in (None, 0)}
            if dead:
                self.first_dead = dead
                self._done.wait(GRACE_S)
                self.kill()
                return

    def kill(self) -> None:
        """Ends every rank that is still there."""
        for child in self._children.values():
            if child.is_alive():
                child.kill()

    def forward(self, number: int, frame: Any) -> None:
        """Hands a wish to stop on to the ranks; a second Ctrl-C ends them at once."""
        if self.asked_to_stop and number == signal.SIGINT:
            self.kill()
            return
        self.asked_to_stop = True
        for child in self._children.values():
            if child.is_alive():
                os.kill(child.pid, signal.SIGUSR1)

    def verdict(self) -> RankFailed:
        """The error a person should see: a rank killed from outside, else the first one that reported an error."""
        reports = [json.loads(path.read_text()) for path in self.folder.glob("rank_*.json")]
        ranks = {int(path.read_text()): int(path.stem.split("_")[1]) for path in self.folder.glob("rank_*.pid")}
        if self.asked_to_stop:
            return RankFailed("stopped at once; what was saved before is whole, go on with run.resume=true", EXIT_STOPPED)
        for pid, code in self.first_dead.items():
            if code < 0:
                name = signal.Signals(-code).name
                hint = " (out of memory?)" if name == "SIGKILL" else ""
                return RankFailed(f"rank {ranks.get(pid, '?')} was killed by {name}{hint}", EXIT_CRASH)
        if reports:
            first = min(reports, key=lambda report: report["time"])
            return RankFailed(first["message"], first["exit_code"], first["details"])
        return RankFailed("a rank ended before it could say why; run with launch.ranks=1 to see", EXIT_CRASH)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()


@contextmanager
def watching(folder: Path) -> Iterator[Watch]:
    """Watches over ranks started inside the block, and hands signals on to them."""
    watch = Watch(folder)
    is_main_thread = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, watch.forward) for number in STOP_SIGNALS} if is_main_thread else {}
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()
        for number, handler in before.items():
            signal.signal(number, handler)


def quiet(*names: str) -> None:
    """Silences a library's loggers that report what we report better."""
    for known in [*names, *logging.root.manager.loggerDict]:
        if known.startswith(names):
            logging.getLogger(known).setLevel(logging.CRITICAL + 1)
