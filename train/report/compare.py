"""Comparison of finished runs: changed configuration keys, length of training, validation results.

Used by `sage-validate --compare runs/a runs/b` and at the end of a sweep. Owns: the content of compare.json, which files are
written. Does not own: the table (train.report.compare_table), the plot (train.report.run_page), the layout of a run folder
(checkpoints.run_folder).
"""

from __future__ import annotations

import glob
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints import run_folder
from checkpoints.run_folder import is_check, is_run
from sage.bench.report_table import measured_with
from sage.commands.cli import new_parser
from sage.io.files import write_text
from train.config.schema import Config, ConfigError, ScoreConfig
from train.config.sweep import Job
from train.report.compare_table import draw_comparison, page, table
from train.report.web import write_report

SCHEMA = 1
STEM = "compare"
SEVERAL = "comparison"  # folder of a comparison of runs in several folders
# Prefixes of keys that differ between runs without affecting the result: names, folders, the machine.
IGNORED_KEYS = ("run.", "target.path", "target.revision", "data.cache_dir", "launch.", "debug")
OPTIONS = "decode.options."  # of policies: compared among the runs that measure the policy
DESCRIBED = ("steps", "best_step", "loss", "score", "scored_by", "policies", "measured_with", "error")
FIGURES = ("tokens_per_target_pass", "mean_accepted_draft", "speedup", "speedup_ci", "tokens_per_s", "match", "total")


@dataclass(kw_only=True)
class RunSummary:
    """One run, read from its folder, or a later check of its draft; figures are those of the validation with the best score."""

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)  # the configuration by dotted key
    steps: int = 0  # the last one logged
    best_step: int | None = None
    loss: float | None = None  # the last one logged
    score: float | None = None
    policies: dict[str, dict[str, float]] = field(default_factory=dict)
    measured_with: str = ""  # settings
    error: str | None = None  # the reason of a failure, if known
    score_metric: str = run_folder.DEFAULT_METRIC  # with `score_policy` the definition of the score (run_folder.score)
    score_policy: str | None = None
    prompts: list[str] = field(default_factory=list)  # names; empty if the report does not name them

    @property
    def scored_by(self) -> str | None:
        policy = run_folder.score_policy(self.policies, self.score_policy)
        return None if policy is None else f"{self.score_metric} of {policy}"


def read_run(folder: Path, chosen: ScoreConfig | None = None) -> RunSummary:
    """Summarizes a run with its own best validation, or the folder of a later check. Raises ConfigError for another folder,
    ValueError for a config.yaml or a report that cannot be parsed.

    Args:
        chosen: definition of the score; None = that of the run.
    """
    home = home_of(folder)
    if not is_run(home):
        raise ConfigError(f"{home}: not a run folder ({run_folder.CONFIG} is missing); give folders written by sage-train")
    config = run_folder.read_run_config(home)
    metrics = run_folder.read_metrics(home / run_folder.METRICS)
    metric, policy = (str(chosen.metric), chosen.policy) if chosen else run_folder.score_settings(config)
    summary = RunSummary(folder=folder, config=run_folder.dotted_keys(config), score_metric=metric, score_policy=policy)
    if metrics:
        summary.steps, summary.loss = metrics[-1]["step"], metrics[-1].get("loss")
    if is_check(folder):
        report = run_folder.read_report(folder / run_folder.REPORT)
        reports = [(int(report.get("step", 0)), report)]
    else:
        reports = run_folder.read_reports(folder)
    for step, report in reports:
        score = run_folder.score(report, metric, policy)
        if summary.best_step is None or (score is not None and (summary.score is None or score > summary.score)):
            summary.best_step, summary.score = step, score
            summary.policies = {
                name: {figure: part[figure] for figure in FIGURES if figure in part}
                for name, part in report["policies"].items()
            }
            summary.measured_with = measured_with(report)
            per_prompt = [part.get("per_prompt", []) for part in report["policies"].values()]
            summary.prompts = [str(row["name"]) for row in per_prompt[0]] if per_prompt else []
    return summary


def home_of(folder: Path) -> Path:
    """Returns the run that a check belongs to; a run itself unchanged."""
    return folder.absolute().parents[1] if is_check(folder) else folder


def changed_keys(runs: Sequence[RunSummary]) -> list[str]:
    """Returns the dotted keys in which the runs differ, in the order of the configuration, without derived keys.

    The options of a policy count among the runs that measure it.
    """
    known = [run.config for run in runs if run.config]
    changed = []
    for key in dict.fromkeys(key for config in known for key in config if not key.startswith(IGNORED_KEYS)):
        compared = known
        if key.startswith(OPTIONS):
            policy = key.removeprefix(OPTIONS).partition(".")[0]
            compared = [config for config in known if policy in (config.get("decode.policies") or [policy])]
        if len({json.dumps(config.get(key), default=str) for config in compared}) > 1:
            changed.append(key)
    if "target.dtype" in changed and "train.precision" in changed:
        changed.remove("train.precision")
    return changed


