"""Section: ablations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from benchmarks.papers.figures import Json
from benchmarks.papers.measure.ablations import ASSUMED_COSTS, ASSUMED_LEVEL
from benchmarks.papers.page.headline import OURS
from benchmarks.papers.page.markdown import Expectation, Figures, cells, options_text, title_of
from benchmarks.papers.page.plots import bar_labels
from sage.io.tables import markdown_table
from train.report import style

TIMED, REPLAYED = ("tokens/pass", "nodes", "speedup", "95%"), ("tokens/pass", "tokens/s")
NOISE = 1.001  # of replayed speeds
ORACLE_SHARE = 0.75


def values(figures: Figures) -> dict[str, Any]:
    """Returns the placeholders of ablations.md."""
    study = figures["ablations"]
    rows = [
        [one["label"], *cells(one, *TIMED), *cells(one["replayed"], *REPLAYED), *cells(one, "identical")]
        for one in study["rows"]
    ]
    oracle = ["oracle, replayed", "", *cells(study["oracle"], "nodes"), "", "", *cells(study["oracle"], *REPLAYED), ""]
    head = ["variant", *TIMED, *(f"replayed {column}" for column in REPLAYED), "identical"]
    return {
        "target": title_of(study["target"]),
        "prompts": study["prompts"],
        "options": options_text(study["options"]) or "defaults",
        "table": markdown_table(head, [*rows, oracle]),
        "assumed_costs": ASSUMED_COSTS,
        "assumed_level": f"{ASSUMED_LEVEL:.0%}",
    }


def expectations(figures: Figures) -> list[Expectation]:
    """Every part of `cost_aware` and of `sage` contributes; `cost_aware` is close to the oracle."""
    rows = {row["label"]: row for row in figures["ablations"]["rows"]}
    parts = [_contributes(rows, name, label) for name in (OURS, "sage") for label in rows if label.startswith(f"{name}, ")]
    share = rows[OURS]["replayed"]["tokens_per_s"] / figures["ablations"]["oracle"]["tokens_per_s"]
    claim = f"Ours: `{OURS}` within {1 - ORACLE_SHARE:.0%} of the oracle's speed, replayed"
    return [*parts, Expectation(claim, share >= ORACLE_SHARE, f"{share:.0%} of it")]


def _contributes(rows: Mapping[str, Json], name: str, label: str) -> Expectation:
    """The replay decides, because replays share every draft; the timed difference is reported with it."""
    full, variant = (rows[one]["replayed"]["tokens_per_s"] for one in (name, label))
    timed = rows[label]["speedup"] / rows[name]["speedup"] - 1
    claim = f"{'Ours' if name == OURS else 'SAGE'}: `{name}` at least as fast as with *{label.removeprefix(f'{name}, ')}*"
    return Expectation(claim, variant <= full * NOISE, f"variant {variant / full - 1:+.1%} replayed, {timed:+.1%} timed")


def draw_ablations(figures: Figures) -> Figure:
    """Draws the replayed tokens per second of every variant, the oracle last."""
    study = figures["ablations"]
    speeds = {row["label"]: row["replayed"]["tokens_per_s"] for row in study["rows"]}
    speeds["oracle"] = study["oracle"]["tokens_per_s"]
    figure = style.figure(1.2 + 0.31 * len(speeds), "Ablations", "tokens per second, replayed on the same drafts")
    axes = figure.subplots()
    for place, (label, speed) in enumerate(speeds.items()):
        color = style.BAND if label == "oracle" else style.policy_color(label.split(",")[0])
        axes.barh(place, speed, height=0.62, color=color)
        axes.text(speed, place, f" {speed:.0f}", va="center", fontsize=9)
    axes.margins(x=0.1)
    bar_labels(axes, list(speeds))
    style.despine(axes, "x")
    return figure


PLOTS = {"ablations.png": draw_ablations}
