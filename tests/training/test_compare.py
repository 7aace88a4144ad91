"""Comparison of runs, and the page of one run, read from run folders alone."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from support.messages import check_message, exit_code, refused
from support.train_helpers import policy_figures

from checkpoints.run_folder import next_check
from sage.commands.cli import NOTHING_SAVED
from train.cli import validate as validate_cli
from train.config.hydra_app import Job, compose, failures, folder_name, job_line, swept
from train.config.schema import Config, ConfigError, ScoreConfig, ScoreMetric
from train.report.compare import changed_keys, compare, compare_jobs, find_runs, read_run, run_command, score_of_run
from train.report.run_page import measured_against_estimate, write_run_report

BASE: dict[str, Any] = {"seed": 0, "launch": {"ranks": 2}, "decode": {"options": {"chain": {"depth": 5}}}}


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "128")


def write_run(folder: Path, lr: float, validations: dict[int, dict[str, Any]], steps: int = 4) -> Path:
    """Writes the files of a run folder that comparisons read."""
    folder.mkdir(parents=True)
    config = BASE | {"optim": {"lr": lr}, "run": {"name": folder.name, "dir": str(folder)}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    lines = [
        {"step": step, "tokens": 100 * step, "loss": 4.0 / step, "loss_ce": 3.0, "loss_feature": 1.0 / step, "lr": lr}
        | {"agreement": 0.2 * step, "acceptance": 0.2 * step, "estimated_tokens_per_pass": 1.0 + 0.25 * step}
        | {"grad_norm": 1.0, "tokens_per_s": 500.0, "time_s": 2.0 * step}
        for step in range(1, steps + 1)
    ]
    lines[0] |= {"own_answers": 0.55, "own_answers/chats": 0.1, "own_answers/docs": 1.0, "dropped_examples": 0.12}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step, policies in validations.items():
        report = folder / "validation" / f"step_{step:08d}" / "report.json"
        report.parent.mkdir(parents=True)
        report.write_text(json.dumps({"policies": {"autoregressive": policy_figures(1.0, speedup=1.0)} | policies}))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two validated runs, the second one better at its first validation, and one without a validation."""
    return [
        write_run(
            tmp_path / "a", 1e-4, {4: {"chain": policy_figures(1.5, speedup=2.0), "sage": policy_figures(2.0, speedup=2.0)}}
        ),
        write_run(
            tmp_path / "b",
            3e-4,
            {2: {"sage": policy_figures(3.0, speedup=1.5)}, 4: {"sage": policy_figures(2.5, speedup=2.5, match=3)}},
        ),
        write_run(tmp_path / "c", 1e-2, {}, steps=1),
    ]


def test_a_run_is_summarized_at_its_best_validation(runs: list[Path]) -> None:
    summary = read_run(runs[1])
    assert (summary.steps, summary.best_step, summary.score, summary.loss) == (4, 2, 3.0, 1.0)
    assert read_run(runs[1], ScoreConfig(metric=ScoreMetric.speedup)).best_step == 4
    assert read_run(runs[0], ScoreConfig(policy="chain")).score == 1.5
    assert read_run(runs[2]).score is None


def test_only_changed_keys_are_listed(runs: list[Path]) -> None:
    summary = [read_run(run) for run in runs]
    assert changed_keys(summary) == ["optim.lr"]  # not run.name, not run.dir
    assert changed_keys(summary[:1]) == []
    summary[0].config |= {"target.dtype": "fp32", "train.precision": "fp32", "target.name": "one"}
    summary[1].config |= {"target.dtype": "bf16", "train.precision": "bf16", "target.name": "two"}
    assert changed_keys(summary[:2]) == ["optim.lr", "target.dtype", "target.name"]  # precision follows


