"""Section: policies and task families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.papers.figures import Json
from benchmarks.papers.measure.policies import MOST_TOKENS, PUBLISHED
from benchmarks.papers.page.expectations import Expectation
from benchmarks.papers.page.headline import CAPTIONS, OURS, part_of, tuned_policies
from benchmarks.papers.page.markdown import (
    Figures,
    by_target,
    fill,
    interval,
    join,
    options_text,
    times,
    times_with_interval,
    title_of,
)
from sage.bench.runners import AUTOREGRESSIVE
from sage.bench.tables import markdown_table
from sage.costs.timing import PHASES

CAPTION_SPEEDUP = 2.0  # promised by the README
SAGE_LEAD = 1.2  # over static, in tokens per pass
SPEED_COLUMNS = (
    *("decoder", "tokens/pass", "accepted", "tokens/s", "speedup", "95%", "end to end", "95%"),
    *("nodes", "levels", "identical"),
)


def values(figures: Figures) -> dict[str, str]:
    """Returns the placeholders of policies.md."""
    tables = by_target(figures, "policies")
    first = next(iter(tables.values()))
    blocks = [_target(target, part, figures.get(f"tuning_{target}")) for target, part in tables.items()]
    counts = {"prompts": str(first["prompts"]), "repeats": str(first["repeats"])}
    return {**counts, "most_tokens": MOST_TOKENS, "targets": join(*blocks)}


def _target(target: str, figures: Json, tuning: Json | None) -> str:
    failed = [f"`{name}` is not measured: {reason}." for name, reason in figures["failed_baselines"].items()]
    labels = [name for name in figures["policies"] if name != AUTOREGRESSIVE]
    speeds = {**figures["baselines"], **{name: figures["policies"][name] for name in labels}}
    return fill(
        "policies_target",
        title=title_of(target),
        speeds=markdown_table(SPEED_COLUMNS, [_speed_row(name, part) for name, part in speeds.items()]),
        failed=" ".join(failed),
        families=_families(figures),
        fastest=_fastest(figures),
        options=_options(figures, tuning),
    )


def _speed_row(name: str, part: Json) -> list[str]:
    counts = tree = ["", ""]
    if part.get("nodes_per_round", 0) > 0:
        counts = [f"{part['tokens_per_target_pass']:.2f}", f"{part['mean_accepted_draft']:.2f}"]
        tree = [f"{part['nodes_per_round']:.1f}", f"{part['draft_steps_per_round']:.2f}"]
    decode = [f"{part['tokens_per_s']:.0f}", times(part["speedup"]), interval(part.get("speedup_ci"))]
    end_to_end = [times(part["speedup_end_to_end"]), interval(part.get("speedup_end_to_end_ci"))]
    identical = f"{part['match']}/{part['total']}" if "match" in part else ""
    return [f"`{name}`", *counts, *decode, *end_to_end, *tree, identical]


def _families(figures: Json) -> str:
    names = [name for name in figures["baselines"] if name != AUTOREGRESSIVE] + tuned_policies(figures)
    rows = [[f"`{name}`", *(_family_cell(part_of(family, name)) for family in figures["by_family"].values())] for name in names]
    return markdown_table(["speedup (accepted)", *figures["by_family"]], rows)


def _family_cell(part: Json | None) -> str:
    if part is None:
        return ""
    accepted = f" ({part['mean_accepted_draft']:.2f})" if "mean_accepted_draft" in part else ""
    return f"{times(part['speedup'])}{accepted}"


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


def _margin(figures: Json, first: str, second: str) -> Json | None:
    margins = figures["margins"]
    margin: Json | None = margins.get("over", {}).get(second) if margins.get("policy") == first else None
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


def _options(figures: Json, tuning: Json | None) -> str:
    tried = {name: part["tried"] for name, part in (tuning or {}).get("policies", {}).items()}
    rows = [
        [f"`{label}`", options_text(variant["options"]), str(tried.get(label, ""))]
        for label, variant in figures["variants"].items()
        if variant["options"]
    ]
    return markdown_table(["policy", "tuned options", "configurations replayed"], rows, "<<>") if rows else ""


# -- expectations ----------------------------------------------------------------------------------------------------------


def expectations(figures: Figures) -> list[Expectation]:
    """Returns the expectations for every target."""
    checks = (_caption_speedup, _faster_than_policies, _faster_than_baselines, _sage_over_static, _identical_text)
    results = [check(title_of(target), part) for target, part in by_target(figures, "policies").items() for check in checks]
    return [one for one in results if one is not None]


def _caption_speedup(title: str, figures: Json) -> Expectation | None:
    family = figures["by_family"].get(CAPTIONS, {})
    part = part_of(family, OURS)
    if part is None:
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
    evidence = f"{', '.join(gains)}; speedups {_speeds(policies, names)}, static tree {times(static['speedup'])}"
    return Expectation(claim, lead >= SAGE_LEAD * base, evidence)


def _speeds(policies: Mapping[str, Any], names: Sequence[str]) -> str:
    return ", ".join(times(policies[name]["speedup"]) for name in names)


def _identical_text(title: str, figures: Json) -> Expectation:
    policies = figures["policies"]
    different = [name for name, part in policies.items() if part["match"] < part["total"]]
    evidence = f"all {len(policies)} policies on all {figures['prompts']} prompts"
    if different:
        gap = max(gap for name in different for gap in policies[name]["first_gaps"])
        evidence = f"{len(different)} of {len(policies)} policies differ on some prompts; largest top-2 logit gap {gap:.2g}"
    return Expectation(f"{title}: every policy generates the target's own text", not different, evidence)
