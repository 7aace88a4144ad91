"""Runs side by side: what was changed, how long each trained, what the decoder measured. Read from run folders alone.

Owns: reading runs, what is compared, which files are written. Does not own: the table (train.report.compare_table), the picture
(train.report.compare_plots).

`sage-validate --compare runs/a runs/b` calls it, and so does a sweep at its end.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints import run_folder
from checkpoints.run_folder import is_run
from sage.files import write_text
from train.config.run_checks import dotted_keys
from train.config.schema import Config, ConfigError, ScoreConfig
from train.config.sweep import Job
from train.report.compare_table import page, table

SCHEMA = 1
STEM = "compare"
# What tells runs apart without being a choice: names and folders, and the machine's share of the work.
UNTOLD = ("run.", "target.path", "target.revision", "data.cache_dir", "launch.", "debug")
FIGURES = ("tokens_per_target_pass", "mean_accepted_draft", "speedup", "tokens_per_s", "match", "total")


@dataclass(kw_only=True)
class RunFacts:
    """One run as far as its folder tells.

    Attributes:
        folder: the run folder.
        config: its dotted keys.
        steps: optimizer steps it has logged; `best_step` those of the validation with the best score.
        loss: the last one logged.
        score: of that validation; None without one, `error` then says why where it is known.
        policies: that validation's figures by policy.
        score_metric, score_policy: what the score is (checkpoints.run_folder.score).
    """

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    best_step: int | None = None
    loss: float | None = None
    score: float | None = None
    policies: dict[str, dict[str, float]] = field(default_factory=dict)
    error: str | None = None
    score_metric: str = run_folder.DEFAULT_METRIC
    score_policy: str | None = None


def read_run(folder: Path, chosen: ScoreConfig | None = None) -> RunFacts:
    """The facts of a run folder.

    Args:
        chosen: what the score is; None takes the run's own.

    Raises:
        ConfigError: `folder` is not a run.
        ValueError: its config.yaml or a report cannot be parsed.
    """
    if not is_run(folder):
        raise ConfigError(f"{folder}: is no run ({run_folder.CONFIG} is missing); give folders that sage-train made")
    config = run_folder.read_run_config(folder)
    metrics = run_folder.read_metrics(folder / run_folder.METRICS)
    metric, policy = (str(chosen.metric), chosen.policy) if chosen else run_folder.score_settings(config)
    facts = RunFacts(folder=folder, config=dotted_keys(config), score_metric=metric, score_policy=policy)
    if metrics:
        facts.steps, facts.loss = metrics[-1]["step"], metrics[-1].get("loss")
    for step, report in run_folder.read_reports(folder):
        score = run_folder.score(report, metric, policy)
        if facts.best_step is None or (score is not None and (facts.score is None or score > facts.score)):
            facts.best_step, facts.score = step, score
            facts.policies = {
                name: {figure: part[figure] for figure in FIGURES if figure in part}
                for name, part in report["policies"].items()
            }
    return facts


def changed_keys(runs: Sequence[RunFacts]) -> list[str]:
    """The dotted keys in which the runs differ, in the configuration's order; what follows from another key is left out."""
    known = [run.config for run in runs if run.config]
    keys = list(dict.fromkeys(key for config in known for key in config))
    differing = [key for key in keys if len({json.dumps(config.get(key), default=str) for config in known}) > 1]
    told = [key for key in differing if not key.startswith(UNTOLD)]
    if "target.dtype" in told and "train.precision" in told:
        told.remove("train.precision")
    return told


def compare(runs: Sequence[RunFacts], out: Path) -> dict[str, Any]:
    """Writes compare.json, compare.md and, where anything was measured, compare.png into `out`.

    Returns:
        the content of compare.json, with the table as text under "table" and the page's path under "path".
    """
    from train.report import style
    from train.report.compare_plots import draw_comparison

    ranked = sorted(runs, key=lambda run: (run.score is None, -(run.score or 0.0), str(run.folder)))
    content = describe(ranked)
    out.mkdir(parents=True, exist_ok=True)
    picture = None
    with style.look():
        made = draw_comparison(content)
        if made is not None:
            picture = f"{STEM}.png"
            style.save(made, out / picture)
    write_text(out / f"{STEM}.json", json.dumps(content, indent=2, default=str) + "\n")
    write_text(out / f"{STEM}.md", page(content, picture))
    return content | {"table": table(content), "path": str(out / f"{STEM}.md")}


