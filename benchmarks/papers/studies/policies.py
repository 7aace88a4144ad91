"""Policies and baselines on every task family. Ref: SAGE, arXiv 2602.00523, Table 1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

import sage
from benchmarks.papers.figures import Json
from benchmarks.papers.headline import CAPTIONS, decoders, part_of, tuned_policies
from benchmarks.papers.lab import Lab, compare
from benchmarks.papers.markdown import times, times_with_interval
from benchmarks.papers.plots import Curve, plot_curves, policy_curve, titled_panels
from benchmarks.papers.study import OURS, PUBLISHED, Expectation, Study
from benchmarks.papers.tuning import most_tokens, tuned_options
from sage.bench.report_table import HOST_PHASES
from sage.bench.runners import AUTOREGRESSIVE, HF_ASSISTED, HF_GENERATE, HF_STATIC, PROMPT_LOOKUP
from sage.runtime.timing import PHASES
from train.report import style

DRAFTING = tuple(name for name in sage.POLICIES if name != AUTOREGRESSIVE)
BASELINES = (HF_GENERATE, HF_STATIC, PROMPT_LOOKUP, HF_ASSISTED)
MOST_TOKENS = "sage (most tokens)"
CAPTION_SPEEDUP = 2.0  # our goal
SAGE_LEAD = 1.2  # over static, in tokens per pass


def _measure(lab: Lab) -> None:
    """Measures `tuning_TARGET` and `policies_TARGET` for every target."""
    for target in lab.targets:
        policy_figures(lab, target)


def policy_figures(lab: Lab, target: str) -> Json:
    """Returns the figures of all variants and baselines on the test split."""
    sizes, assistant = lab.sizes["policies"], lab.settings.assistant_runs.get(target)
    variants = policy_variants(lab, target)
    drafts = [*lab.main_runs(target), *([assistant] if assistant else [])]

    def compute() -> Json:
        runners = [lab.runner(target, label, policy, options) for label, (policy, options) in variants.items()]
        prompts, others = lab.test_prompts(target, "policies"), {"baselines": BASELINES, "also_as_policies": [AUTOREGRESSIVE]}
        compared = compare(lab, target, runners, prompts, sizes["repeats"], **others)
        described = {label: {"policy": policy, "options": options} for label, (policy, options) in variants.items()}
        return {"target": target, "variants": described, **compared}

    return lab.figures("policies", f"policies_{target}", compute, drafts, study=sizes, variants=variants)


def policy_variants(lab: Lab, target: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Returns policy and options by label: as tuned, `sage` with the most tokens per pass, and as published if different."""
    tuned = {name: (name, tuned_options(lab, target, name)) for name in DRAFTING}
    published: dict[str, Any] = {PUBLISHED.format(name): (name, {}) for name, (_, options) in tuned.items() if options}
    return tuned | {MOST_TOKENS: ("sage", most_tokens(lab, target, "sage"))} | published


def _values(figures: Json) -> Json:
    drafting = {name: part for name, part in figures["policies"].items() if name != AUTOREGRESSIVE}
    names = [name for name in figures["baselines"] if name != AUTOREGRESSIVE] + tuned_policies(figures)
    first, second, *_ = _by_speed(figures)
    margin = _margin(figures, first, second)
    return {
        **figures,
        "decoders": figures["baselines"] | drafting,
        "by_decoder": {name: [part_of(one, name) for one in figures["by_family"].values()] for name in names},
        "first": first,
        "second": second,
        "lead": f", {times_with_interval(margin['ratio'], margin.get('ci'))} paired by prompt" if margin else "",
        "rounds": _explain_speeds(figures["policies"], first, second),
    }


def _by_speed(figures: Json) -> list[str]:
    return sorted(tuned_policies(figures), key=lambda name: -float(figures["policies"][name]["tokens_per_s"]))


def _margin(figures: Json, first: str, second: str) -> Json:
    """Returns the lead of `first` over `second`, paired by prompt; empty if `first` is not the fastest of all variants."""
    margins = figures["margins"]
    return dict(margins.get("over", {}).get(second, {})) if margins.get("policy") == first else {}


