"""Sampling: acceptance, speed and equality of texts by temperature, and drafts that propose with the noise of the draws."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from matplotlib.figure import Figure

from benchmarks.papers.figures import Json
from benchmarks.papers.lab import Lab, compare_row
from benchmarks.papers.markdown import grouped, times
from benchmarks.papers.plots import COLORS, DOTTED, Curve, plot_curves, policy_curves
from benchmarks.papers.study import Expectation, Study
from benchmarks.papers.tuning import tuned_options

POLICIES = ("chain", "static", "sage", "cost_aware")
UNCOUPLED = "{} uncoupled"
LEAST_GAIN = 1.2
TOKENS = "tokens_per_target_pass"


def measure_temperature(lab: Lab) -> None:
    """Measures `temperature` for every target. Drafts are not coupled with the noise; that is the study after it."""
    sizes = lab.sizes["temperature"]
    options = {target: {name: tuned_options(lab, target, name) for name in POLICIES} for target in lab.targets}

    def row(target: str, value: float) -> Json:
        runners = [lab.runner(target, name, name, options[target][name]) for name in POLICIES]
        sampling: dict[str, Any] = {"temperature": value, "seed": 1, "couple": value == 0}
        compared = compare_row(lab, target, runners, lab.test_prompts(target, "temperature"), sizes["repeats"], **sampling)
        return {"target": target, "temperature": value, **compared}

    def compute() -> Json:
        return {"rows": [row(target, value) for target in lab.targets for value in sizes["values"]]}

    lab.figures("temperature", "temperature", compute, lab.main_runs(), study=sizes, options=options)


def measure_coupling(lab: Lab) -> None:
    """Measures `coupling_TARGET` for every target: default options, coupled and not; no two prompts share a seed."""
    sizes = lab.sizes["coupling"]

    def row(target: str, temperature: float, top_p: float) -> Json:
        runners = [
            lab.runner(target, form.format(policy), policy, couple=form == "{}")
            for policy in POLICIES
            for form in ("{}", UNCOUPLED)
        ]
        prompts = lab.test_prompts(target, "coupling")
        seeded = [replace(prompt, seed=seed) for seed, prompt in enumerate(prompts * sizes["seeds"])]
        where = {"temperature": temperature, "top_p": top_p}
        compared = compare_row(lab, target, runners, seeded, sizes["repeats"], **where)
        return {**compared, **where, "prompts": len(prompts), "seeds": sizes["seeds"]}

    def compute(target: str) -> Json:
        return {"target": target, "rows": [row(target, *point) for point in sizes["points"]]}

    for target in lab.targets:
        lab.figures("coupling", f"coupling_{target}", partial(compute, target), lab.main_runs(target), study=sizes)


def _texts(rows: Sequence[Json]) -> Json:
    """Returns how many texts of all policies are identical to the autoregressive one of their seed, and of how many."""
    parts = [part for row in rows for part in row["policies"].values()]
    return {key: sum(part[key] for part in parts) for key in ("match", "total")}


def _same_texts(claim: str, rows: Sequence[Json]) -> Expectation:
    texts = _texts(rows)
    return Expectation(claim, texts["match"] == texts["total"], "{match} of {total} texts".format(**texts))


# -- temperature -----------------------------------------------------------------------------------------------------------


def _temperature_expectations(found: Json) -> Iterator[Expectation]:
    yield _same_texts("Ours: one seed gives one text, under every policy and at every temperature", found["rows"])
    for title, rows in grouped(found["rows"], "target").items():
        curve = {row["temperature"]: row["policies"]["chain"][TOKENS] for row in rows}
        evidence = "tokens per pass of `chain`: " + ", ".join(f"{value:.2f} at T {degree:g}" for degree, value in curve.items())
        decreases = all(after <= before for before, after in pairwise(curve.values()))
        yield Expectation(f"SpecVLM: acceptance decreases with the temperature, {title}", decreases, evidence)


def _draw_temperature(found: Json) -> Figure:
    targets = grouped(found["rows"], "target")
    panels = {title: policy_curves(rows, "temperature", TOKENS) for title, rows in targets.items()}
    return plot_curves("Temperature", "tokens per target pass, one seed", panels, "temperature", legend="lower left")


TEMPERATURE = Study(
    name="temperature",
    measure=measure_temperature,
    values=lambda found: {"rows": [{**row, **_texts([row])} for row in found["rows"]]},
    expectations=_temperature_expectations,
    plots={"temperature.png": _draw_temperature},
)


# -- coupling --------------------------------------------------------------------------------------------------------------


def _coupling_values(found: Mapping[str, Json]) -> Json:
    rows = [{"target": target, **row} for target, study in found.items() for row in study["rows"]]
    return {"pairs": [{**row, **_pair(row, policy)} for row in rows for policy in POLICIES]}


def _pair(row: Json, policy: str) -> Json:
    coupled, alone = row["policies"][policy], row["policies"][UNCOUPLED.format(policy)]
    gain, speed_gain = (coupled[key] / alone[key] for key in (TOKENS, "tokens_per_s"))
    texts = _texts([{"policies": {"coupled": coupled, "alone": alone}}])
    return {"policy": policy, "alone": alone, "coupled": coupled, "gain": gain, "speed_gain": speed_gain, **texts}


def _coupling_expectations(found: Mapping[str, Json]) -> Iterator[Expectation]:
    hot = {}  # by target, the row at temperature 1 without truncation, or the last one
    for title, rows in ((title, study["rows"]) for title, study in found.items()):
        hot[title] = next((row for row in rows if (row["temperature"], row["top_p"]) == (1, 1)), rows[-1])
    for policy in ("chain", "sage"):
        gains = {title: _pair(row, policy)["gain"] for title, row in hot.items()}
        claim = f"Ours: at T 1, `{policy}` has at least {times(LEAST_GAIN)} the tokens per pass when coupled"
        evidence = ", ".join(f"{times(gain)} on {title}" for title, gain in gains.items())
        yield Expectation(claim, min(gains.values()) >= LEAST_GAIN, evidence)
    for title, row in hot.items():
        speeds = {policy: row["policies"][policy]["tokens_per_s"] for policy in POLICIES}
        claim = f"Ours: coupled at T 1, `cost_aware` is faster than the other policies, {title}"
        evidence = ", ".join(f"`{policy}` {speed:.0f} tokens/s" for policy, speed in speeds.items())
        yield Expectation(claim, max(speeds, key=speeds.__getitem__) == "cost_aware", evidence)
    rows = [row for study in found.values() for row in study["rows"]]
    yield _same_texts("Ours: coupled or not, every text equals the autoregressive one of its seed", rows)


def _draw_coupling(found: Mapping[str, Json]) -> Figure:
    def curves(rows: Sequence[Json]) -> Iterator[Curve]:
        rows = [row for row in rows if row["top_p"] == 1] or rows
        temperatures = [row["temperature"] for row in rows]
        for color, name in zip(COLORS, POLICIES, strict=True):
            own = [_pair(row, name) for row in rows]
            yield Curve(name, temperatures, [pair["coupled"][TOKENS] for pair in own], color)
            yield Curve(None, temperatures, [pair["alone"][TOKENS] for pair in own], color, DOTTED)

    panels = {title: list(curves(study["rows"])) for title, study in found.items()}
    subtitle = "tokens per target pass; dotted: without the noise of the draws"
    return plot_curves("Coupled drafts", subtitle, panels, "temperature", legend="lower left")


COUPLING = Study(
    name="coupling",
    measure=measure_coupling,
    values=_coupling_values,
    expectations=_coupling_expectations,
    plots={"coupling.png": _draw_coupling},
    is_per_target=True,
)
