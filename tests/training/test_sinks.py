"""Sinks, also of resumed runs (the wandb run is real, offline); provenance, schedule, metrics, display, score."""

import io
import json
import logging
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.messages import exit_code, refused

from checkpoints.run_folder import read_metrics
from checkpoints.store import SaveFailed
from sage.trees.chain import Chain
from train.cli.train import main
from train.config.derived import MIN_STEPS, RunLength, run_length
from train.config.hydra_app import compose
from train.config.schema import Config, ConfigError, DecodeConfig, WandbConfig, WandbMode
from train.launch.ranks import Ranks
from train.monitor.metrics import ChainEstimate, TrainingMetrics, answers, chain_depth, peak_memory, simulate
from train.monitor.progress import LogDisplay
from train.monitor.sinks import Jsonl, Tracker, check_tracking, open_tracker
from train.state.provenance import write_provenance
from train.state.resume import TrainState

LINES = [{"step": step, "loss": 1.0 / step} for step in (1, 2, 3)]


def config_in(folder: Path, *overrides: str) -> Config:
    return compose("config", [f"run.dir={folder}", *overrides], Config)


def logged(config: Config) -> Tracker:
    """A tracker that has received `LINES`."""
    tracker = open_tracker(config, {"seed": 0}, 0)
    for line in LINES:
        tracker.log(line, line["step"])  # type: ignore[arg-type]
    return tracker


def test_metrics_are_one_object_per_line(tmp_path: Path) -> None:
    tracker = logged(config_in(tmp_path))
    tracker.log({"validation/sage/speedup": 2.0}, 3)  # a figure of a report, which has a file of its own
    tracker.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == LINES


def test_resuming_drops_later_lines_and_a_truncated_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES) + '{"step": 4, "lo')
    sink = Jsonl(path, from_step=2)
    sink.log({"step": 3, "loss": 9.0}, 3)
    sink.close()
    assert read_metrics(path) == [*LINES[:2], {"step": 3, "loss": 9.0}]


def test_a_full_disk_is_reported_with_file_and_remedy(tmp_path: Path) -> None:
    """`/dev/full` answers every write as a full disk does; a run ends with exit code 1, as when a state cannot be saved."""
    sink = Jsonl(tmp_path / "metrics.jsonl", 0)
    sink.close()
    sink.file = io.TextIOWrapper(io.BufferedWriter(io.FileIO("/dev/full", "w")), line_buffering=True)
    with refused("metrics.jsonl", "No space left", "run.resume=true", error=SaveFailed):
        sink.log({"step": 1}, 1)
    with pytest.raises(OSError, match="No space left"):
        sink.close()
    (tmp_path / "file").write_text("")
    with refused("file/metrics.jsonl", "File exists", error=SaveFailed):
        Jsonl(tmp_path / "file" / "metrics.jsonl", 0)
    assert SaveFailed.exit_code == 1


def test_an_error_on_closing_a_sink_is_logged_and_the_others_are_closed(caplog: pytest.LogCaptureFixture) -> None:
    closed = []

    class Broken:
        def log(self, metrics: object, step: int) -> None: ...

        def close(self) -> None:
            raise OSError("network is gone")

    with caplog.at_level(logging.ERROR):
        Tracker([Broken(), SimpleNamespace(log=None, close=lambda: closed.append(True))]).close()
    assert closed == [True] and "network is gone" in caplog.text


@pytest.mark.slow
def test_tensorboard_receives_every_metric(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logged(config_in(tmp_path, "tracking=tensorboard")).close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (line["step"], pytest.approx(line["loss"])) for line in LINES
    ]


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_package_of_a_tracker_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_tracking(config_in(tmp_path))
    with refused(f"tracking={package}", f"pip install 'sage-draft[{package}]'", error=ConfigError):
        check_tracking(config_in(tmp_path, f"tracking={package}"))


@pytest.mark.slow
def test_wandb_offline_is_a_real_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = config_in(tmp_path, "tracking=wandb", "tracking.mode=offline", "tracking.project=tests")
    assert isinstance(config.tracking, WandbConfig) and config.tracking.mode is WandbMode.offline
    logged(config).close()
    identity = (tmp_path / "wandb_id").read_text()
    (log,) = (tmp_path / "wandb").glob(f"offline-run-*-{identity}/run-{identity}.wandb")
    assert log.stat().st_size > 0
    assert read_metrics(tmp_path / "metrics.jsonl") == LINES