@pytest.mark.usefixtures("rendered_plots")
def test_a_comparison_is_written_best_run_first(runs: list[Path], tmp_path: Path) -> None:
    lines = compare([read_run(run) for run in runs], tmp_path).splitlines()
    assert lines[0].split() == ["run", "steps", "loss", "sage", "tok/pass", "chain", "tok/pass", *["sage", "speedup"],
                                "chain", "speedup", "identical", "optim.lr"]  # fmt: skip
    assert lines[2].split() == ["b", "*", "2/4", "1.0000", "3.00", "-", "1.50x", "-", "4/4", "0.0003"]
    assert lines[3].split() == ["a", "4/4", "1.0000", "2.00", "1.50", "2.00x", "2.00x", "8/8", "0.0001"]
    assert lines[4].split() == ["c", "1", "4.0000", *"----", "not", "validated", "0.01"]
    assert "* best by tokens_per_target_pass of sage" in lines[-3] and lines[-2].startswith("Fastest: a, 2.00x with chain;")
    assert str(tmp_path / "compare.md") in lines[-1]
    content = json.loads((tmp_path / "compare.json").read_text())
    assert content["changed"] == ["optim.lr"] and [run["score"] for run in content["runs"]] == [3.0, 2.0, None]
    assert content["runs"][0]["policies"]["sage"]["match"] == 4
    text = (tmp_path / "compare.md").read_text()
    assert text.startswith("# Comparison of 3 runs") and "| b * | 2/4 |" in text and "(compare.png)" in text
    assert "\\* best by tokens_per_target_pass of sage" in text  # not an entry of a list
    assert "<p>* best by" in re.sub(r">\s+", ">", (tmp_path / "compare.html").read_text())
    with Image.open(tmp_path / "compare.png") as image:
        assert image.width > 1000 and len(image.convert("L").getcolors(256) or []) > 10


def test_a_check_is_compared_only_when_it_is_named(runs: list[Path], tmp_path: Path) -> None:
    check = next_check(runs[0], "draft", 4)
    check.mkdir(parents=True)
    settings = {"step": 4, "prompts": 64, "repeats": 3, "dtype": "float32", "device": "cpu"}
    content = settings | {"temperature": 0.5, "max_new_tokens": 256, "policies": {"sage": policy_figures(9.0, speedup=2.0)}}
    (check / "report.json").write_text(json.dumps(content))
    assert read_run(runs[0]).score == 2.0 and find_runs([str(tmp_path)]) == runs
    text = run_command([str(runs[0]), str(check)])
    assert text.splitlines()[2].split()[:2] == ["a/checks/draft_step_00000004", "*"] and " 9.00 " in text
    assert "64 prompts, 3 runs each, float32 on cpu, temperature 0.5, at most 256 new tokens" in " ".join(text.split())
    assert text.endswith(f"comparison: {tmp_path / 'compare.md'}")


def test_runs_are_found_by_name_pattern_and_folder(runs: list[Path], tmp_path: Path) -> None:
    assert find_runs([str(runs[1]), str(runs[0])]) == [runs[1], runs[0]]
    assert find_runs([f"{tmp_path}/*"]) == runs == find_runs([str(tmp_path)])
    assert find_runs([str(runs[0]), f"{tmp_path}/[ab]"]) == runs[:2]  # each once
    with refused("nowhere", "config.yaml", error=ConfigError):
        find_runs([str(runs[0]), "nowhere"])


def test_the_command_prints_the_table_and_its_path(runs, tmp_path, capsys):
    assert exit_code(validate_cli.main, "--compare", runs[2], "--out", tmp_path / "o") == 0
    assert capsys.readouterr().out.endswith(f"comparison: {tmp_path / 'o' / 'compare.md'}\n")
    assert not (tmp_path / "o" / "compare.png").exists()  # without a validation
    assert exit_code(validate_cli.main, "--compare", "/no/such") == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and shown.count("\n") == 1
    check_message(shown, "/no/such", "config.yaml")


def test_corrupt_reports_and_folders_without_a_run_or_a_step_are_refused(runs: list[Path], tmp_path: Path) -> None:
    (runs[0] / "validation" / "step_00000004" / "report.json").write_text("{")
    with refused("report.json"):
        run_command([str(runs[0])])
    for read in (read_run, write_run_report):
        with refused(str(tmp_path), "config.yaml", error=ConfigError):
            read(tmp_path)
    (runs[1] / "metrics.jsonl").write_text("")
    with refused("metrics.jsonl", "train.log_every", error=ConfigError):
        write_run_report(runs[1])