def _explain_speeds(parts: Mapping[str, Json], *names: str) -> str:
    """Returns tokens per round and the cost of a round of each policy."""
    texts = []
    for name in names:
        part, rounds = parts[name], max(parts[name]["rounds"], 1)
        ms = {phase: 1e3 * part["time_s"].get(phase, 0.0) / rounds for phase in PHASES}
        draft_ms, host_ms = ms["draft_prefill"] + ms["draft_steps"], sum(ms[phase] for phase in HOST_PHASES)
        target = f"target {ms['verify']:.2f} ms for {part['nodes_per_round']:.1f} nodes"
        total_ms, tokens = ms["verify"] + draft_ms + host_ms, part["tokens_per_target_pass"]
        spent = f"{total_ms:.2f} ms ({target}, draft {draft_ms:.2f} ms, host {host_ms:.2f} ms)"
        texts.append(f"`{name}`: {tokens:.2f} tokens per round of {spent}")
    return "; ".join(texts)


def _expectations(found: Mapping[str, Json]) -> Iterator[Expectation]:
    checks = (_caption_speedup, _faster_than_policies, _faster_than_baselines, _sage_over_static, _identical_text)
    for title, part in found.items():
        yield from filter(None, (check(title, part) for check in checks))


def _caption_speedup(title: str, figures: Json) -> Expectation | None:
    family = figures["by_family"].get(CAPTIONS)
    if family is None:
        return None
    part = family["policies"][OURS]
    evidence = times_with_interval(part["speedup"], part.get("speedup_ci"))
    if part["speedup"] < CAPTION_SPEEDUP:
        evidence += f". {_explain_speeds(family['policies'], OURS, AUTOREGRESSIVE)}"
    claim = f"{title}: `{OURS}` at least {times(CAPTION_SPEEDUP)} on captions"
    return Expectation(claim, part["speedup"] >= CAPTION_SPEEDUP, evidence)


def _faster_than_policies(title: str, figures: Json) -> Expectation:
    (first, second, *_), policies = _by_speed(figures), figures["policies"]
    claim = f"{title}: `{OURS}` faster than every other tuned policy"
    if first != OURS:
        return Expectation(claim, False, _explain_speeds(policies, first, OURS))
    margin = _margin(figures, OURS, second) or {"ratio": policies[OURS]["speedup"] / policies[second]["speedup"]}
    speed = times_with_interval(margin["ratio"], margin.get("ci"))
    return Expectation(claim, True, f"{speed} the speed of the second fastest, `{second}`")


def _faster_than_baselines(title: str, figures: Json) -> Expectation:
    others = {name: float(part["speedup"]) for name, part in figures["baselines"].items() if name != AUTOREGRESSIVE}
    best, speedup = max(others, key=others.__getitem__), figures["policies"][OURS]["speedup"]
    evidence = f"{times(speedup)}; fastest Hugging Face decoder: `{best}`, {times(others[best])}"
    return Expectation(f"{title}: `{OURS}` faster than every Hugging Face decoder", speedup > others[best], evidence)


def _sage_over_static(title: str, figures: Json) -> Expectation:
    policies = figures["policies"]
    static = policies.get(PUBLISHED.format("static"), policies["static"])
    names = [name for name in (MOST_TOKENS, "sage", PUBLISHED.format("sage")) if name in policies]
    leads = {name: policies[name]["tokens_per_target_pass"] / static["tokens_per_target_pass"] for name in names}
    gains = ", ".join(f"`{name}` {lead - 1:+.0%}" for name, lead in leads.items())
    speedups = ", ".join(times(policies[name]["speedup"]) for name in names)
    claim = f"{title}: `sage` at least 20% more tokens per pass than the static tree of 25 nodes"
    evidence = f"{gains}; speedups {speedups}, static tree {times(static['speedup'])}"
    return Expectation(claim, leads[MOST_TOKENS] >= SAGE_LEAD, evidence)


def _identical_text(title: str, figures: Json) -> Expectation:
    policies = figures["policies"]
    different = [name for name, part in policies.items() if part["match"] < part["total"]]
    evidence = f"all {len(policies)} policies on all {figures['prompts']} prompts"
    if different:
        gap = max(gap for name in different for gap in policies[name]["first_gaps"])
        evidence = f"{len(different)} of {len(policies)} policies differ on some prompts; largest top-2 logit gap {gap:.2g}"
    return Expectation(f"{title}: every policy generates the target's own text", not different, evidence)