@pytest.fixture
def logged_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key in the environment, in wandb's settings or in a .netrc; the lookup itself is wandb's."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb"))


LOGIN = ("tracking=wandb", "wandb login", "tracking.mode=offline")


@pytest.mark.usefixtures("logged_out")
@pytest.mark.slow
def test_wandb_without_a_login_is_refused_before_anything_is_written(tmp_path, capsys):
    config = config_in(tmp_path / "run", "tracking=wandb")
    with refused(*LOGIN, error=ConfigError):
        check_tracking(config)
    assert exit_code(main, "tracking=wandb", f"run.dir={tmp_path}/run") == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: tracking=wandb: ") and shown.count("\n") == 1
    assert not (tmp_path / "run").exists()


# -- provenance -----------------------------------------------------------------------------------------------------------


def test_provenance_keeps_the_first_start_and_adds_later_ones(tmp_path: Path) -> None:
    target = SimpleNamespace(name="tiny", fingerprint={"hidden_size": 32})
    ranks = Ranks(0, 1, torch.device("cpu"))
    write_provenance(tmp_path, ranks, target, "abc", 0, {})
    write_provenance(tmp_path, ranks, target, "abc", 7, {"optim.lr": [1, 2]})
    found = json.loads((tmp_path / "provenance.json").read_text())
    assert found["from_step"] == 0 and [entry["from_step"] for entry in found["resumed"]] == [7]
    assert found["data_fingerprint"] == "abc" and found["target"] == {"name": "tiny", "hidden_size": 32}
    assert found["versions"]["torch"] == version("torch") and found["command"]


# -- schedule -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "per_epoch", "steps"),
    [
        (["train.epochs=3"], 10.0, 30),
        (["train.epochs=1", "train.max_steps=70"], 2.5, 3),  # the last step begins the next epoch
        (["train.epochs=null", "train.max_steps=70"], 2.5, 70),
        (["train.max_steps=null"], 1.4, MIN_STEPS),
        (["train.max_steps=null", "train.max_minutes=0.5"], 1.4, None),
        (["train.max_steps=null", "train.max_minutes=0.5"], None, None),
        (["train.max_steps=null", "train.epochs=2", "train.max_minutes=0.5"], 1.5, 3),
    ],
)
def test_run_length(tmp_path: Path, overrides: list[str], per_epoch: float | None, steps: int | None) -> None:
    time_s = 30.0 if overrides[-1].startswith("train.max_minutes") else None
    assert run_length(config_in(tmp_path, *overrides), per_epoch) == RunLength(steps, time_s)


@pytest.mark.slow
def test_a_stream_needs_max_steps(tmp_path: Path) -> None:
    with refused("train.max_steps", error=ConfigError):
        run_length(config_in(tmp_path), None)


# -- metrics, display, score ------------------------------------------------------------------------------------------------


def test_metrics_are_sums_divided_by_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "sum", lambda self, values: 2 * values)  # two ranks that saw the same
    loader = SimpleNamespace(wait_s=1.0)
    metrics, state = TrainingMetrics(loader), TrainState(step=3, tokens=100)
    mask = torch.ones(1, 4, dtype=torch.bool)
    metrics.add(torch.tensor([2.0, 4.0, 6.0, 1.0, 3.0, 2.0, 10.0]), torch.tensor([[True, True, True, True]]), mask)
    metrics.add(torch.tensor([4.0, 4.0, 2.0, 1.0, 3.0, 4.0, 10.0]), torch.tensor([[False, False, True, True]]), mask)
    loader.wait_s = 1.5
    line = metrics.reduce(Ranks(0, 2, torch.device("cpu")), state, lr=0.1, grad_norm=2.0)
    names = ("loss", "loss_ce", "loss_feature", "agreement", "kl")
    assert [line[key] for key in names] == pytest.approx([0.3, 0.4, 0.4, 0.1, 0.3])
    assert line["estimated_tokens_per_pass"] == 8 / 4  # four tokens in one pass, four in three
    assert line["memory_gib"] > 0 and "reserved_gib" not in line
    for name, count in (("max_memory_allocated", 3 * 2**30), ("max_memory_reserved", 2**32)):
        monkeypatch.setattr(torch.cuda, name, lambda device, count=count: count)
    assert peak_memory(torch.device("cuda")) == {"memory_gib": 3.0, "reserved_gib": 4.0}
    assert line["step"] == 3 and line["tokens"] == 100 and line["lr"] == 0.1
    assert line["data_wait"] == pytest.approx(0.5 / line["time_s"]) and state.time_s == line["time_s"]
    assert metrics.latest["loss"] == pytest.approx(0.3)
    with pytest.raises(AssertionError, match="before any step"):
        metrics.reduce(Ranks(0, 2, torch.device("cpu")), state)


