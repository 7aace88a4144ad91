"""Comparison of finished runs: changed configuration keys, length of training, validation results.

Used by `sage-validate --compare runs/a runs/b` and at the end of a sweep. `content` is that of compare.json. In the table,
results come first, then the first settings that differ, and the page lists the others below; where the table is too wide for
the terminal, every run is a list.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints import run_folder
from checkpoints.run_folder import is_check, is_run
from sage.bench.report_table import measured_with
from sage.commands.cli import new_parser
from sage.io.files import write_text
from sage.io.tables import RULE, markdown_table, text_table
from sage.trees import AUTOREGRESSIVE
from train.config.hydra_app import Job
from train.config.schema import Config, ConfigError, ScoreConfig
from train.report.web import write_report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA = 1
STEM = "compare"
SEVERAL = "comparison"  # folder of a comparison of runs in several folders
# Prefixes of keys that differ between runs without affecting the result: names, folders, the machine.
IGNORED_KEYS = ("run.", "target.path", "target.revision", "data.cache_dir", "launch.", "debug")
OPTIONS = "decode.options."  # of policies: compared among the runs that measure the policy
DESCRIBED = ("steps", "best_step", "loss", "score", "scored_by", "policies", "measured_with", "error")
FIGURES = ("tokens_per_target_pass", "mean_accepted_draft", "speedup", "speedup_ci", "tokens_per_s", "match", "total")
BEST_MARK = "*"
ABSENT = "-"  # a run without the key or figure
MAX_KEYS = 8  # settings in the table, in the order of the configuration
PANELS = (("tokens_per_target_pass", "tokens per target pass"), ("speedup", "speedup, decoding only"))  # of a comparison
MAX_ROWS = 40
LABEL_CHARACTERS = 34


@dataclass(kw_only=True)
class RunSummary:
    """One run, read from its folder, or a later check of its draft; figures are those of the validation with the best score."""

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)  # the configuration by dotted key
    steps: int = 0  # the last one logged
    best_step: int | None = None
    loss: float | None = None  # the last one logged
    score: float | None = None
    scored_by: str | None = None  # `METRIC of POLICY`
    policies: dict[str, dict[str, float]] = field(default_factory=dict)
    measured_with: str = ""  # settings
    error: str | None = None  # the reason of a failure, if known
    prompts: list[str] = field(default_factory=list)  # names; empty if the report does not name them


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
    asked = {"metric": str(chosen.metric), "policy": chosen.policy} if chosen else config.get("score") or {}
    metric, policy = asked.get("metric") or run_folder.DEFAULT_METRIC, asked.get("policy")
    summary = RunSummary(folder=folder, config=run_folder.dotted_keys(config))
    if metrics := run_folder.read_metrics(home / run_folder.METRICS):
        summary.steps, summary.loss = metrics[-1]["step"], metrics[-1].get("loss")
    reports = run_folder.read_reports(folder)
    if is_check(folder):
        report = run_folder.read_report(folder / run_folder.REPORT)
        reports = [(int(report.get("step", 0)), report)]
    scored = [(step, report, run_folder.score(report, metric, policy)) for step, report in reports]
    if scored:
        summary.best_step, best, summary.score = max(scored, key=lambda item: (item[2] is not None, item[2] or 0.0, -item[0]))
        policies = best["policies"]
        summary.policies = {name: {key: part[key] for key in FIGURES if key in part} for name, part in policies.items()}
        summary.measured_with = measured_with(best)
        summary.prompts = [str(row["name"]) for row in next(iter(policies.values())).get("per_prompt", [])]
        if (name := run_folder.score_policy(policies, policy)) is not None:
            summary.scored_by = f"{metric} of {name}"
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
    content = {"schema": SCHEMA, "changed": changed, "runs": summaries, "warnings": []}
    prompts = [run.prompts for run in ranked if run.prompts]
    if len({tuple(sorted(names)) for names in prompts}) > 1:
        counts = ", ".join(str(len(names)) for names in prompts)
        remedy = "measure them on the same ones with sage-validate, and compare RUN/checks/NAME"
        content["warnings"] = [f"the runs were measured on different prompts ({counts}); {remedy}"]
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


def short_names(folders: Sequence[Path]) -> list[str]:
    if len(folders) == 1:
        return [folders[0].name]
    shared = Path(os.path.commonpath([folder.absolute() for folder in folders]))
    if shared in [folder.absolute() for folder in folders]:  # a run beside a check of it
        shared = shared.parent
    return [os.path.relpath(folder.absolute(), shared) for folder in folders]


def cells(content: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Returns head and rows: run, steps, loss, tokens per pass and speedup of each policy, identical outputs, settings."""
    runs, shown = content["runs"], content["changed"][:MAX_KEYS]
    policies = drafting_policies(content)
    head = ["run", "steps", "loss", *(f"{name} tok/pass" for name in policies)]
    head += [*(f"{name} speedup" for name in policies), "identical", *shown]

    def figures(run: dict[str, Any], figure: str, form: str) -> list[str]:
        values = (run["policies"].get(name, {}).get(figure) for name in policies)
        return [ABSENT if value is None else form.format(value) for value in values]

    rows = []
    for place, run in enumerate(runs):
        mark = f" {BEST_MARK}" if place == 0 and run["score"] is not None and len(runs) > 1 else ""
        row = [run["run"] + mark]
        row += [f"{run['best_step']}/{run['steps']}" if run["best_step"] is not None else str(run["steps"])]
        row += [ABSENT if run["loss"] is None else f"{run['loss']:.4f}"]
        row += [*figures(run, "tokens_per_target_pass", "{:.2f}"), *figures(run, "speedup", "{:.2f}x")]
        drafting = [part for name, part in run["policies"].items() if name != AUTOREGRESSIVE]
        same = "/".join(str(sum(int(part[key]) for part in drafting)) for key in ("match", "total"))
        row += [same if drafting else run["error"] or "not validated"]
        rows.append([*row, *(_value(run["changed"].get(key)) for key in shown)])
    return head, rows


