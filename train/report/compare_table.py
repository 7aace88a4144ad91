"""A comparison as a text table and as the page compare.md. `content` is that of compare.json (train.report.compare).

Results come first, then the settings that most likely explain them; the page lists the other ones below. Where the table is too
wide for the terminal, every run is a list.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from sage.io.tables import RULE, markdown_table, text_table
from sage.trees import AUTOREGRESSIVE

BEST_MARK = "*"
ABSENT = "-"  # a run without the key or figure
MAX_KEYS = 8  # settings in the table
DECISIVE = (  # prefixes of settings, the most likely reasons of a difference first; all others follow
    *("draft.", "objective.", "optim.", "data.name", "data.answers", "data.num_examples", "train.max_steps", "train.epochs"),
    *("train.global_batch_size", "target.", "seed", "train.", "decode.", "score."),
)


def cells(content: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Returns head and rows: run, steps, loss, tokens per pass and speedup of each policy, identical outputs, decisive keys."""
    runs, decisive = content["runs"], split_keys(content["changed"])[0]
    policies = drafting_policies(content)
    head = ["run", "steps", "loss", *(f"{name} tok/pass" for name in policies)]
    head += [*(f"{name} speedup" for name in policies), "identical", *decisive]
    rows = []
    for place, run in enumerate(runs):
        mark = f" {BEST_MARK}" if place == 0 and run["score"] is not None and len(runs) > 1 else ""
        row = [run["run"] + mark]
        row += [f"{run['best_step']}/{run['steps']}" if run["best_step"] is not None else str(run["steps"])]
        row += [ABSENT if run["loss"] is None else f"{run['loss']:.4f}"]
        row += [_figure(run, name, "tokens_per_target_pass", "{:.2f}") for name in policies]
        row += [_figure(run, name, "speedup", "{:.2f}x") for name in policies]
        rows.append([*row, _identical(run), *(_value(run["changed"].get(key)) for key in decisive)])
    return head, rows


def split_keys(changed: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the keys for the table, the most decisive first, and all others."""

    def rank(key: str) -> int:
        return next((place for place, prefix in enumerate(DECISIVE) if key.startswith(prefix)), len(DECISIVE))

    ordered = sorted(changed, key=rank)
    return ordered[:MAX_KEYS], ordered[MAX_KEYS:]


def drafting_policies(content: dict[str, Any]) -> list[str]:
    """Returns every drafting policy that was measured in any run."""
    names = dict.fromkeys(name for run in content["runs"] for name in run["policies"])
    return [name for name in names if name != AUTOREGRESSIVE]


def _value(value: Any) -> str:
    if value is None:
        return ABSENT
    return f"{value:g}" if isinstance(value, float) else " ".join(str(value).split())


def _figure(run: dict[str, Any], policy: str, figure: str, form: str) -> str:
    value = run["policies"].get(policy, {}).get(figure)
    return ABSENT if value is None else form.format(value)


def _identical(run: dict[str, Any]) -> str:
    """Returns identical outputs over all drafting policies, or the reason why nothing was measured."""
    parts = [part for name, part in run["policies"].items() if name != AUTOREGRESSIVE]
    if not parts:
        return run["error"] or "not validated"
    return f"{sum(int(part['match']) for part in parts)}/{sum(int(part['total']) for part in parts)}"


def table(content: dict[str, Any], width: int) -> str:
    """Returns the comparison for a terminal of `width` columns."""
    head, rows = cells(content)
    found = text_table(head, [*rows, RULE], "<")
    if max(map(len, found.splitlines())) > width:
        found = _listed(head, rows, width)
    others = len(split_keys(content["changed"])[1])
    lines = notes(content) + [f"{others} more setting(s) differ; the page lists them."] * bool(others)
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
    """Returns the content of compare.md."""
    head, rows = cells(content)
    explained = [f"\\{line}" if line.startswith(BEST_MARK) else line for line in notes(content)]  # else it would be a list
    parts = [f"# Comparison of {len(rows)} runs", markdown_table(head, rows, "<"), *explained]
    if others := split_keys(content["changed"])[1]:
        values = [[f"`{key}`", *(_value(run["changed"].get(key)) for run in content["runs"])] for key in others]
        parts.append("## Other differences\n\n" + markdown_table(["key", *(row[0] for row in rows)], values, "<"))
    if plot:
        parts.append(f"![Tokens per target pass and speedup of every run]({plot})")
    if any(part["error"] for part in content["runs"]):
        parts.append("\n".join(f"* `{run['run']}`: {run['error']}" for run in content["runs"] if run["error"]))
    return "\n\n".join(parts) + "\n"