def test_a_sweep_scores_its_runs_and_compares_them_with_failed_jobs(runs, tmp_path, capsys):
    config = compose("config", [f"run.dir={runs[1]}"], Config)
    assert score_of_run(config) == 3.0
    config.launch.plan = True
    assert score_of_run(config) is None
    jobs = [Job(number=n, name=run.name, dir=str(run)) for n, run in enumerate(runs)]
    jobs[2].code, jobs[2].error = 2, "no supervised token"
    jobs += [Job(number=3, name="d", dir=str(tmp_path / "d"), code=1, error="boom"), Job(number=4, name="e", code=2, error="?")]
    compare_jobs(jobs[:1])
    assert capsys.readouterr().out == ""  # a single job is not compared
    compare_jobs(jobs)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("b *") and lines[-1] == f"comparison: {tmp_path / 'compare.md'}"
    assert "exit 2: no supervised token" in lines[4] and lines[5].startswith("d ") and "exit 1: boom" in lines[5]
    assert failures(jobs) == ("3 of 5 jobs failed: c (exit 2: no supervised token); d (exit 1: boom); e (exit 2: ?)")
    assert failures(jobs[:2]) is None
    jobs[0].code, jobs[1].code, jobs[1].error = 3, 1, NOTHING_SAVED
    assert failures(jobs[:2]) is None  # stopped by a signal


def test_a_sweep_into_the_folder_of_a_run_is_refused(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.config.hydra_app.is_sweep", lambda: True)
    with refused(f"run.dir={runs[0]}", "already holds a run", "give another", error=ConfigError):
        compose("config", [f"run.dir={runs[0]}"], Config)


def test_a_job_is_named_by_what_the_sweep_changes() -> None:
    arguments = "-m optim.lr=1e-4,3e-4 run.dir=x +a.b=range(1,3) seed=choice(1,2) oops decode.policies=[sage,chain]"
    assert swept(arguments.split()) == (["optim.lr", "a.b", "seed"], 2 * 2 * 2) and swept(["-m", "seed=1"]) == ([], 1)
    assert swept(["seed=1,2", "sweep=optuna"]) == (["seed"], None)
    assert job_line(1, 3, "seed=2", [60.0]) == "job 2 of 3: seed=2, about 0:02:00 left"
    assert job_line(1, None, "seed=2", [1.0]) == "job 2: seed=2"
    assert folder_name("optim.lr=1e-4 a.b=1") == "optim.lr_1e-4-a.b_1"
    assert len(folder_name("y" * 400)) < 255 and folder_name("y" * 400) != folder_name("y" * 401)
    compose("config", [f"run.dir=runs/{folder_name('optim.lr=1e-4 a=[b]')}"], Config)  # valid on a command line


@pytest.mark.slow
@pytest.mark.usefixtures("rendered_plots")
def test_the_page_of_a_run_compares_estimate_and_measurement(runs: list[Path]) -> None:
    path = write_run_report(runs[0])
    text = path.read_text()
    assert "4 steps, 400 tokens in 0.1 minutes of training; loss 1.0000." in text
    assert "Best tokens_per_target_pass of `sage`: **2.00**, after step 4." in text and "By speed" not in text
    assert "\n55% of the supervised tokens are the target's own choice (chats 10%, docs 100%), measured in" in text
    assert "\n12% of the examples are longer than `data.max_length` and were dropped.\n" in text
    other = write_run_report(runs[1]).read_text()
    assert "**3.00**, after step 2. By speed, the best is `sage` after step 4: **2.50x**." in other
    assert "| 4 | 2.00 | 0.75 | 1.50 | 2.00 | 2.00x | 8/8 |" in text
    assert "[validation at step 4](validation/step_00000004/report.md)" in text
    with Image.open(runs[0] / "curves.png") as image:
        assert image.height > 1000


def test_a_validation_is_compared_with_the_estimate_before_it() -> None:
    lines = [{"step": step, "estimated_tokens_per_pass": float(step)} for step in (10, 20)]
    reports = [(step, {"policies": {"chain": {"tokens_per_target_pass": 6.0}}}) for step in (5, 15, 20)]
    rows = measured_against_estimate(lines, reports)
    assert [(row["estimate"], row["ratio"]) for row in rows] == [(None, None), (10.0, 0.6), (20.0, 0.3)]
