"""Speed by size of the weights: a pocket target, widened without changing its function, so that a pass costs what it costs on
larger targets, and the same drafts.

`regimes_SIZE`: our policies, costs of passes, and the projection checked against the measurement. `vllm_SIZE`: our decoders
beside vLLM's. SIZE is in megabytes, as in the settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

import sage
from benchmarks.papers.figures import Json
from benchmarks.papers.lab import Lab, compare
from benchmarks.papers.markdown import fill, options_text, times, times_with_interval
from benchmarks.papers.plots import Curve, plot_curves, policy_curve
from benchmarks.papers.studies.engines import beside_vllm, has_engine
from benchmarks.papers.studies.projection import host_s, predicted
from benchmarks.papers.study import OURS, Expectation, Figures, Study
from benchmarks.papers.tuning import tuned_options
from benchmarks.papers.wide_lab import WideLab, using_threads
from data_prep.pocket.widen import find_source, wide_target
from sage.bench.costs import cost_curve, roofline_costs
from sage.bench.report_table import TARGET_PREFILL_PHASES
from sage.bench.runners import AUTOREGRESSIVE
from sage.bench.settings import NODES, WIDTHS
from sage.bench.shapes import Shape, shape_named, shape_of
from sage.commands.device_check import copy_bandwidth
from sage.costs.tables import Costs
from sage.io.files import read_json
from sage.replay.recording import Recording
from train.report import style

DTYPE = torch.float32
LARGE, LARGE_NAME = "qwen2_5_vl_7b", "7B on an H100"
BESIDE = "vllm"
NEAR = 0.97  # of the fastest tuned policy
CLOSE = 0.2  # relative error of the projection
WEIGHTS = "weights, MB"  # title of a panel
SPEEDUPS = {20: 2.0, 62: 2.5, 226: 3.5}  # goals for our policy, by megabytes
RATIOS = {  # goals, ours / vLLM's
    "autoregressive": {20: 2.0, 62: 2.0, 226: 1.0},
    "same draft": {20: 2.5, 62: 2.5, 226: 1.5},
    "any draft": {62: 3.0},
}


def _measure(lab: Lab) -> None:
    """Measures `regimes_SIZE`, and `vllm_SIZE` where there is an environment with vLLM, for the first target."""
    sizes, target = dict(lab.sizes["regimes"]), lab.targets[0]
    lab = lab.with_draft(target, sizes["run"])
    engines = {**lab.sizes["engines"], **sizes.pop("engines")}
    first: Json = {}
    for megabytes in sizes["megabytes"]:
        inputs = {"study": {**sizes, "megabytes": megabytes}, "tuning": lab.sizes["tuning"], "first": first}
        compute = partial(_regime, lab, target, megabytes, first)
        runs = [*lab.main_runs(target), *sizes["drafts"]]
        found = lab.figures("regimes", f"regimes_{megabytes}", compute, runs, **inputs)
        first = first or found
    if not has_engine(engines, "regimes"):
        return
    drafts = engines["runs"][target]

    def side_by_side(megabytes: float) -> Json:
        path = wide_target(lab.settings.targets[target], megabytes, "regimes.megabytes")
        return beside_vllm(lab, str(path), drafts, engines)

    for megabytes in sizes["megabytes"]:
        inputs, compute = {"study": engines, "megabytes": megabytes}, partial(side_by_side, megabytes)
        lab.figures("regimes", f"{BESIDE}_{megabytes}", compute, list(drafts.values()), **inputs)


def _regime(lab: Lab, target: str, megabytes: float, first: Json) -> Json:
    """Returns the figures of one size; `first` are those of the smallest one, empty for itself."""
    sizes = lab.sizes["regimes"]
    wide = WideLab(lab, target, megabytes, sizes["policies"])
    shape, source = _shape(wide.path), _shape(str(find_source(lab.settings.targets[target]).folder))
    with using_threads(sizes["threads"]):
        options = {name: tuned_options(wide, target, name) for name in sizes["policies"]}
        runners = [wide.runner(target, name, name, chosen) for name, chosen in options.items()]
        runners += [wide.runner(target, _with(run), OURS, {}, run) for run in sizes["drafts"]]
        prompts, also = wide.test_prompts(target, "regimes"), [AUTOREGRESSIVE]
        compared = compare(wide, target, runners, prompts, sizes["repeats"], also_as_policies=also)
        recordings, costs = wide.recordings(target, prompts), wide.costs(target)
        bandwidth = first["bandwidth"] if first else copy_bandwidth(torch.device("cpu")) / 1e9
    bounds = _bounds(shape, source, costs.context, bandwidth)
    return {
        "target": target,
        "run": sizes["run"],
        "drafts": sizes["drafts"],
        "megabytes": megabytes,
        "weights_mb": shape.pass_parameters * DTYPE.itemsize / 1e6,
        "mlp": shape.intermediate_size,
        "threads": sizes["threads"],
        "bandwidth": bandwidth,
        "options": options,
        "costs": costs.state(),
        "ratio": costs.draft(1) / costs.verify(1),
        "ratio_of_bytes": source.draft_parameters / shape.pass_parameters,
        "projected": _speedups(recordings, options, bounds, first or compared),
        "replayed": _speedups(recordings, options, costs, compared),
        "bound": _speedups(recordings, options, costs, compared, has_overhead=False),
        **compared,
    }


def _with(run: str) -> str:
    """Returns the label of our policy with the draft of a run."""
    return f"{OURS}, {run}"


def _shape(path: str) -> Shape:
    return shape_of(Path(path).name, read_json(Path(path) / "config.json"))


def _bounds(shape: Shape, source: Shape, context: int, bandwidth: float) -> Costs:
    """Returns the costs of passes of a target, and of levels of a draft for its source, at a memory bandwidth in GB/s."""
    tables = [roofline_costs(one, DTYPE, bandwidth, NODES, WIDTHS, [context]) for one in (shape, source)]
    verify, draft = cost_curve(tables[0]["verify"], "nodes", context), cost_curve(tables[1]["draft"], "width", context)
    return Costs(verify, draft, context)


def _speedups(
    recordings: Sequence[Recording], options: Mapping[str, Json], costs: Costs, table: Json, *, has_overhead: bool = True
) -> dict[str, float]:
    """Returns the speedups of the policies replayed at these costs, with the host overhead measured in `table`.

    Args:
        has_overhead: whether the policies have any; our autoregressive loop always has its own.
    """
    found = {}
    for name, chosen in options.items():
        own = Costs.from_state({**costs.state(), "overhead": has_overhead * host_s(table["policies"][name])})
        policy, autoregressive_s = sage.policy(name, **chosen), host_s(table["policies"][AUTOREGRESSIVE])
        found[name] = float(predicted(recordings, policy, own, autoregressive_s)["speedup"])
    return found


def engines_table(figures: Figures) -> str:
    """Returns tokens per second of what a user can run, by size of the weights, those that fit into a cache last; empty before
    they are measured.
    """
    found = _by_size(STUDY.select(figures)) if STUDY.file_names(figures) else {}
    measured = [{"label": label, **part} for label, part in found.items() if part[BESIDE]]
    if not measured:
        return ""
    sizes = [*measured[1:], measured[0]]
    choices = [_choices(size[BESIDE]) for size in sizes]
    return fill("engines_table", {"sizes": sizes, "rows": {name: [one[name] for one in choices] for name in choices[0]}})


def _choices(part: Json) -> dict[str, Json]:
    """Returns the figures of the fastest decoder of each kind, by description."""
    ratios, decoders, vllm = part["ratios"], part["decoders"], f"vLLM {part['engine']['vllm']}"
    words = {
        vllm: ratios["autoregressive"]["theirs"],
        "**sage-draft** without a draft": ratios["autoregressive"]["ours"],
        f"{vllm} with our `eagle3`": ratios["same draft"]["theirs"],
        "**sage-draft** with the same draft": ratios["same draft"]["ours"],
        "**sage-draft** with any draft": ratios["any draft"]["ours"],
    }
    return {text: decoders[label] for text, label in words.items()}


# -- the section -----------------------------------------------------------------------------------------------------------


def ratio_of_large() -> float:
    """Returns the ratio of the weights that a level of an EAGLE head reads to those that a pass of `LARGE` reads:
    (a layer + fc + lm_head) / (all layers + lm_head). Both are read at the same bandwidth.
    """
    shape = shape_named(LARGE)
    return shape.draft_parameters / shape.pass_parameters


def _by_size(found: Mapping[str, Json]) -> dict[str, Json]:
    """Returns the figures by their weights, smallest first."""
    ordered = sorted(found.values(), key=lambda part: float(part["weights_mb"]))
    return {f"{part['weights_mb']:.0f} MB": part for part in ordered}


def _values(found: Mapping[str, Json]) -> Json:
    sizes = _by_size(found)
    policies = list(dict.fromkeys(name for part in sizes.values() for name in part["options"]))
    runs = list(dict.fromkeys(run for part in sizes.values() for run in part["drafts"]))
    beside = [{"size": label, **_beside(part[BESIDE])} for label, part in sizes.items() if part[BESIDE]]

    def parts(name: str) -> list[Json]:
        return [
            {
                **part["policies"].get(name, {}),
                **{key: part[key].get(name) for key in ("projected", "bound", "replayed")},
                "in_place": _passes_alone(part, name) if name in part["policies"] else None,
            }
            for part in sizes.values()
        ]

    return {
        "sizes": {
            label: {**part, "pass_ms": 1e3 * _costs(part).verify(1), "level_ms": 1e3 * _costs(part).draft(1)}
            for label, part in sizes.items()
        },
        "large": {"name": LARGE_NAME, "ratio": ratio_of_large()},
        "decoders": [{"name": name, "parts": parts(name)} for name in (AUTOREGRESSIVE, *policies, *map(_with, runs))],
        "drafting": [{"name": name, "parts": parts(name)} for name in policies],
        "tuned": [
            {"name": name, "texts": [options_text(part["options"].get(name, {})) or "defaults" for part in sizes.values()]}
            for name in policies
        ],
        "others": " and ".join(f"`{run}`" for run in runs),
        "beside": [{"rows": beside, "engine": beside[0]["engine"]}] if beside else [],
    }


def _passes_alone(part: Json, name: str) -> float:
    """Returns the speedup of a policy whose passes take as long as in its rounds and whose host takes no time between them."""
    ours, theirs = (part["policies"][one]["time_s"] for one in (name, AUTOREGRESSIVE))
    total = sum(seconds for phase, seconds in theirs.items() if phase not in TARGET_PREFILL_PHASES)
    return float(total / (ours["verify"] + ours["draft_steps"]))


def _costs(part: Json) -> Costs:
    return Costs.from_state(part["costs"])


def _beside(part: Json) -> Json:
    """Returns the speeds of both sides, in the pairs whose ratios are stored."""
    decoders, pairs = part["decoders"], []
    for name in RATIOS:
        one = part["ratios"][name]
        pairs.append({"pair": name, **one, **{side: decoders[one[side]] for side in ("ours", "theirs")}})
    return {"pairs": pairs, "plain": pairs[0], "engine": part["engine"]}


def _expectations(found: Mapping[str, Json]) -> Iterator[Expectation]:
    for label, part in _by_size(found).items():
        where, policies = f"{part['target']} of {label}", part["policies"]
        if (goal := SPEEDUPS.get(part["megabytes"])) is not None:
            drafts = {part["run"]: OURS, **{run: _with(run) for run in part["drafts"]}}
            best = max(policies[name]["speedup"] for name in drafts.values())
            evidence = "; ".join(_speedup_text(part, run, name) for run, name in drafts.items())
            yield Expectation(f"{where}: `{OURS}` at least {times(goal)}", best >= goal, evidence)
        speeds = {name: float(policies[name]["tokens_per_s"]) for name in part["options"]}
        best = max((name for name in speeds if name != OURS), key=speeds.__getitem__)
        evidence = f"{times(speeds[OURS] / speeds[best])} the speed of `{best}`"
        claim = f"{where}: `{OURS}` within {1 - NEAR:.0%} of the fastest other policy, tuned"
        yield Expectation(claim, speeds[OURS] >= NEAR * speeds[best], evidence)
        yield _projection(where, part)
        yield from _ratios(where, part)


def _speedup_text(part: Json, run: str, name: str) -> str:
    speedup = times_with_interval(part["policies"][name]["speedup"], part["policies"][name].get("speedup_ci"))
    return f"`{run}` {speedup}, its passes alone {times(_passes_alone(part, name))}"


def _projection(where: str, part: Json) -> Expectation:
    """Compares the projection, from the memory bandwidth and the host overhead of the smallest size, with the measurement."""
    errors = {name: part["projected"][name] / part["policies"][name]["speedup"] - 1 for name in part["options"]}
    worst = max(errors, key=lambda name: abs(errors[name]))
    claim = f"{where}: projected speedups within {CLOSE:.0%} of the measured ones, every policy"
    measured, projected = part["policies"][worst]["speedup"], part["projected"][worst]
    return Expectation(claim, abs(errors[worst]) <= CLOSE, f"worst `{worst}`: {times(projected)}, measured {times(measured)}")


def _ratios(where: str, part: Json) -> Iterator[Expectation]:
    for name, goals in RATIOS.items() if part[BESIDE] else ():
        one, goal = part[BESIDE]["ratios"][name], goals.get(part["megabytes"])
        if goal is not None:
            evidence = f"`{one['ours']}` / `{one['theirs']}`: {times_with_interval(one['ratio'], one['range'])}"
            yield Expectation(f"{where}: {name} at least {goal:g} times vLLM's speed", one["ratio"] >= goal, evidence)
    if part[BESIDE]:
        one = part[BESIDE]["ratios"]["autoregressive"]
        ours, theirs = (part[BESIDE]["decoders"][one[side]]["first_token_ms"] for side in ("ours", "theirs"))
        yield Expectation(f"{where}: first token no later than vLLM's", ours <= theirs, f"{ours:.1f} ms, vLLM {theirs:.1f} ms")


def _draw(found: Mapping[str, Json]) -> Figure:
    sizes = _by_size(found)
    names = list(dict.fromkeys(name for part in sizes.values() for name in part["options"]))
    others = list(dict.fromkeys(_with(run) for part in sizes.values() for run in part["drafts"]))
    places = {WEIGHTS: "weights_mb", "time of a draft level / time of a pass": "ratio"}

    def curve(name: str, key: str, **look: Any) -> Curve:
        speedups = [part["policies"][name]["speedup"] for part in sizes.values()]
        return policy_curve(name, [part[key] for part in sizes.values()], speedups, **look)

    panels = {title: [curve(name, key) for name in names] for title, key in places.items()}
    look = {"linestyle": "--", "markerfacecolor": "white"}
    panels[WEIGHTS] += [curve(name, "weights_mb", **look) for name in others]  # the ratio is that of the first draft
    subtitle = "tuned policies, decoding only, over our autoregressive loop of the same size"
    columns = len(names) + len(others)
    figure = plot_curves("Speedup by size of the weights", subtitle, panels, ylabel="speedup", height=3.8, legend=columns)
    for axes, key in zip(figure.axes, places.values(), strict=True):
        axes.set_xscale("log")
        ticks = [part[key] for part in sizes.values()]
        axes.set_xticks(ticks, [f"{tick:.0f}" if key == "weights_mb" else f"{tick:.2f}" for tick in ticks])
        axes.minorticks_off()
        axes.axhline(1.0, **style.BASELINE)
    large = ratio_of_large()
    figure.axes[1].axvline(large, color=style.FAINT, linewidth=1, linestyle=":")
    figure.axes[1].text(large, 0.08, f"{LARGE_NAME}: {large:.2f} ", fontsize=8.5, color=style.FAINT, va="bottom", ha="right")
    return figure


STUDY = Study(
    name="regimes",
    measure=_measure,
    expectations=_expectations,
    values=_values,
    plots={"regimes.png": _draw},
    is_per_target=True,
    beside=BESIDE,
)
