"""A comparison as a text table and as the page compare.md. `content` is that of compare.json (train.report.compare)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sage.bench.tables import RULE, markdown_table, text_table
from sage.trees.names import AUTOREGRESSIVE

BEST_MARK = "*"


def cells(content: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Returns head and rows: run, changed keys, steps, loss, tokens per pass and speedup of each policy, identical outputs."""
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
    """Returns every drafting policy that was measured in any run."""
    names = dict.fromkeys(name for run in content["runs"] for name in run["policies"])
    return [name for name in names if name != AUTOREGRESSIVE]


def _short(keys: Sequence[str]) -> list[str]:
    """Returns the last part of each dotted key, or the complete key if the last part is ambiguous."""
    last = [key.rpartition(".")[2] for key in keys]
    return [name if last.count(name) == 1 else key for name, key in zip(last, keys, strict=True)]


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _figure(run: dict[str, Any], policy: str, figure: str, form: str) -> str:
    value = run["policies"].get(policy, {}).get(figure)
    return "-" if value is None else form.format(value)


def _identical(run: dict[str, Any]) -> str:
    """Returns identical outputs over all drafting policies, or the reason why nothing was measured."""
    parts = [part for name, part in run["policies"].items() if name != AUTOREGRESSIVE]
    if not parts:
        return run["error"] or "not validated"
    return f"{sum(int(part['match']) for part in parts)}/{sum(int(part['total']) for part in parts)}"


def table(content: dict[str, Any]) -> str:
    """Returns the comparison for a terminal."""
    head, rows = cells(content)
    return f"{text_table(head, [*rows, RULE], '<')}\n{legend(content)}"


def legend(content: dict[str, Any]) -> str:
    """Returns the explanation of marks and columns."""
    scored = next((run["scored_by"] for run in content["runs"] if run["scored_by"]), None)
    by = f"{BEST_MARK} best by {scored}. " if scored else ""
    return f"{by}steps: best validation / trained; identical: outputs identical to the target's."


def page(content: dict[str, Any], plot: str | None) -> str:
    """Returns the content of compare.md."""
    head, rows = cells(content)
    parts = [f"# Comparison of {len(rows)} runs", markdown_table(head, rows, "<"), legend(content)]
    if plot:
        parts.append(f"![Tokens per target pass and speedup of every run]({plot})")
    if any(part["error"] for part in content["runs"]):
        parts.append("\n".join(f"* `{run['run']}`: {run['error']}" for run in content["runs"] if run["error"]))
    return "\n\n".join(parts) + "\n"