def _draw_headline(found: Mapping[str, Json]) -> Figure:
    """Draws the speedup on captions as bars and over all families as dots, the fastest decoder on top."""

    def speed(name: str) -> float:
        parts = [part_of(one["by_family"].get(CAPTIONS, {}), name) for one in found.values()]
        return max((float(part["speedup"]) for part in parts if part), default=0.0)

    names = sorted(decoders(found), key=speed, reverse=True)
    subtitle = "over the fastest autoregressive decoder, decoding only; bars: captions, 95% interval; dots: all families"
    figure = style.figure(1.5 + 0.33 * len(names), "Speedup of lossless decoding on two CPU cores", subtitle)
    for title, axes in titled_panels(figure, found, grid="x").items():
        for place, name in enumerate(names):
            _headline_bar(axes, place, name, found[title])
        axes.axvline(1.0, **style.BASELINE)
        axes.set_xlim(left=0)
        axes.margins(x=0.16)
    style.label_bars(figure.axes[0], names)
    return figure


def _headline_bar(axes: Axes, place: int, name: str, figures: Json) -> None:
    captions, overall = part_of(figures["by_family"].get(CAPTIONS, {}), name), part_of(figures, name)
    if not captions or not overall:
        axes.text(0.04, place, "not measured", va="center", fontsize=9, color=style.FAINT)
        return
    color = style.policy_color(name) if name in figures["variants"] else style.BAND
    axes.barh(place, captions["speedup"], height=0.62, color=color)
    low, high = captions.get("speedup_ci") or [captions["speedup"]] * 2
    axes.plot([low, high], [place, place], color=style.INK, linewidth=1.2)
    edge: dict[str, Any] = {"markeredgecolor": style.INK, "markeredgewidth": 1.1}
    axes.plot(overall["speedup"], place, "o", markersize=4.5, color="white", zorder=4, **edge)
    text: dict[str, Any] = {"fontsize": 9, "fontweight": "bold" if name == OURS else "normal", "va": "center", "zorder": 3}
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    right = (max(high, captions["speedup"], overall["speedup"]), place)
    axes.annotate(f"{captions['speedup']:.2f}x", right, xytext=(7, 0), textcoords="offset points", bbox=box, **text)


def _draw_families(found: Mapping[str, Json]) -> Figure:
    """Draws the speedup by task family, a line per tuned policy."""
    families = list(next(iter(found.values()))["by_family"])

    def curve(part: Json, name: str) -> Curve:
        speedups = [part["by_family"][family]["policies"][name]["speedup"] for family in families]
        return policy_curve(name, families, speedups, linewidth=2.2 if name in (OURS, "sage") else 1.0)

    panels = {title: [curve(part, name) for name in tuned_policies(part)] for title, part in found.items()}
    looks: dict[str, Any] = {"ylabel": "speedup", "height": 3.6, "from_zero": False, "legend": 5}
    figure = plot_curves("Speedup by task family", "tuned policies, decoding only", panels, **looks)
    for axes in figure.axes:
        axes.axhline(1.0, **style.BASELINE)
        axes.set_xticks(range(len(families)), families, rotation=35, ha="right", rotation_mode="anchor")
    return figure


def _draw_time(found: Mapping[str, Json]) -> Figure:
    """Draws the milliseconds per token by phase, a bar per tuned policy. Ref: SAGE, arXiv 2602.00523, Table 6."""
    names = [AUTOREGRESSIVE, *tuned_policies(next(iter(found.values())))]
    subtitle = "ms per generated token, without vision tower and target prefill"
    figure = style.figure(1.9 + 0.3 * len(names), "Decoding time by phase", subtitle)
    for title, axes in titled_panels(figure, found, grid="x").items():
        for place, name in enumerate(names):
            if name in found[title]["policies"]:
                total_ms = style.phase_bar(axes, place, found[title]["policies"][name])
                axes.text(total_ms, place, f" {total_ms:.2f}", va="center", fontsize=8.5)
        axes.margins(x=0.12)
    style.label_bars(figure.axes[0], names)
    style.legend_below(figure, 4, handlelength=1.4)
    return figure


STUDY = Study(
    name="policies",
    measure=_measure,
    expectations=_expectations,
    values=lambda found: {"targets": {title: _values(part) for title, part in found.items()}},
    plots={"headline.png": _draw_headline, "families.png": _draw_families, "time.png": _draw_time},
    is_per_target=True,
    beside="tuning",
)
