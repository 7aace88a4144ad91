"""The draft's confidence: its autocorrelation, what it says about accepted lengths, and how well it predicts acceptance.

Ref: SAGE, arXiv 2602.00523, Figure 2 (entropy) and section 4 (calibration: reliability of alpha, of the draft probability and
of the calibrated estimate, calibration error by depth, Lemma 4.3 and Theorem 4.4 on recorded nodes).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from matplotlib.figure import Figure

import sage
from benchmarks.papers.figures import Json
from benchmarks.papers.lab import Lab
from benchmarks.papers.plots import COLORS, Curve, plot_curves
from benchmarks.papers.study import Expectation, Study
from benchmarks.papers.tuning import depth_on_path, ranks_on_path
from sage.bench.measurement import BenchPrompt
from sage.costs.calibration import Reliability
from sage.replay.recording import Recording
from sage.trees.cost_aware.policy import CostAware
from sage.trees.sage import confidence_of
from train.report import style

ALPHA_THRESHOLD = 0.56  # SAGE, Theorem 4.4: above this alpha, a token is always accepted
CORRELATION_THRESHOLD = 0.1  # a correlation of some hundred pairs below this is not significant
DECIMALS = 3
NUM_EXAMPLES, NUM_EXAMPLE_PROBS = 3, 4
PREDICTORS = {"alpha": "#2f6fa7", "draft probability": style.FAINT, "calibrated": "#b23a6b"}
MIN_NODES = 10  # bins with fewer are not drawn
LINE_STYLES = {"token": "-", "round": (0, (4, 2))}

Series = list[list[float]]  # one list per answer


@dataclass
class PathNode:
    """One node on the path of the answer: its draft distribution, and whether the target chose the most likely token."""

    prompt: str
    depth: int
    probs: list[float]
    is_accepted: bool


def nodes_on_path(recording: Recording, prompt: str, candidates: int) -> Iterator[PathNode]:
    """Yields the recorded nodes on the path of the answer, round by round."""
    for recorded in recording.rounds:
        for depth, (probs, rank) in enumerate(ranks_on_path(recording, recorded), start=1):
            yield PathNode(prompt, depth, probs[:candidates].tolist(), rank == 0)


# -- entropy ---------------------------------------------------------------------------------------------------------------


def measure_entropy(lab: Lab) -> None:
    """Measures `entropy` for every target."""

    def compute() -> Json:
        return {"targets": {target: _correlations(lab, target) for target in lab.targets}}

    lab.figures("entropy", "entropy", compute, lab.main_runs(), study=lab.sizes["entropy"])


def _correlations(lab: Lab, target: str) -> Json:
    sizes = lab.sizes["entropy"]
    num_candidates, lags = sizes["candidates"], range(1, sizes["lags"] + 1)
    recordings = lab.recordings(target, lab.test_prompts(target, "entropy"))
    tokens = [[confidence_of(one.probs) for one in nodes_on_path(own, "", num_candidates)] for own in recordings]
    # rounds in which the draft ran; the last one of an answer may have room for one token only
    drafted = [[(own, one) for one in own.rounds if () in one.candidates] for own in recordings]
    rounds = [[confidence_of(one.candidates[()][0][:num_candidates].tolist()) for _, one in answer] for answer in drafted]
    lengths = [[float(depth_on_path(*pair)) for pair in answer] for answer in drafted]
    return {
        "prompts": len(recordings),
        "tokens": sum(map(len, tokens)),
        "rounds": sum(map(len, rounds)),
        "by_token": [correlation(tokens, tokens, lag) for lag in lags],
        "by_round": [correlation(rounds, rounds, lag) for lag in lags],
        "length_from_this_round": correlation(rounds, lengths, 0),
        "length_from_last_round": correlation(rounds, lengths, 1),
    }


def correlation(first: Series, second: Series, lag: int) -> float | None:
    """Returns the Pearson correlation of values `lag` places apart within the same answer; None without variance."""
    pairs = [pair for a, b in zip(first, second, strict=True) for pair in zip(a, b[lag:], strict=False)]
    try:
        return statistics.correlation([x for x, _ in pairs], [y for _, y in pairs])
    except statistics.StatisticsError:
        return None


def _entropy_expectations(found: Json) -> Iterator[Expectation]:
    for title, part in found["targets"].items():
        tokens, rounds = part["by_token"][0] or 0.0, part["by_round"][0] or 0.0
        this, last = part["length_from_this_round"] or 0.0, part["length_from_last_round"] or 0.0
        yield Expectation(
            f"SAGE: the entropies of neighboring steps are correlated, {title}",
            min(tokens, rounds) > CORRELATION_THRESHOLD,
            f"correlation {tokens:+.2f} between tokens, {rounds:+.2f} between rounds; threshold {CORRELATION_THRESHOLD:g}",
        )
        yield Expectation(
            f"SAGE: alpha of the last round predicts the accepted length of this round, {title}",
            last > CORRELATION_THRESHOLD and last >= this / 2,
            f"correlation {last:+.2f} with alpha of the last round, {this:+.2f} with alpha of this round",
        )


def _draw_entropy(found: Json) -> Figure:
    curves = []
    for color, (title, part) in zip(COLORS, found["targets"].items(), strict=False):
        for unit, linestyle in LINE_STYLES.items():
            points = {lag: value for lag, value in enumerate(part[f"by_{unit}"], start=1) if value is not None}
            curves.append(Curve(f"{title}, {unit}s", list(points), list(points.values()), color, {"linestyle": linestyle}))
    title, subtitle = "Autocorrelation of the draft's confidence", "correlation of alpha within an answer, by lag"
    figure = plot_curves(title, subtitle, {"": curves}, "lag", from_zero=False)
    axes = figure.axes[0]
    axes.axhline(0.0, color=style.INK, linewidth=1.0)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=2.2)
    return figure


ENTROPY = Study(
    name="entropy",
    measure=measure_entropy,
    expectations=_entropy_expectations,
    plots={"entropy.png": _draw_entropy},
)


# -- calibration -----------------------------------------------------------------------------------------------------------


def measure_calibration(lab: Lab) -> None:
    """Measures `calibration_TARGET` for every target."""
    inputs = {"study": lab.sizes["calibration"], "candidates": lab.sizes["entropy"]["candidates"]}
    for target in lab.targets:
        compute = partial(_calibration, lab, target)
        lab.figures("calibration", f"calibration_{target}", compute, lab.main_runs(target), **inputs)


def _calibration(lab: Lab, target: str) -> Json:
    sizes, candidates = lab.sizes["calibration"], lab.sizes["entropy"]["candidates"]
    prompts, policy = lab.test_prompts(target, "calibration"), sage.policy("cost_aware")
    assert isinstance(policy, CostAware)
    learner, start = policy.learner, 0
    while learner.rounds < sizes["rounds"]:
        _decode(lab, target, policy, lab.prompts(target, "validation", sizes["families"], 1, start))
        start += 1
    calibration_rounds, frozen = learner.rounds, learner.calibrator.state()
    learner.before, learner.after = Reliability(), Reliability()
    _decode(lab, target, policy, prompts)  # calibration continues online
    before, after = learner.before.error(), learner.after.error()
    labels = {depth: sum(count for _, _, count in learner.before.curve(depth)) for depth in before}
    learner.calibrator.load_state(frozen)
    recorded = zip(prompts, lab.recordings(target, prompts), strict=True)
    nodes = [node for prompt, recording in recorded for node in nodes_on_path(recording, prompt.name, candidates)]
    return {
        "target": target,
        "calibration_rounds": calibration_rounds,
        "by_depth": [
            {"depth": depth, "labels": labels[depth], "before": before[depth], "after": after[depth]} for depth in before
        ],
        "predictors": predictors(nodes, policy),
        "lemma": lemma(nodes),
    }


def _decode(lab: Lab, target: str, policy: CostAware, prompts: Sequence[BenchPrompt]) -> None:
    model, draft, limit = lab.target(target), lab.main_draft(target), lab.settings.max_new_tokens
    for prompt in prompts:
        sage.generate(model, draft, dict(prompt.inputs), policy=policy, max_new_tokens=limit)


def predictors(nodes: Sequence[PathNode], policy: CostAware) -> Json:
    """Returns, per predictor of the acceptance of the most likely token, its error, AUC and reliability curve."""
    outcomes = [one.is_accepted for one in nodes]
    predicted = {
        "alpha": [confidence_of(one.probs) for one in nodes],
        "draft probability": [one.probs[0] for one in nodes],
        "calibrated": [policy.learner.calibrator.leading(one.probs, one.depth, 0.0)[0] for one in nodes],
    }
    by_name = {name: _reliability(values, outcomes) for name, values in predicted.items()}
    return {"nodes": len(nodes), "accepted": sum(outcomes) / max(len(outcomes), 1), "by_name": by_name}


def _reliability(predicted: Sequence[float], outcomes: Sequence[bool]) -> Json:
    reliability, scores = Reliability(), torch.tensor(predicted, dtype=torch.float64)
    reliability.add(torch.zeros(len(scores), dtype=torch.long), scores[:, None], torch.tensor(outcomes)[:, None].double())
    return {"error": reliability.error().get(0, 0.0), "auc": auc(predicted, outcomes), "curve": reliability.curve(0)}


def auc(predicted: Sequence[float], outcomes: Sequence[bool]) -> float:
    """Returns the area under the ROC curve, ties counting half; 0.5 if all outcomes are equal."""
    scores, is_accepted = torch.tensor(predicted, dtype=torch.float64), torch.tensor(outcomes)
    accepted, rejected = scores[is_accepted][:, None], scores[~is_accepted]
    if not accepted.numel() or not rejected.numel():
        return 0.5
    return float(((accepted > rejected).double() + 0.5 * (accepted == rejected)).mean())


def bound(alpha: float, k: int) -> float:
    """Returns the lower bound on p_1 that Lemma 4.3 claims: 1/k + alpha (k - 1)/k."""
    return 1 / k + alpha * (k - 1) / k


def lemma(nodes: Sequence[PathNode]) -> Json:
    """Counts violations of Lemma 4.3 (p_1 of the renormalized top k below its bound) and of Theorem 4.4; adds examples."""
    rows = []
    for node in nodes:
        alpha, total = confidence_of(node.probs), math.fsum(node.probs)
        rows.append((node, alpha, bound(alpha, len(node.probs)), [prob / total for prob in node.probs]))
    confident = [node.is_accepted for node, alpha, _, _ in rows if alpha > ALPHA_THRESHOLD]
    largest_violations = sorted(rows, key=lambda row: row[3][0] - row[2])[:NUM_EXAMPLES]
    return {
        "nodes": len(rows),
        "k": len(nodes[0].probs) if nodes else 0,
        "below_bound": sum(probs[0] < least for _, _, least, probs in rows),
        "alpha_threshold": ALPHA_THRESHOLD,
        "above_threshold": len(confident),
        "above_threshold_accepted": sum(confident),
        "examples": [
            {
                "prompt": node.prompt,
                "depth": node.depth,
                "alpha": round(alpha, DECIMALS),
                "bound": round(least, DECIMALS),
                "probs": [round(prob, DECIMALS) for prob in probs[:NUM_EXAMPLE_PROBS]],
                "accepted": node.is_accepted,
            }
            for node, alpha, least, probs in largest_violations
        ],
    }


def _calibration_expectations(found: Mapping[str, Json]) -> Iterator[Expectation]:
    for title, part in found.items():
        by_name, claims = part["predictors"]["by_name"], part["lemma"]
        alpha, draft = by_name["alpha"], by_name["draft probability"]
        yield _lower_error(title, part["by_depth"])
        yield Expectation(
            f"SAGE: alpha predicts acceptance as well as the draft probability, {title}",
            alpha["auc"] >= draft["auc"] and alpha["error"] <= draft["error"],
            f"AUC {alpha['auc']:.3f} and {draft['auc']:.3f}, error {alpha['error']:.3f} and {draft['error']:.3f}",
        )
        violated = f"violated at {claims['below_bound']} of {claims['nodes']} nodes"
        if claims["below_bound"]:
            violated += "; the inequality points the wrong way: two equal candidates have a high alpha"
        yield Expectation(f"SAGE: Lemma 4.3 on recorded nodes, {title}", claims["below_bound"] == 0, violated)
        accepted, total = claims["above_threshold_accepted"], claims["above_threshold"]
        yield Expectation(
            f"SAGE: Theorem 4.4, every token above alpha {claims['alpha_threshold']:g} is accepted, {title}",
            accepted == total,
            f"{accepted / max(total, 1):.1%} of {total} nodes",
        )


def _lower_error(title: str, rows: Sequence[Json]) -> Expectation:
    labels = max(sum(row["labels"] for row in rows), 1)
    before, after = (sum(row[key] * row["labels"] for row in rows) / labels for key in ("before", "after"))
    higher = [str(row["depth"]) for row in rows if row["after"] >= row["before"]]
    evidence = f"{before:.3f} before, {after:.3f} after; lower at {len(rows) - len(higher)} of {len(rows)} depths"
    if higher:
        evidence += f", not at {', '.join(higher)}"
    return Expectation(f"Ours: calibration lowers the calibration error, {title}", after < before, evidence)


def _draw_reliability(found: Mapping[str, Json]) -> Figure:
    """Draws predicted and observed acceptance of the draft's most likely token."""

    def curves(part: Json) -> Iterator[Curve]:
        yield Curve(None, [0, 1], [0, 1], style.BAND, {"marker": "", "linewidth": 1.2})
        for name, color in PREDICTORS.items():
            curve = part["predictors"]["by_name"][name]["curve"]
            points = [(predicted, observed) for predicted, observed, count in curve if count >= MIN_NODES]
            yield Curve(name, [x for x, _ in points], [y for _, y in points], color)

    panels = {title: list(curves(part)) for title, part in found.items()}
    title, subtitle = (
        "Predicted and observed acceptance",
        "probability that the draft's most likely token is accepted, on the path of the answer",
    )
    figure = plot_curves(title, subtitle, panels, "predicted", "observed", height=4.1, legend=3)
    for axes in figure.axes:
        style.percent_axes(axes)
    return figure


def _draw_errors(found: Mapping[str, Json]) -> Figure:
    """Draws the calibration error by depth, before and after calibration."""

    def curve(rows: Sequence[Json], key: str, label: str) -> Curve:
        return Curve(label, [row["depth"] for row in rows], [row[key] for row in rows], PREDICTORS[label])

    labels = {"before": "draft probability", "after": "calibrated"}.items()
    panels = {title: [curve(part["by_depth"], *label) for label in labels] for title, part in found.items()}
    subtitle = "all drafted candidates of verified nodes, test split"
    return plot_curves("Calibration error by depth", subtitle, panels, "depth")


CALIBRATION = Study(
    name="calibration",
    measure=measure_calibration,
    expectations=_calibration_expectations,
    plots={"reliability.png": _draw_reliability, "calibration.png": _draw_errors},
    is_per_target=True,
)
