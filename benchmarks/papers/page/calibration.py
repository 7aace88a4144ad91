"""Section: entropy and acceptance."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.papers.figures import Json
from benchmarks.papers.page.expectations import Expectation
from benchmarks.papers.page.markdown import Figures, by_target, fill, join, title_of
from sage.bench.tables import markdown_table


def values(figures: Figures) -> dict[str, str]:
    """Returns the placeholders of calibration.md."""
    return {"targets": join(*(_target(target, part) for target, part in by_target(figures, "calibration").items()))}


def _target(target: str, figures: Json) -> str:
    lemma = figures["lemma"]
    return fill(
        "calibration_target",
        title=title_of(target),
        predictors=_predictors(figures["predictors"]),
        calibration_rounds=figures["calibration_rounds"],
        by_depth=_by_depth(figures["by_depth"]),
        below_bound=lemma["below_bound"],
        nodes=lemma["nodes"],
        k=lemma["k"],
        examples=_examples(lemma["examples"]),
        threshold=f"{lemma['alpha_threshold']:g}",
        accepted=lemma["above_threshold_accepted"],
        above_threshold=lemma["above_threshold"],
    )


def _predictors(predictors: Json) -> str:
    head = [f"{predictors['nodes']} nodes, {predictors['accepted']:.0%} accepted", "error", "AUC"]
    rows = [[f"`{name}`", f"{one['error']:.3f}", f"{one['auc']:.3f}"] for name, one in predictors["by_name"].items()]
    return markdown_table(head, rows)


def _by_depth(rows: Sequence[Json]) -> str:
    cells = [[str(row["depth"]), str(row["labels"]), f"{row['before']:.3f}", f"{row['after']:.3f}"] for row in rows]
    return markdown_table(["depth", "candidates", "error of the draft probability", "error after calibration"], cells)


def _examples(examples: Sequence[Json]) -> str:
    rows = [
        [
            one["prompt"],
            str(one["depth"]),
            f"{one['alpha']:.3f}",
            ", ".join(f"{prob:.3f}" for prob in one["probs"]),
            f"{one['bound']:.3f}",
            "accepted" if one["accepted"] else "rejected",
        ]
        for one in examples
    ]
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
    before, after = (_weighted_mean(rows, key) for key in ("before", "after"))
    higher = [str(row["depth"]) for row in rows if row["after"] >= row["before"]]
    evidence = f"{before:.3f} before, {after:.3f} after; lower at {len(rows) - len(higher)} of {len(rows)} depths"
    if higher:
        evidence += f", not at {', '.join(higher)}"
    return Expectation(f"Ours: calibration lowers the calibration error, {title}", after < before, evidence)


def _weighted_mean(rows: Sequence[Json], key: str) -> float:
    return float(sum(row[key] * row["labels"] for row in rows) / max(sum(row["labels"] for row in rows), 1))