def describe(runs: Sequence[RunFacts]) -> dict[str, Any]:
    """The comparison as plain data, runs in the order given."""
    changed = changed_keys(runs)
    names = labels([run.folder for run in runs])
    return {
        "schema": SCHEMA,
        "changed": changed,
        "runs": [
            {
                "run": name,
                "folder": str(run.folder),
                "changed": {key: run.config.get(key) for key in changed} if run.config else {},
                "steps": run.steps,
                "best_step": run.best_step,
                "loss": run.loss,
                "score": run.score,
                "scored_by": _scored_by(run),
                "policies": run.policies,
                "error": run.error,
            }
            for name, run in zip(names, runs, strict=True)
        ],
    }


def _scored_by(run: RunFacts) -> str | None:
    policy = run_folder.score_policy(run.policies, run.score_policy)
    return None if policy is None else f"{run.score_metric} of {policy}"


def labels(folders: Sequence[Path]) -> list[str]:
    """Folder names without what all of them share."""
    if len(folders) == 1:
        return [folders[0].name]
    shared = os.path.commonpath([folder.absolute() for folder in folders])
    return [os.path.relpath(folder.absolute(), shared) for folder in folders]


# -- as a command, and as a sweep's end ------------------------------------------------------------------------------------


def find_runs(words: Iterable[str]) -> list[Path]:
    """Run folders by path, by pattern, or all those in a folder that is none itself.

    Raises:
        ConfigError: a word that names no run.
    """
    found: dict[Path, None] = {}
    for word in words:
        is_pattern = glob.has_magic(word) and not Path(word).exists()
        paths = sorted(Path(name) for name in glob.glob(word)) if is_pattern else [Path(word).expanduser()]
        inside = [run for path in paths for run in _runs_in(path)]
        if not inside:
            raise ConfigError(f"{word}: no run there ({run_folder.CONFIG} is missing); give folders that sage-train made")
        found |= dict.fromkeys(inside)
    return list(found)


def _runs_in(path: Path) -> list[Path]:
    if is_run(path):
        return [path]
    return sorted(mark.parent for mark in path.glob(f"*/{run_folder.CONFIG}"))


def home_of(folders: Sequence[Path]) -> Path:
    """Where a comparison of these runs goes: the folder they lie in; one of its own where they lie in several."""
    parents = list(dict.fromkeys(folder.absolute().parent for folder in folders))
    if len(parents) == 1:
        return parents[0]
    shared = Path(os.path.commonpath(parents))
    return shared / "+".join("-".join(parent.relative_to(shared).parts) or shared.name for parent in parents)


def run_command(words: Sequence[str]) -> str:
    """`sage-validate --compare RUN ... [--out DIR]`; returns what to print.

    Raises:
        ConfigError: a word that names no run, or only one run.
    """
    parser = argparse.ArgumentParser(prog="sage-validate --compare", description="Compares finished runs, side by side.")
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folders, patterns, or folders of runs")
    parser.add_argument("--out", metavar="DIR", help="where to write; default: beside the runs")
    args = parser.parse_args(words)
    folders = find_runs(args.runs)
    made = compare([read_run(folder) for folder in folders], Path(args.out) if args.out else home_of(folders))
    return f"{made['table']}\ncomparison: {made['path']}"


class SweepComparison:
    """What sage-train adds to a sweep: the run's best score for sweepers, one comparison at the end."""

    def score(self, config: Config) -> float | None:
        """The best score among the run's validations; None for a plan, which leaves no run."""
        return None if config.launch.plan else read_run(Path(config.run.dir), config.score).score

    def compare(self, jobs: Sequence[Job]) -> None:
        """Prints and writes the comparison of all jobs that left a run; a lone job needs none."""
        runs = [facts for job in jobs if (facts := _facts_of(job)) is not None]
        if len(jobs) < 2 or not any(run.config for run in runs):
            return
        made = compare(runs, home_of([run.folder for run in runs]))
        print(f"{made['table']}\ncomparison: {made['path']}")


def _facts_of(job: Job) -> RunFacts | None:
    """A job's run, or that it failed; None if it did not even get to a folder's name."""
    if job.dir is None:
        return None
    folder = Path(job.dir)
    facts = read_run(folder) if is_run(folder) else RunFacts(folder=folder)
    if job.code:
        facts.error = f"exit {job.code}: {job.error}"
    return facts
