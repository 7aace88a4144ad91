"""Section: entropy and acceptance."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from benchmarks.papers.figures import Json
from benchmarks.papers.page.markdown import Expectation, Figures, by_target, fill, join, title_of
from benchmarks.papers.page.plots import integer_axis, legend_below, line, target_panels
from sage.io.tables import markdown_table
from train.report import style

PREDICTORS = {"alpha": "#2f6fa7", "draft probability": style.FAINT, "calibrated": "#b23a6b"}
MIN_NODES = 10  # bins with fewer are not drawn


def values(figures: Figures) -> dict[str, str]:
    """Returns the placeholders of calibration.md."""
    return {"targets": join(*(_target(target, part) for target, part in by_target(figures, "calibration").items()))}


def _target(target: str, figures: Json) -> str:
    predictors, lemma = figures["predictors"], figures["lemma"]
    predictor_head = [f"{predictors['nodes']} nodes, {predictors['accepted']:.0%} accepted", "error", "AUC"]
    predictor_rows = [[f"`{name}`", f"{one['error']:.3f}", f"{one['auc']:.3f}"] for name, one in predictors["by_name"].items()]
    depth_head = ["depth", "candidates", "error of the draft probability", "error after calibration"]
    depth_rows = [
        [str(row["depth"]), str(row["labels"]), f"{row['before']:.3f}", f"{row['after']:.3f}"] for row in figures["by_depth"]
    ]
    return fill(
        "calibration_target",
        title=title_of(target),
        predictors=markdown_table(predictor_head, predictor_rows),
        calibration_rounds=figures["calibration_rounds"],
        by_depth=markdown_table(depth_head, depth_rows),
        examples=_examples(lemma["examples"]),
        threshold=f"{lemma['alpha_threshold']:g}",
        **{key: lemma[key] for key in ("below_bound", "nodes", "k", "above_threshold", "above_threshold_accepted")},
    )


def _examples(examples: Sequence[Json]) -> str:
    rows = []
    for one in examples:
        probs, outcome = ", ".join(f"{prob:.3f}" for prob in one["probs"]), "accepted" if one["accepted"] else "rejected"
        rows.append([one["prompt"], str(one["depth"]), f"{one['alpha']:.3f}", probs, f"{one['bound']:.3f}", outcome])
    return markdown_table(["prompt", "depth", "alpha", "largest p, renormalized", "bound on p1", "most likely token"], rows)


def expectations(figures: Figures) -> list[Expectation]:
    """Calibration lowers the error; alpha predicts acceptance; Lemma 4.3 and Theorem 4.4 hold."""
    return [one for target, part in by_target(figures, "calibration").items() for one in _of_target(title_of(target), part)]


def _of_target(title: str, figures: Json) -> list[Expectation]:
    by_name, lemma = figures["predictors"]["by_name"], figures["lemma"]
    alpha, draft = by_name["alpha"], by_name["draft probability"]
    accepted, total = lemma["above_threshold_accepted"], lemma["above_threshold"]
    violated = f"violated at {lemma['below_bound']} of {lemma['nodes']} nodes"
    cause = "; the inequality points the wrong way: two equal candidates have a high alpha" if lemma["below_bound"] else ""
    return [
        _lower_error(title, figures["by_depth"]),
        Expectation(
            f"SAGE: alpha predicts acceptance as well as the draft probability, {title}",
            alpha["auc"] >= draft["auc"] and alpha["error"] <= draft["error"],
            f"AUC {alpha['auc']:.3f} and {draft['auc']:.3f}, error {alpha['error']:.3f} and {draft['error']:.3f}",
        ),
        Expectation(f"SAGE: Lemma 4.3 on recorded nodes, {title}", lemma["below_bound"] == 0, violated + cause),
        Expectation(
            f"SAGE: Theorem 4.4, every token above alpha {lemma['alpha_threshold']:g} is accepted, {title}",
            accepted == total,
            f"{accepted / max(total, 1):.1%} of {total} nodes",
        ),
    ]


def _lower_error(title: str, rows: Sequence[Json]) -> Expectation:
    labels = max(sum(row["labels"] for row in rows), 1)
    before, after = (sum(row[key] * row["labels"] for row in rows) / labels for key in ("before", "after"))
    higher = [str(row["depth"]) for row in rows if row["after"] >= row["before"]]
    evidence = f"{before:.3f} before, {after:.3f} after; lower at {len(rows) - len(higher)} of {len(rows)} depths"
    if higher:
        evidence += f", not at {', '.join(higher)}"
    return Expectation(f"Ours: calibration lowers the calibration error, {title}", after < before, evidence)


def draw_reliability(figures: Figures) -> Figure:
    """Draws predicted and observed acceptance of the draft's most likely token; a panel per target."""
    tables = by_target(figures, "calibration")
    subtitle = "probability that the draft's most likely token is accepted, on the path of the answer"
    figure = style.figure(4.1, "Predicted and observed acceptance", subtitle)
    panels, first = target_panels(figure, tables)
    for target, axes in panels.items():
        axes.plot([0, 1], [0, 1], color=style.BAND, linewidth=1.2)
        for name, color in PREDICTORS.items():
            curve = tables[target]["predictors"]["by_name"][name]["curve"]
            points = [(predicted, observed) for predicted, observed, count in curve if count >= MIN_NODES]
            line(axes, [x for x, _ in points], [y for _, y in points], color, name)
        axes.set(xlim=(0, 1), ylim=(0, 1.02), xticks=(0, 0.5, 1), xlabel="predicted")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(PercentFormatter(1.0))
    first.set_ylabel("observed")
    legend_below(figure, first, 3)
    return figure


def draw_errors(figures: Figures) -> Figure:
    """Draws the calibration error by depth, before and after calibration; a panel per target."""
    tables = by_target(figures, "calibration")
    figure = style.figure(3.3, "Calibration error by depth", "all drafted candidates of verified nodes, test split")
    panels, first = target_panels(figure, tables)
    for target, axes in panels.items():
        rows = tables[target]["by_depth"]
        for key, label in {"before": "draft probability", "after": "calibrated"}.items():
            line(axes, [row["depth"] for row in rows], [row[key] for row in rows], PREDICTORS[label], label)
        integer_axis(axes, "depth")
    first.set_ylim(bottom=0)  # the y axis is shared: its limit is set after all lines are drawn
    first.legend(loc="best", handlelength=1.4)
    return figure


PLOTS = {"reliability.png": draw_reliability, "calibration.png": draw_errors}