def compare(runs: Sequence[RunSummary], out: Path, width: int | None = None) -> str:
    """Writes compare.json, compare.md, compare.html and, if any run was validated, compare.png into `out`; returns the text to
    print, for a terminal of `width` columns, by default this one.
    """
    from train.report import style

    ranked = sorted(runs, key=lambda run: (run.score is None, -(run.score or 0.0), str(run.folder)))
    changed = changed_keys(ranked)
    summaries = [
        {
            "run": name,
            "folder": str(run.folder),
            "changed": {key: run.config.get(key) for key in changed} if run.config else {},
            **{figure: getattr(run, figure) for figure in DESCRIBED},
        }
        for name, run in zip(short_names([run.folder for run in ranked]), ranked, strict=True)
    ]
    content = {"schema": SCHEMA, "changed": changed, "runs": summaries, "warnings": _warnings(ranked)}
    out.mkdir(parents=True, exist_ok=True)
    plot = None
    with style.rc_context():
        if (figure := draw_comparison(content)) is not None:
            plot = f"{STEM}.png"
            style.save(figure, out / plot)
    write_text(out / f"{STEM}.json", json.dumps(content, indent=2, default=str) + "\n")
    write_report(page(content, plot), out / f"{STEM}.md")
    columns = width or shutil.get_terminal_size().columns
    return f"{table(content, columns)}\ncomparison: {out / f'{STEM}.md'}"


def _warnings(runs: Sequence[RunSummary]) -> list[str]:
    """Returns what makes the figures of the runs incomparable: different prompts."""
    known = [run.prompts for run in runs if run.prompts]
    if len({tuple(sorted(prompts)) for prompts in known}) < 2:
        return []
    counts = ", ".join(str(len(prompts)) for prompts in known)
    remedy = "measure them on the same ones with sage-validate, and compare RUN/checks/NAME"
    return [f"the runs were measured on different prompts ({counts}); {remedy}"]


def short_names(folders: Sequence[Path]) -> list[str]:
    """Returns the folders relative to their common parent."""
    if len(folders) == 1:
        return [folders[0].name]
    shared = Path(os.path.commonpath([folder.absolute() for folder in folders]))
    if shared in [folder.absolute() for folder in folders]:  # a run beside a check of it
        shared = shared.parent
    return [os.path.relpath(folder.absolute(), shared) for folder in folders]


def find_runs(patterns: Iterable[str]) -> list[Path]:
    """Returns the run folders of paths, glob patterns, and folders of runs; raises ConfigError for one without a run."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        is_glob = glob.has_magic(pattern) and not Path(pattern).exists()
        paths = sorted(Path(name) for name in glob.glob(pattern)) if is_glob else [Path(pattern).expanduser()]
        inside = [
            run
            for path in paths
            for run in ([path] if is_run(path) or is_check(path) else sorted(filter(is_run, path.glob("*"))))
        ]
        if not inside:
            raise ConfigError(
                f"{pattern}: no run folder found ({run_folder.CONFIG} is missing); give folders written by sage-train"
            )
        found |= dict.fromkeys(inside)
    return list(found)


def output_folder(folders: Sequence[Path]) -> Path:
    """Returns the folder that contains the runs; if they are in several, `comparison` in the folder that contains these.

    Relative to the working directory if all runs are given so.
    """
    folder, *others = dict.fromkeys(home_of(folder).absolute().parent for folder in folders)
    if others:
        folder = Path(os.path.commonpath([folder, *others])) / SEVERAL
    return folder if any(run.is_absolute() for run in folders) else Path(os.path.relpath(folder))


def run_command(arguments: Sequence[str]) -> str:
    """Implements `sage-validate --compare RUN ... [--out DIR]`; returns the text to print."""
    parser = new_parser("sage-validate --compare", description="Compares finished runs.")
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folders, patterns, folders of runs, or RUN/checks/NAME")
    parser.add_argument("--out", metavar="DIR", help="output folder; default: that of the runs")
    args = parser.parse_args(arguments)
    folders = find_runs(args.runs)
    return compare([read_run(folder) for folder in folders], Path(args.out) if args.out else output_folder(folders))


def score_of_run(config: Config) -> float | None:
    """Returns the best score among the validations of a run; None for a plan, which writes no run."""
    return None if config.launch.plan else read_run(Path(config.run.dir), config.score).score


def compare_jobs(jobs: Sequence[Job]) -> None:
    """Prints and writes the comparison of all jobs with a run folder, with their errors; nothing for a single job."""
    runs = []
    for job, folder in ((job, Path(job.dir)) for job in jobs if job.dir is not None):
        runs.append(read_run(folder) if is_run(folder) else RunSummary(folder=folder))
        runs[-1].error = f"exit {job.code}: {job.error}" if job.code else None
    if len(jobs) < 2 or not any(run.config for run in runs):
        return
    print(compare(runs, output_folder([run.folder for run in runs])))
