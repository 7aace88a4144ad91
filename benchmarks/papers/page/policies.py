"""Section: policies and task families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.papers.figures import Json
from benchmarks.papers.measure.policies import MOST_TOKENS, PUBLISHED
from benchmarks.papers.page.headline import CAPTIONS, OURS, decoders, part_of, tuned_policies
from benchmarks.papers.page.markdown import (
    Expectation,
    Figures,
    by_target,
    cells,
    fill,
    interval,
    join,
    options_text,
    times,
    times_with_interval,
    title_of,
)
from benchmarks.papers.page.plots import bar_labels, legend_below, policy_line, target_panels
from sage.bench.runners import AUTOREGRESSIVE
from sage.io.tables import markdown_table
from sage.runtime.timing import PHASES
from train.report import style

CAPTION_SPEEDUP = 2.0  # our goal
SAGE_LEAD = 1.2  # over static, in tokens per pass
DRAFTED, TREE = ("tokens/pass", "accepted"), ("nodes", "levels")
DECODED = ("tokens/s", "speedup", "95%")
BASELINE_LINE: dict[str, Any] = {"color": style.INK, "linewidth": 1.0, "linestyle": (0, (4, 3))}


def values(figures: Figures) -> dict[str, Any]:
    """Returns the placeholders of policies.md."""
    tables = by_target(figures, "policies")
    first = next(iter(tables.values()))
    blocks = [_target(target, part, figures.get(f"tuning_{target}", {})) for target, part in tables.items()]
    counts = {"prompts": first["prompts"], "repeats": first["repeats"], "passes": first["passes"]}
    return {**counts, "most_tokens": MOST_TOKENS, "targets": join(*blocks)}


def _target(target: str, figures: Json, tuning: Json) -> str:
    failed = [f"`{name}` is not measured: {reason}." for name, reason in figures["failed_baselines"].items()]
    speeds = figures["baselines"] | {name: part for name, part in figures["policies"].items() if name != AUTOREGRESSIVE}
    head = ["decoder", *DRAFTED, *DECODED, "end to end", "95%", *TREE, "identical"]
    return fill(
        "policies_target",
        title=title_of(target),
        speeds=markdown_table(head, [_speed_row(name, part) for name, part in speeds.items()]),
        failed=" ".join(failed),
        families=_families(figures),
        fastest=_fastest(figures),
        options=_options(figures, tuning),
    )


def _speed_row(name: str, part: Json) -> list[str]:
    drafted = part if part.get("nodes_per_round", 0) > 0 else {}
    end_to_end = [times(part["speedup_end_to_end"]), interval(part.get("speedup_end_to_end_ci"))]
    drafted_cells, tree = cells(drafted, *DRAFTED), cells(drafted, *TREE)
    return [f"`{name}`", *drafted_cells, *cells(part, *DECODED), *end_to_end, *tree, *cells(part, "identical")]


def _families(figures: Json) -> str:
    names = [name for name in figures["baselines"] if name != AUTOREGRESSIVE] + tuned_policies(figures)
    families = figures["by_family"].values()
    rows = [[f"`{name}`", *(_family_cell(part_of(family, name)) for family in families)] for name in names]
    return markdown_table(["speedup (accepted)", *figures["by_family"]], rows)


def _family_cell(part: Json) -> str:
    speedup, accepted = cells(part, "speedup", "accepted")
    return f"{speedup} ({accepted})" if accepted else speedup


def _by_speed(figures: Json) -> list[str]:
    return sorted(tuned_policies(figures), key=lambda name: -float(figures["policies"][name]["tokens_per_s"]))


def _fastest(figures: Json) -> str:
    """Compares the fastest tuned policy with the second fastest."""
    order = _by_speed(figures)
    if len(order) < 2:
        return ""
    first, second = order[:2]
    margin = _margin(figures, first, second)
    paired = f", {times_with_interval(margin['ratio'], margin.get('ci'))} paired by prompt" if margin else ""
    rounds = _explain_speeds(figures["policies"], first, second)
    return f"Fastest tuned policy: `{first}`, followed by `{second}`{paired}. {rounds}."


def _margin(figures: Json, first: str, second: str) -> Json:
    margins = figures["margins"]
    margin: Json = margins.get("over", {}).get(second, {}) if margins.get("policy") == first else {}
    return margin


def _explain_speeds(parts: Mapping[str, Any], *names: str) -> str:
    """Returns tokens per round and the cost of a round of each policy."""
    return "; ".join(_round_text(name, parts[name]) for name in names)


def _round_text(name: str, part: Mapping[str, Any]) -> str:
    rounds = max(part["rounds"], 1)
    ms = {phase: 1e3 * part["time_s"].get(phase, 0.0) / rounds for phase in PHASES}
    draft_ms, host_ms = ms["draft_prefill"] + ms["draft_steps"], ms["accept"] + ms["commit"] + ms["policy"] + ms["other"]
    round_ms = ms["verify"] + draft_ms + host_ms
    return (
        f"`{name}`: {part['tokens_per_target_pass']:.2f} tokens per round of {round_ms:.2f} ms (target "
        f"{ms['verify']:.2f} ms for {part['nodes_per_round']:.1f} nodes, draft {draft_ms:.2f} ms, host {host_ms:.2f} ms)"
    )


def _options(figures: Json, tuning: Json) -> str:
    tried = {label: str(part["tried"]) for label, part in tuning.get("policies", {}).items()}
    tuned = {label: variant["options"] for label, variant in figures["variants"].items() if variant["options"]}
    rows = [[f"`{label}`", options_text(options), tried.get(label, "")] for label, options in tuned.items()]
    return markdown_table(["policy", "tuned options", "configurations replayed"], rows, "<<>") if rows else ""


def expectations(figures: Figures) -> list[Expectation]:
    """Returns the expectations for every target."""
    checks = (_caption_speedup, _faster_than_policies, _faster_than_baselines, _sage_over_static, _identical_text)
    results = [check(title_of(target), part) for target, part in by_target(figures, "policies").items() for check in checks]
    return [one for one in results if one is not None]


def _caption_speedup(title: str, figures: Json) -> Expectation | None:
    family = figures["by_family"].get(CAPTIONS, {})
    part = part_of(family, OURS)
    if not part:
        return None
    evidence = times_with_interval(part["speedup"], part.get("speedup_ci"))
    if part["speedup"] < CAPTION_SPEEDUP:
        evidence += f". {_explain_speeds(family['policies'], OURS, AUTOREGRESSIVE)}"
    claim = f"{title}: `{OURS}` at least {times(CAPTION_SPEEDUP)} on captions"
    return Expectation(claim, part["speedup"] >= CAPTION_SPEEDUP, evidence)


def _faster_than_policies(title: str, figures: Json) -> Expectation | None:
    first, *rest = _by_speed(figures)
    policies = figures["policies"]
    if OURS not in policies or not rest:
        return None
    claim = f"{title}: `{OURS}` faster than every other tuned policy"
    if first != OURS:
        return Expectation(claim, False, _explain_speeds(policies, first, OURS))
    margin = _margin(figures, OURS, rest[0]) or {"ratio": policies[OURS]["speedup"] / policies[rest[0]]["speedup"]}
    speed = times_with_interval(margin["ratio"], margin.get("ci"))
    return Expectation(claim, True, f"{speed} the speed of the second fastest, `{rest[0]}`")


def _faster_than_baselines(title: str, figures: Json) -> Expectation | None:
    others = {name: part["speedup"] for name, part in figures["baselines"].items() if name != AUTOREGRESSIVE}
    if OURS not in figures["policies"] or not others:
        return None
    best, speedup = max(others, key=lambda name: float(others[name])), figures["policies"][OURS]["speedup"]
    evidence = f"{times(speedup)}; fastest Hugging Face decoder: `{best}`, {times(others[best])}"
    return Expectation(f"{title}: `{OURS}` faster than every Hugging Face decoder", speedup > others[best], evidence)


def _sage_over_static(title: str, figures: Json) -> Expectation | None:
    policies = figures["policies"]
    static = policies.get(PUBLISHED.format("static"), policies.get("static"))
    if static is None or MOST_TOKENS not in policies:
        return None
    base, lead = static["tokens_per_target_pass"], policies[MOST_TOKENS]["tokens_per_target_pass"]
    names = [name for name in (MOST_TOKENS, "sage", PUBLISHED.format("sage")) if name in policies]
    gains = [f"`{name}` {policies[name]['tokens_per_target_pass'] / base - 1:+.0%}" for name in names]
    claim = f"{title}: `sage` at least 20% more tokens per pass than the static tree of 25 nodes"
    speedups = ", ".join(times(policies[name]["speedup"]) for name in names)
    evidence = f"{', '.join(gains)}; speedups {speedups}, static tree {times(static['speedup'])}"
    return Expectation(claim, lead >= SAGE_LEAD * base, evidence)


def _identical_text(title: str, figures: Json) -> Expectation:
    policies = figures["policies"]
    different = [name for name, part in policies.items() if part["match"] < part["total"]]
    evidence = f"all {len(policies)} policies on all {figures['prompts']} prompts"
    if different:
        gap = max(gap for name in different for gap in policies[name]["first_gaps"])
        evidence = f"{len(different)} of {len(policies)} policies differ on some prompts; largest top-2 logit gap {gap:.2g}"
    return Expectation(f"{title}: every policy generates the target's own text", not different, evidence)


def draw_headline(figures: Figures) -> Figure:
    """Draws the speedup on captions as bars and over all families as dots; a panel per target."""
    tables = by_target(figures, "policies")
    names = decoders(tables)
    subtitle = "over the fastest autoregressive decoder, decoding only; bars: captions, 95% interval; dots: all families"
    figure = style.figure(1.5 + 0.33 * len(names), "Speedup of lossless decoding on two CPU cores", subtitle)
    panels, first = target_panels(figure, tables, "x")
    for target, axes in panels.items():
        for place, name in enumerate(names):
            _headline_bar(axes, place, name, tables[target])
        axes.axvline(1.0, **BASELINE_LINE)
        axes.set_xlim(left=0)
        axes.margins(x=0.16)
    bar_labels(first, names)
    return figure


def _headline_bar(axes: Axes, place: int, name: str, figures: Any) -> None:
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


def draw_families(figures: Figures) -> Figure:
    """Draws the speedup by task family, a line per tuned policy."""
    tables = by_target(figures, "policies")
    figure = style.figure(3.6, "Speedup by task family", "tuned policies, decoding only")
    panels, first = target_panels(figure, tables)
    for target, axes in panels.items():
        families = tables[target]["by_family"]
        for name in tuned_policies(tables[target]):
            speedups = [family["policies"][name]["speedup"] for family in families.values()]
            policy_line(axes, list(families), speedups, name, linewidth=2.2 if name in (OURS, "sage") else 1.0)
        axes.axhline(1.0, **BASELINE_LINE)
        axes.set_xticks(range(len(families)), list(families), rotation=35, ha="right", rotation_mode="anchor")
    first.set_ylabel("speedup")
    legend_below(figure, first, 5)
    return figure


def draw_time(figures: Figures) -> Figure:
    """Draws the milliseconds per token by phase, a bar per tuned policy. Ref: SAGE, arXiv 2602.00523, Table 6."""
    tables = by_target(figures, "policies")
    names = [AUTOREGRESSIVE, *tuned_policies(next(iter(tables.values())))]
    subtitle = "ms per generated token, without vision tower and target prefill"
    figure = style.figure(1.9 + 0.3 * len(names), "Decoding time by phase", subtitle)
    panels, first = target_panels(figure, tables, "x")
    for target, axes in panels.items():
        for place, name in enumerate(names):
            if name in tables[target]["policies"]:
                _phases(axes, place, tables[target]["policies"][name])
        axes.margins(x=0.12)
    bar_labels(first, names)
    legend_below(figure, first, 4)
    return figure


def _phases(axes: Axes, place: int, part: Any) -> None:
    left = 0.0
    for phase, (name, shade) in style.PHASES.items():
        width = 1e3 * part["time_s"].get(phase, 0.0) / max(part["tokens"], 1)
        label = name if place == 0 else None
        axes.barh(place, width, left=left, height=0.62, color=shade, label=label)
        left += width
    axes.text(left, place, f" {left:.2f}", va="center", fontsize=8.5)


PLOTS = {"headline.png": draw_headline, "families.png": draw_families, "time.png": draw_time}