def drafting_policies(content: dict[str, Any]) -> list[str]:
    names = dict.fromkeys(name for run in content["runs"] for name in run["policies"])
    return [name for name in names if name != AUTOREGRESSIVE]


def _value(value: Any) -> str:
    if value is None:
        return ABSENT
    return f"{value:g}" if isinstance(value, float) else " ".join(str(value).split())


def table(content: dict[str, Any], width: int) -> str:
    """Returns the comparison for a terminal of `width` columns."""
    head, rows = cells(content)
    found = text_table(head, [*rows, RULE], "<")
    if max(map(len, found.splitlines())) > width:
        found = _listed(head, rows, width)
    lines = notes(content)
    if (others := len(content["changed"]) - MAX_KEYS) > 0:
        lines.append(f"{others} more setting(s) differ; the page lists them.")
    return "\n".join([found, *(textwrap.fill(line, width, subsequent_indent="  ", break_on_hyphens=False) for line in lines)])


def _listed(head: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """Returns every run below its name, a line per figure and setting, without those that it lacks."""
    lines = []
    for name, *values in rows:
        lines += ["", textwrap.fill(name, width, break_on_hyphens=False)]
        for key, value in zip(head[1:], values, strict=True):
            if value != ABSENT:
                looks: dict[str, Any] = {"initial_indent": "  ", "subsequent_indent": "    ", "break_on_hyphens": False}
                lines.append(textwrap.fill(f"{key}: {value}", width, **looks))
    return "\n".join(lines[1:])


def notes(content: dict[str, Any]) -> list[str]:
    """Returns the explanation of marks and columns, and the settings of the measurements: once if equal, else per run."""
    scored = next((run["scored_by"] for run in content["runs"] if run["scored_by"]), None)
    by = f"{BEST_MARK} best by {scored}. " if scored else ""
    lines = [f"{by}steps: best validation / trained; identical: outputs identical to the target's."]
    lines += fastest_line(content) + [f"warning: {text}" for text in content.get("warnings", [])]
    return lines + measured_lines({run["run"]: run["measured_with"] for run in content["runs"]})


def fastest_line(content: dict[str, Any]) -> list[str]:
    """Returns a line with the highest speedup of all runs if it is not that of the marked run's scored policy."""
    found = [
        (float(part["speedup"]), run, name)
        for run in content["runs"]
        for name, part in run["policies"].items()
        if name != AUTOREGRESSIVE and part.get("speedup") is not None
    ]
    if not found:
        return []
    speedup, run, policy = max(found, key=lambda item: item[0])
    if run is content["runs"][0] and (run["scored_by"] or "").endswith(f" of {policy}"):
        return []
    remedy = f"score.metric=speedup score.policy={policy} chooses by it"
    return [f"Fastest: {run['run']}, {speedup:.2f}x with {policy}; {remedy}."]


def measured_lines(settings: Mapping[str, str]) -> list[str]:
    """Returns the settings of measurements, which are empty where unknown: once if they are equal, else each with its label."""
    known = {label: text for label, text in settings.items() if text}
    if len(set(known.values())) == 1:
        return [f"Measured with {next(iter(known.values()))}."]
    return [f"{label}: measured with {text}" for label, text in known.items()]


def page(content: dict[str, Any], plot: str | None) -> str:
    head, rows = cells(content)
    explained = [f"\\{line}" if line.startswith(BEST_MARK) else line for line in notes(content)]  # else it would be a list
    parts = [f"# Comparison of {len(rows)} runs", markdown_table(head, rows, "<"), *explained]
    if others := content["changed"][MAX_KEYS:]:
        values = [[f"`{key}`", *(_value(run["changed"].get(key)) for run in content["runs"])] for key in others]
        parts.append("## Other differences\n\n" + markdown_table(["key", *(row[0] for row in rows)], values, "<"))
    if plot:
        parts.append(f"![Tokens per target pass and speedup of every run]({plot})")
    if any(part["error"] for part in content["runs"]):
        parts.append("\n".join(f"* `{run['run']}`: {run['error']}" for run in content["runs"] if run["error"]))
    return "\n\n".join(parts) + "\n"


def draw_comparison(content: dict[str, Any]) -> Figure | None:
    """Draws a row per run, the best on top, with a dot per policy; None if no drafting policy was measured."""
    from train.report import style  # matplotlib would slow down the start of sage-train

    runs = [run for run in content["runs"] if run["policies"]][:MAX_ROWS]
    policies = drafting_policies(content)
    if not runs or not policies:
        return None
    left_out = len(content["runs"]) - len(runs)
    subtitle = "the best run on top; bars: 95% interval" + (f"; {left_out} not shown" if left_out else "")
    made = style.figure(1.55 + (0.24 + 0.1 * len(policies)) * len(runs), "Comparison of runs", subtitle)
    panels = made.subplots(1, len(PANELS), sharey=True)
    for axes, (figure, title) in zip(panels, PANELS, strict=True):
        for order, name in enumerate(policies):
            color, offset = style.policy_color(name, policies), style.dodged(order, len(policies), 0.56)
            known = {place + offset: run["policies"][name] for place, run in enumerate(runs) if name in run["policies"]}
            for place, part in known.items():
                if bounds := part.get(f"{figure}_ci"):
                    axes.plot(bounds, [place, place], color=color, linewidth=1.3, zorder=1)
            axes.scatter([part[figure] for part in known.values()], list(known), s=30, color=color, label=name, zorder=2)
        for place in range(1, len(runs)):
            axes.axhline(place - 0.5, color=style.GRID, linewidth=0.9, zorder=0)
        style.despine(axes, "x")
        axes.set_xlabel(title)
    panels[1].axvline(1.0, **style.BASELINE)
    panels[0].set_yticks(range(len(runs)), [run["run"][-LABEL_CHARACTERS:] for run in runs])
    panels[0].set_ylim(len(runs) - 0.5, -0.5)
    style.legend_below(made, 5, handletextpad=0.2)
    return made


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
