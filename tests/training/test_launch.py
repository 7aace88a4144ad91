"""Several ranks with the real launcher: the weights of one rank, the reported error, signals."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from support.messages import check_message, refused
from support.train_helpers import command, environment, metrics
from torch.distributed import TCPStore

from checkpoints.store import SaveFailed
from sage.commands.cli import NOTHING_SAVED
from sage.commands.cli import run as run_command
from train.config.hydra_app import App, compose
from train.config.schema import Config, ConfigError
from train.job.run import run_rank
from train.launch.cluster_env import detect_launcher
from train.launch.launcher import launch
from train.launch.ranks import Ranks, process_group
from train.launch.supervisor import RankFailed, StopFlag, Supervisor, describe, interrupted

SAGE_TRAIN = [sys.executable, "-m", "train.cli.train"]  # as users start it: torch has yet to read its log level


pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.timeout(1200)]
TINY_REPORT = ["decode.policies=[autoregressive]", "decode.max_new_tokens=2"]


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that are killed at the end of the test."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def start(
    started: list[subprocess.Popen[str]], sage_train: Sequence[str], target: Path, run: Path, *overrides: str
) -> subprocess.Popen[str]:
    """Starts a long run of two ranks in the background with the command `sage_train`, and waits for its first step."""
    length = ["train.micro_batch_size=1", "train.max_steps=100000"]
    arguments = command(target, run, *TINY_REPORT, "launch.ranks=2", "launch.device=cpu", *length)
    command_line = [*sage_train, *arguments, *overrides]
    process = subprocess.Popen(command_line, env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True)
    started.append(process)
    while not (run / "metrics.jsonl").exists() or not metrics(run):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.2)
    return process


@pytest.mark.slow
def test_sigterm_saves_and_exits_with_3_and_torchrun_resumes(target, tmp_path, commands, started):
    run = tmp_path / "run"
    process = start(started, commands.command("train.cli.train"), target, run)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate()
    assert process.returncode == 3, errors
    saved = (run / "state" / "latest").read_text().strip()
    assert (run / "state" / saved / "rank_00001.safetensors").is_file()
    step = json.loads((run / "state" / saved / "trainer.json").read_text())["step"]
    assert step == metrics(run)[-1]["step"]
    resumed = [f"train.max_steps={step + 1}", "run.resume=true", "train.micro_batch_size=1", *TINY_REPORT]
    script = tmp_path / "sage-train"
    script.write_text(commands.script("train.cli.train"))
    script.chmod(0o700)
    torchrun = [*commands.command("torch.distributed.run"), "--nproc-per-node=2", "--standalone", "--no-python", str(script)]
    done = subprocess.run(
        [*torchrun, *command(target, run, *resumed)], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in metrics(run)] == list(range(1, step + 2))
    assert done.stdout.count("report: ") == 1  # of rank 0


@pytest.mark.slow
def test_a_killed_rank_ends_the_run(target: Path, tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    process = start(started, SAGE_TRAIN, target, tmp_path / "run", "train.save_every=1")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    victim, *others = [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(victim, signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode == 1 and "Warning" not in errors.partition("error: ")[0], errors
    [line] = [line for line in errors.splitlines() if line.startswith("error: ")]
    check_message(line.replace("rank 1", "rank N").replace("rank 0", "rank N"), "SIGKILL", "out of memory?")
    assert "resource_tracker" not in errors
    assert errors.count("error: ") == 1 and "Connection" not in errors  # not the secondary failure of the other rank
    assert not any(Path(f"/proc/{pid}").exists() for pid in others)


def reported(folder: Path, *failures: RankFailed) -> Supervisor:
    """A supervisor whose ranks have reported these errors one after another."""
    for rank, failure in enumerate(failures):
        failure.time = float(rank)
        failure.write(folder / f"rank_{rank}.json")
    return Supervisor(folder)


def test_the_root_cause_is_a_kill_or_the_first_primary_failure(tmp_path: Path) -> None:
    lost = describe(RuntimeError("gloo: Connection closed by peer [127.0.0.1]:1"), 0)
    assert lost.is_secondary and not lost.details
    check_message(str(lost), "rank 0: ")
    full = describe(SaveFailed("disk full"), 1)
    assert (str(full), full.exit_code, full.details) == ("disk full", 1, "")
    bug = describe(RuntimeError("a bug"), 2)
    assert not bug.is_secondary and str(bug) == "rank 2: RuntimeError: a bug" and "RuntimeError: a bug" in bug.details
    mistake = describe(ConfigError("seed=-1"), 1)
    assert (str(mistake), mistake.exit_code) == ("seed=-1", 2)
    supervisor = reported(tmp_path, lost, full, bug)
    supervisor.failed = {0: 1, 1: 1, 2: 1}
    assert str(supervisor.root_cause()) == "disk full"
    supervisor.failed[1] = -9
    check_message(str(supervisor.root_cause()), "rank 1 ", "SIGKILL", "out of memory?", "dmesg")


def test_a_time_out_names_the_ranks_that_wait_and_the_key(tmp_path: Path) -> None:
    """Ranks 1 and 2 of three wait; the connections of rank 0 to them are lost thereafter."""
    gloo = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 7200000ms for recv operation to complete"
    lost = describe(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:12160"), 0)
    supervisor = reported(tmp_path, lost, *(describe(RuntimeError(gloo), rank) for rank in (1, 2)))
    supervisor.failed = {0: 1, 1: 1, 2: 1}
    failed = supervisor.root_cause()
    assert str(failed).startswith("ranks 1, 2 waited 7,200 s in a collective") and "launch.timeout_s" in str(failed)
    supervisor.failed = {1: -6}
    (tmp_path / "rank_1.log").write_text("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)\n")
    failed = supervisor.root_cause()
    check_message(str(failed), "rank 1 ", "SIGABRT", "collective operation timeout")
    assert "SeqNum=9" in failed.details


@pytest.mark.slow
def test_a_rank_that_never_starts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    variables = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
    for name, value in (variables | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    store.set("joined/1", "b node")
    with (
        refused("rank 0 on ", "rank(s) 2 of 3", f"localhost:{store.port} within 5 s", error=RankFailed),
        process_group("cpu", 5),
    ):
        pass


class Rank:
    """A process that exits at once, while it is joined, or not at all until it is killed."""

    def __init__(self, exitcode: int | None, late: int | None = None) -> None:
        self.exitcode, self.late = exitcode, late
        self.sentinel, other_end = os.pipe()
        if exitcode is not None:
            os.close(other_end)  # `wait` finds the sentinel ready

    def join(self, timeout: float | None = None) -> None:
        self.exitcode = self.late if self.exitcode is None else self.exitcode

    def kill(self) -> None:
        self.exitcode = -9 if self.exitcode is None else self.exitcode


def test_ranks_that_fail_within_a_second_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.launch.supervisor.GRACE_S", 0.0)
    supervisor, ranks = Supervisor(tmp_path), [Rank(1), Rank(None, late=-11), Rank(None), Rank(0), Rank(3)]
    with refused("rank 1 ", "SIGSEGV", error=RankFailed):
        supervisor.wait(ranks, str(tmp_path))  # type: ignore[arg-type]
    assert supervisor.failed == {0: 1, 1: -11} and ranks[2].exitcode == -9
    assert supervisor.wait([Rank(3), Rank(0)], str(tmp_path)) == 3  # type: ignore[list-item]  # stopped, and saved


def test_an_exit_without_a_report_is_an_error(tmp_path: Path) -> None:
    """The message names the rank and its exit code; the details are what it wrote to its file."""
    (tmp_path / "rank_1.log").write_text("\n".join(f"line {number}" for number in range(1, 31)) + "\n")
    (tmp_path / "rank_2.log").touch()
    supervisor = Supervisor(tmp_path)
    supervisor.failed = {1: 1}
    failed = supervisor.root_cause()
    assert failed.exit_code == 1
    assert failed.details == "rank_1:\n" + "".join(f"line {number}\n" for number in range(11, 31))
    check_message(str(failed), "rank 1 ", "code 1", "launch.ranks=1")


def test_a_stopped_rank_that_has_saved_answers_says_so(tmp_path: Path) -> None:
    assert Supervisor(tmp_path).stopped(str(tmp_path)).exit_code == 130
    failures = (describe(interrupted(tmp_path), 0), describe(RankFailed("kept; the same command continues", 3), 1))
    stopped = reported(tmp_path, *failures).stopped(str(tmp_path))
    assert stopped.exit_code == 3
    assert str(stopped) == "kept; the same command continues"


@pytest.mark.slow
def test_a_command_interrupted_before_it_saved_exits_with_130_and_ends_a_sweep(monkeypatch, tmp_path, capsys):
    started = []

    def task(config: Config) -> int:
        started.append(config.seed)
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    for words, seeds in ((["data=pocket"], [0]), (["-m", "seed=1,2", f"run.dir={tmp_path}/sweep"], [1])):
        monkeypatch.setattr("sys.argv", ["sage-train", *words])
        assert App(config_name="config", schema=Config, task=task, is_main=True).run() == 130
        check_message(next(line for line in capsys.readouterr().err.splitlines() if NOTHING_SAVED in line), NOTHING_SAVED)
        assert started == seeds
        started.clear()
    monkeypatch.setattr("sys.argv", ["sage-train", "-m", "seed=1,2", f"run.dir={tmp_path}/sweep"])
    stopped = App(config_name="config", schema=Config, task=lambda config: started.append(config.seed) or 3, is_main=True)
    assert stopped.run() == 3
    assert started == [1]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "job 1 of 2: seed=1" and lines[-1].startswith("stopped, 2 jobs left;") and "failed" not in str(lines)
    assert run_command(lambda: signal.default_int_handler(2, None)) == 130


@pytest.mark.parametrize(("nodes", "first"), [("a,b", "a"), ("gpu[003-007,9],big1", "gpu003"), ("n[1,5]", "n1")])
def test_torch_variables_follow_from_those_of_srun(nodes: str, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = {"STEP_ID": "0", "STEP_NUM_TASKS": "8", "PROCID": "5", "LOCALID": "1", "JOB_ID": "77", "STEP_NODELIST": nodes}
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert detect_launcher() == 8
    assert (os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["MASTER_ADDR"]) == ("5", "1", first)
    assert 20_000 <= int(os.environ["MASTER_PORT"]) < 32_000


def test_incomplete_launcher_variables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with refused("WORLD_SIZE, MASTER_ADDR, MASTER_PORT: missing", error=ConfigError):
        detect_launcher()


@pytest.mark.parametrize(
    ("world_size", "overrides", "words"),
    [
        (4, [], ("launch.ranks=2", "4 rank(s)")),
        (
            2,
            ["launch.ranks=null", "draft=model", "draft.num_layers=1", "deepspeed=zero3"],
            ("deepspeed.stage=3", "0 to 2 with draft=model on 2 ranks"),
        ),
    ],
)
def test_what_the_number_of_ranks_of_a_launcher_rules_out_is_refused(monkeypatch, tmp_path, world_size, overrides, words):
    for name, value in {"RANK": "0", "WORLD_SIZE": world_size, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, str(value))
    arguments = command(tmp_path, tmp_path / "run", *TINY_REPORT, "launch.ranks=2", "train.micro_batch_size=1")
    config = compose("config", [*arguments, "launch.device=cpu", *overrides], Config)
    with refused(*words, error=ConfigError):
        launch(config, run_rank)


def test_signals_set_the_flag_once_it_is_polled() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopFlag() as stop:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        stop.is_polled = True
        signal.raise_signal(signal.SIGUSR1)
        assert stop.is_set
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)  # the second Ctrl-C interrupts at once
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(("nodes", "expected"), [("aabb", 2), ("aaaa", 4), ("abab", 4), ("aab", 3), ("abc", 1), ("a", 1)])
def test_ranks_per_node(nodes: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them unless every node has as many, numbered in a row."""
    monkeypatch.setattr(Ranks, "gather", lambda *_: list(nodes))
    assert Ranks(0, len(nodes), torch.device("cpu")).per_node() == expected


@pytest.mark.parametrize(("ends_process", "received"), [(True, True), (True, False), (False, True)])
def test_sigterm_after_a_stop(ends_process: bool, received: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is about to exit ignores it, without a gap between the flag's handler and ignoring it."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(StopFlag, "ends_process", ends_process)
    try:
        with StopFlag() as stop:
            stop.is_polled = True
            if received:
                signal.raise_signal(signal.SIGUSR1)
        expected = signal.SIG_IGN if ends_process and received else before
        assert signal.getsignal(signal.SIGTERM) == expected
    finally:
        signal.signal(signal.SIGTERM, before)