def test_pauses_are_excluded_from_the_training_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr(Ranks, "sum", lambda self, values: values)
    metrics, state = TrainingMetrics(None), TrainState(step=1, tokens=10)
    metrics.add(torch.ones(7), torch.ones(1, 1, dtype=torch.bool), torch.ones(1, 1, dtype=torch.bool))
    now[0] = 2.0
    with metrics.paused():
        now[0] = 50.0
    assert metrics.reduce(Ranks(0, 1, torch.device("cpu")), state)["tokens_per_s"] == 5.0


def test_log_lines_at_intervals_with_the_remaining_time(monkeypatch, caplog):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    lines = LogDisplay(first=0, interval_s=10)
    with caplog.at_level(logging.INFO, logger="train.monitor.progress"):
        for step in (1, 2, 10, 11, 100):
            now[0] = float(step)
            lines.update(
                step, 100, {"loss": 0.5, "tokens_per_s": 1234.0, "estimated_tokens_per_pass": 3.141, "memory_gib": 1.25}
            )
    assert [record.getMessage() for record in caplog.records] == [
        "step 10/100  loss 0.5000  ~3.14 tokens/pass  1,234 tokens/s  1.2 GiB  01:30 left",
        "step 100/100  loss 0.5000  ~3.14 tokens/pass  1,234 tokens/s  1.2 GiB  00:00 left",
    ]
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="train.monitor.progress"):
        for done in range(4):
            now[0] = 100.0 + 8 * done
            lines.show_validation(done, 4, "sage 2.31 tokens/pass 1.85x")
    assert [record.getMessage() for record in caplog.records] == ["prompt 2/4  sage 2.31 tokens/pass 1.85x  00:16 left"]


# -- chains simulated from the agreements of a batch --------------------------------------------------------------------


def rows(*bits: str) -> torch.Tensor:
    return torch.tensor([[bit == "1" for bit in row] for row in bits])


def test_each_depth_reads_its_unrolled_step() -> None:
    """Step 1 of an unrolled draft is wrong everywhere, so a chain keeps one token however often step 0 is right."""
    mask = torch.ones(1, 6, dtype=torch.bool)
    assert simulate(rows("111111", "000000"), mask, 5).tolist() == [6, 3]
    assert simulate(rows("111111", "111111"), mask, 5).tolist() == [6, 1]


def test_a_chain_does_not_reach_into_the_next_answer() -> None:
    mask = torch.tensor([[1, 1, 0, 1, 1], [0, 0, 0, 1, 1], [1, 1, 0, 0, 0]], dtype=torch.bool)
    assert answers(mask) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert simulate(rows("1" * 8), mask, 5).tolist() == [8, 4]
    assert answers(torch.zeros(2, 3, dtype=torch.bool)) == []


def naive(agree: list[bool], depth: int) -> int:
    """Token by token, as a decoder emits them."""
    passes, at = 0, 0
    while at < len(agree):
        passes += 1
        for _ in range(depth):
            if at < len(agree) and agree[at]:
                at += 1
            else:
                break
        at += 1  # the target's own token
    return passes


@settings(max_examples=100, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 8))
def test_simulation_is_the_naive_walk(agree: list[bool], depth: int) -> None:
    mask = torch.ones(1, len(agree), dtype=torch.bool)
    assert simulate(torch.tensor([agree]), mask, depth).tolist() == [len(agree), naive(agree, depth)]


def test_micro_batches_add_up_until_popped() -> None:
    """The example in the module takes two passes; without agreement, a pass yields one token."""
    estimate = ChainEstimate(3)
    for agree in ("1110111", "0000"):
        estimate.add(rows(agree), torch.ones(1, len(agree), dtype=torch.bool))
    assert estimate.pop().tolist() == [11, 6]
    assert estimate.pop().tolist() == [0, 0]


def test_the_depth_is_that_of_the_measured_chain() -> None:
    assert chain_depth(DecodeConfig(policies=[], num_prompts=1, max_new_tokens=2, options={"chain": {"depth": 7}})) == 7
    assert chain_depth(DecodeConfig(policies=[], num_prompts=1, max_new_tokens=2)) == Chain.depth
