"""Starting ranks on this machine, or joining those that torchrun, deepspeed or srun has started.

Owns: who starts whom, how a failed rank ends. Does not own: what a rank does, how its error is told (train.launch.failures).

One rank runs in this process. For more, torch's own elastic launcher spawns them: rank 0 keeps the terminal, the others write
into a temporary folder. A rank that dies leaves its error in that folder; the others are killed a second later. A rank that
somebody else has started shows its error itself, if it is the first to fail.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from multiprocessing import active_children
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from sage.cli import EXIT_DONE, EXIT_STOPPED
from sage.files import write_text
from train.config.checks import check_batch, check_deepspeed
from train.config.hydra_app import configure_logging
from train.config.schema import Config, ConfigError, Device
from train.launch.cluster_env import join_environment
from train.launch.failures import STOPPED_AT_ONCE, RankFailed, describe
from train.launch.signals import StopSignal, ignore_termination
from train.launch.supervisor import POLL_S, quiet, watching

if TYPE_CHECKING:
    from train.run.loop import Run

logger = logging.getLogger(__name__)


def launch(config: Config) -> int:
    """Runs `config` on the ranks it asks for.

    Returns:
        the exit code: 0 done, 3 stopped by a signal after saving.

    Raises:
        ConfigError: the number of ranks contradicts the launcher we are inside of, or neither the batch nor the draft can be
            spread over so many.
        RankFailed: a rank died.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # lost connections are told in our words
    asked = config.launch.gpus or config.launch.ranks
    started = join_environment()
    if started is not None:
        if asked is not None and asked != started:
            key = "launch.gpus" if config.launch.gpus else "launch.ranks"
            raise ConfigError(f"{key}={asked}: {started} rank(s) were started from outside; leave {key} unset there")
        check_batch(config, started)
        check_deepspeed(config, started)
        configure_logging(config.debug, is_speaking=os.environ["RANK"] == "0")
        return _run_joined(config)
    check_batch(config, asked or 1)
    check_devices(config, asked or 1)
    return run_alone(config) if (asked or 1) == 1 else spawn(config, asked or 1)


def run_alone(config: Config) -> int:
    """The one rank of a run, in this process.

    Raises:
        RankFailed: it was stopped at once, and something had been saved before.
    """
    try:
        return run_rank(config)
    except KeyboardInterrupt as error:
        from checkpoints.run_folder import state_folder

        if any(state_folder(config.run.dir).glob("step_*")):
            raise RankFailed(STOPPED_AT_ONCE, EXIT_STOPPED) from error
        raise


def run_rank(config: Config) -> int:
    """This process's part of the run, from joining to leaving."""
    if config.launch.device is Device.cpu or not has_gpu():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when transformers first touches DeepSpeed; it would look around
    with ExitStack() as stack:
        stop = stack.enter_context(StopSignal())
        from train.launch.ranks import joined
        from train.run.build import building
        from train.run.loop import fit

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
        failure = describe(error, rank)
        write_text(Path(folder) / f"rank_{rank}.json", json.dumps(asdict(failure)))
        _leave(failure.exit_code)


def _run_joined(config: Config) -> int:
    """A rank that somebody else has started: runs, and shows its error if it is the first to fail."""
    from train.launch.ranks import fails_first, is_joined

    try:
        code = run_rank(config)
    except BaseException as error:
        if not is_joined():
            raise
        failure = describe(error, int(os.environ["RANK"]))
        if fails_first():
            print(f"{failure.details}error: {failure.message}", file=sys.stderr)
        _leave(failure.exit_code)
    if code == EXIT_STOPPED:
        ignore_termination()  # srun ends the others as soon as one has left with 3, and all are to leave with 3
    return code


def _leave(exit_code: int) -> NoReturn:
    """Ends the process without clean-up, which could wait for ranks that are gone."""
    for child in active_children():  # loader workers would go on for some seconds and keep our terminal open
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
