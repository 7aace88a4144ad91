"""A run in pictures: loss, agreement, tokens per target pass as estimated and as measured, learning rate, gradient, speed.

Everything is read from the run folder, so it can be drawn again at any time: `python -m train.report.run_page runs/NAME`.

Owns: `report.md` and `curves.png` of a run folder. Does not own: validations (train.report draws those).
"""

from __future__ import annotations

import argparse
import bisect
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checkpoints import run_folder
from checkpoints.run_folder import METRICS, read_metrics, read_reports
from sage.cli import run as run_command
from sage.files import write_text
from sage.trees.names import AUTOREGRESSIVE, CHAIN
from train.config.schema import ConfigError
from train.report import style
from train.report.compare import read_run
from train.report.run_plots import draw_curves
from train.report.warnings import falls_short

logger = logging.getLogger(__name__)
PAGE, PICTURE = "report.md", "curves.png"
ESTIMATE = "estimated_tokens_per_pass"


def write_run_report(folder: Path) -> Path:
    """Draws a run's curves and writes its page.

    Returns:
        the page's path.

    Raises:
        ConfigError: no run there, or one that has not logged a step.
    """
    if not run_folder.is_run(folder):
        raise ConfigError(f"{folder}: is no run ({run_folder.CONFIG} is missing); give a folder that sage-train made")
    lines = read_metrics(folder / METRICS)
    if not lines:
        raise ConfigError(f"{folder}: {METRICS} holds no step yet; train.log_every says how often one is logged")
    measured = measured_against_estimate(lines, read_reports(folder))
    with style.look():
        style.save(draw_curves(folder.name, lines, measured), folder / PICTURE)
    write_text(folder / PAGE, page(folder, lines, measured))
    if measured and (doubt := _doubt(measured[-1])):
        logger.warning("%s", doubt)
    return folder / PAGE


def measured_against_estimate(
    lines: Sequence[dict[str, Any]], reports: Sequence[tuple[int, dict[str, Any]]]
) -> list[dict[str, Any]]:
    """One row per validation: its step, the estimate last logged before it, and every drafting policy's figures.

    `ratio` is what the policy `chain` was measured at, over the estimate, which simulates such chains.
    """
    steps = [line["step"] for line in lines]
    rows = []
    for step, report in reports:
        place = bisect.bisect_right(steps, step) - 1
        estimate = lines[place].get(ESTIMATE) if place >= 0 else None
        policies = {name: part for name, part in report["policies"].items() if name != AUTOREGRESSIVE}
        chain = policies.get(CHAIN, {}).get("tokens_per_target_pass")
        ratio = chain / estimate if chain is not None and estimate else None
        rows.append({"step": step, "estimate": estimate, "ratio": ratio, "policies": policies})
    return rows


def page(folder: Path, lines: Sequence[dict[str, Any]], measured: Sequence[dict[str, Any]]) -> str:
    """report.md of a run."""
    last, facts = lines[-1], read_run(folder)
    parts = [f"# Run `{folder.name}`", _headline(facts, last), f"![Curves of the run]({PICTURE})"]
    if measured:
        parts += ["## Estimated and measured", _table(measured), _note(facts), *filter(None, map(_doubt, measured[-1:]))]
    parts += ["## Files", _files(folder)]
    return "\n\n".join(parts) + "\n"


def _headline(facts: Any, last: dict[str, Any]) -> str:
    minutes = last["time_s"] / 60
    text = f"{last['step']:,} steps, {last['tokens']:,} tokens in {minutes:.1f} minutes of training; loss {last['loss']:.4f}."
    if facts.score is None:
        return text
    named = f"{facts.score_metric} of `{run_folder.score_policy(facts.policies, facts.score_policy)}`"
    is_kept = run_folder.draft_step(facts.folder / run_folder.BEST_DRAFT) == facts.best_step
    return f"{text} Best {named}: **{facts.score:.2f}**, after step {facts.best_step:,}{' (`draft_best/`)' if is_kept else ''}."


def _table(measured: Sequence[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in measured for name in row["policies"]))
    head = ["step", "estimate", "measured / estimate", *(f"`{name}`" for name in names), "speedup", "identical"]
    rows = [
        [
            f"{row['step']:,}",
            _number(row["estimate"]),
            _number(row["ratio"]),
            *(_number(row["policies"].get(name, {}).get("tokens_per_target_pass")) for name in names),
            f"{max((part['speedup'] for part in row['policies'].values()), default=0.0):.2f}x",
            f"{sum(p['match'] for p in row['policies'].values())}/{sum(p['total'] for p in row['policies'].values())}",
        ]
        for row in measured
    ]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["--:"] * len(head), *rows])


def _doubt(row: dict[str, Any]) -> str | None:
    chain = row["policies"].get(CHAIN, {})
    return falls_short(row["step"], chain.get("tokens_per_target_pass"), row["estimate"])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _note(facts: Any) -> str:
    from sage.trees.chain import Chain

    depth = facts.config.get("decode.options.chain.depth", Chain.depth)
    return (
        f"Tokens per target pass. The estimate simulates chains of {depth} drafted tokens on the training batches, from where "
        "draft and target agree; it compares with the measured `chain`. The speedup is the best policy's, decode only."
    )


def _files(folder: Path) -> str:
    known = {
        run_folder.DRAFT: "the draft after the last validation",
        run_folder.BEST_DRAFT: "the draft with the best score",
        METRICS: "one line per log step",
        run_folder.CONFIG: "the resolved configuration",
        run_folder.PROVENANCE: "revision, versions, command line, data",
        "profile": "profiler traces",
    }
    lines = [f"* [{name}]({name}): {text}" for name, text in known.items() if (folder / name).exists()]
    reports = [f"* [validation at step {step:,}](validation/step_{step:08d}/report.md)" for step, _ in read_reports(folder)]
    return "\n".join([*lines, *reports])


def main() -> None:
    """Entry point of `python -m train.report.run_page`."""
    parser = argparse.ArgumentParser(prog="python -m train.report.run_page", description="Draws the curves of a run again.")
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folders")
    for folder in parser.parse_args().runs:
        print(f"written: {write_run_report(Path(folder))}")


if __name__ == "__main__":
    sys.exit(run_command(main))
