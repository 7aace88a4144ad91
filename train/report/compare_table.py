"""A comparison as a table: for a terminal, and as the page `compare.md`.

`content` is what `train.report.compare.describe` answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sage.trees.names import AUTOREGRESSIVE

BEST_MARK = "*"


def cells(content: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows: a run, what was changed, steps, then tokens per pass and speedup of each drafting policy, identical."""
    runs, changed = content["runs"], content["changed"]
    policies = drafting_policies(content)
    short = _short(changed)
    head = ["run", *short, "steps", "loss", *(f"{name} tok/pass" for name in policies)]
    head += [*(f"{name} speedup" for name in policies), "identical"]
    rows = []
    for place, run in enumerate(runs):
        mark = f" {BEST_MARK}" if place == 0 and run["score"] is not None and len(runs) > 1 else ""
        row = [run["run"] + mark, *(_value(run["changed"].get(key, "")) for key in changed)]
        row += [f"{run['best_step']}/{run['steps']}" if run["best_step"] is not None else str(run["steps"])]
        row += ["-" if run["loss"] is None else f"{run['loss']:.4f}"]
        row += [_figure(run, name, "tokens_per_target_pass", "{:.2f}") for name in policies]
        row += [_figure(run, name, "speedup", "{:.2f}x") for name in policies]
        rows.append([*row, _identical(run)])
    return head, rows


def drafting_policies(content: dict[str, Any]) -> list[str]:
    """Every policy that drafts and was measured in any run."""
    names = dict.fromkeys(name for run in content["runs"] for name in run["policies"])
    return [name for name in names if name != AUTOREGRESSIVE]


def _short(keys: Sequence[str]) -> list[str]:
    """The last part of each dotted key, as long as they differ in it."""
    last = [key.rpartition(".")[2] for key in keys]
    return [name if last.count(name) == 1 else key for name, key in zip(last, keys, strict=True)]


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _figure(run: dict[str, Any], policy: str, figure: str, form: str) -> str:
    value = run["policies"].get(policy, {}).get(figure)
    return "-" if value is None else form.format(value)


def _identical(run: dict[str, Any]) -> str:
    """Outputs that are the target's own, over all drafting policies; or why nothing was measured."""
    parts = [part for name, part in run["policies"].items() if name != AUTOREGRESSIVE]
    if not parts:
        return run["error"] or "not validated"
    return f"{sum(int(part['match']) for part in parts)}/{sum(int(part['total']) for part in parts)}"


def table(content: dict[str, Any]) -> str:
    """For a terminal."""
    head, rows = cells(content)
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]]
    rule = "-" * max(len(line) for line in lines)
    return "\n".join([lines[0], rule, *lines[1:], rule, legend(content)])


def legend(content: dict[str, Any]) -> str:
    """What the marks mean."""
    scored = next((run["scored_by"] for run in content["runs"] if run["scored_by"]), None)
    by = f"{BEST_MARK} best by {scored}. " if scored else ""
    return f"{by}steps: of the best validation / trained; identical: outputs that are the target's own."


def page(content: dict[str, Any], picture: str | None) -> str:
    """compare.md."""
    head, rows = cells(content)
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in [head, ["---"] * len(head), *rows]]
    parts = [f"# {len(rows)} runs compared", "\n".join(lines), legend(content)]
    if picture:
        parts.append(f"![Tokens per target pass and speedup of every run]({picture})")
    if any(part["error"] for part in content["runs"]):
        parts.append("\n".join(f"* `{run['run']}`: {run['error']}" for run in content["runs"] if run["error"]))
    return "\n\n".join(parts) + "\n"
