"""The table that a person reads in the terminal: plain text, aligned, no dependency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HEADER = (
    "policy",
    "tokens/pass",
    "accepted",
    "tokens/s",
    "speedup",
    "95% interval",
    "end to end",
    "identical",
    "to HF",
)


def format_table(report: Mapping[str, Any]) -> str:
    """Policies first, then the baselines; `*` marks the one that speedups are measured against."""
    policies, baselines = report["policies"], report["baselines"]
    rows = [policy_row(name, section, report) for name, section in policies.items()]
    others = [_baseline_row(name, section, report) for name, section in baselines.items() if name not in policies]
    lines = _aligned([HEADER, *rows, *others])
    rule = "-" * max(len(line) for line in lines)
    body = [lines[0], rule, *lines[1 : 1 + len(rows)]]
    below = [*lines[1 + len(rows) :], _footnote(report)]
    below += [f"{name} left out: {reason}" for name, reason in report["failed_baselines"].items()]
    return "\n".join([*body, rule, *below])


def policy_row(name: str, section: Mapping[str, Any], report: Mapping[str, Any]) -> tuple[str, ...]:
    """The cells of one policy, as text."""
    return (
        _marked(name, report),
        f"{section['tokens_per_target_pass']:.2f}",
        f"{section['mean_accepted_draft']:.2f}",
        f"{section['tokens_per_s']:.1f}",
        f"{section['speedup']:.2f}x",
        interval(section.get("speedup_ci")),
        f"{section['speedup_end_to_end']:.2f}x",
        f"{section['match']}/{section['total']}",
        f"{section['match_hf']}/{section['total']}" if "match_hf" in section else "-",
    )


def interval(bounds: Sequence[float] | None) -> str:
    """`1.94-2.31`, or `-` where there is none: for a single prompt, and for the baseline against itself."""
    return "-" if bounds is None or bounds[0] == bounds[1] else f"{bounds[0]:.2f}-{bounds[1]:.2f}"


def _baseline_row(name: str, section: Mapping[str, Any], report: Mapping[str, Any]) -> tuple[str, ...]:
    same = f"{section['match']}/{section['total']}" if "match" in section else "-"
    speed = (f"{section['tokens_per_s']:.1f}", f"{section['speedup']:.2f}x", interval(section.get("speedup_ci")))
    return (_marked(name, report), "", "", *speed, f"{section['speedup_end_to_end']:.2f}x", same, "")


def _marked(name: str, report: Mapping[str, Any]) -> str:
    return f"{name} *" if name == report["fastest_baseline"] else name


def _footnote(report: Mapping[str, Any]) -> str:
    prompts, runs = _counted(report["prompts"], "prompt"), _counted(report["repeats"], "run")
    return (
        f"* fastest autoregressive baseline. {prompts}, {runs} each, "
        f"{report['dtype']} on {report['device']}, temperature {report['temperature']:g}."
    )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
