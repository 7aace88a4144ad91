"""A comparison as a text table, as the page compare.md and as a plot. `content` is that of compare.json (train.report.compare).

Results come first, then the settings that most likely explain them; the page lists the other ones below. Where the table is too
wide for the terminal, every run is a list.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sage.io.tables import RULE, markdown_table, text_table
from sage.trees import AUTOREGRESSIVE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
        rows.append([*row, *(_value(run["changed"].get(key)) for key in decisive)])
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


PANELS = (("tokens_per_target_pass", "tokens per target pass"), ("speedup", "speedup, decoding only"))  # of a comparison
MAX_ROWS = 40
LABEL_CHARACTERS = 34


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
    panels[0].set_yticks(range(len(runs)), [label_of(run, content["changed"]) for run in runs])
    panels[0].set_ylim(len(runs) - 0.5, -0.5)
    style.legend_below(made, 5, handletextpad=0.2)
    return made


def label_of(run: dict[str, Any], changed: list[str]) -> str:
    """Returns `lr 0.0003, feature_weight 2`, or the end of the folder's name if nothing differs or the text is too long."""
    values = {key.rpartition(".")[2]: run["changed"][key] for key in changed if key in run["changed"]}
    parts = [f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()]
    name, text = run["run"], ", ".join(parts)
    if parts and len(text) <= LABEL_CHARACTERS:
        return text
    return name if len(name) <= LABEL_CHARACTERS else "..." + name[3 - LABEL_CHARACTERS :]
