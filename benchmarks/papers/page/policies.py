"""Section 1 of the page: policies and task families; and the headline, which the README shows too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.papers.figures import Json
from benchmarks.papers.measure.policies import DRAFTING, MOST_TOKENS, PUBLISHED
from benchmarks.papers.page.parts import Finding, Found, listed, of_targets, paragraphs, title_of
from benchmarks.papers.page.tables import interval, measured, plain_options, ratio, table, times, why
from sage.bench.runners import AUTOREGRESSIVE

CAPTIONS = "caption"
OURS = "cost_aware"
ENOUGH = 2.0  # what issue and README promise on captions
SAGE_LEAD = 1.2  # over static, in tokens per pass


def headline(found: Found) -> str:
    """The table of the README's first screen; empty before it is measured."""
    tables = of_targets(found, "policies")
    if not tables:
        return ""
    head = ["decoder"]
    for target in tables:
        head += [f"{title_of(target)}: captions", "all families", "tokens/pass"]
    head.append("identical")
    names = [*next(iter(tables.values()))["baselines"], *DRAFTING]
    rows = [_headline_row(name, tables) for name in dict.fromkeys(names)]
    return table(head, rows)


def _headline_row(name: str, tables: Mapping[str, Json]) -> list[str]:
    cells, same, total = [], 0, 0
    for figures in tables.values():
        part = part_of(figures, name)
        captions = part_of(figures["by_family"].get(CAPTIONS, {}), name)
        passes = part.get("tokens_per_target_pass") if part else None
        cells += [_times(captions), _times(part), f"{passes:.2f}" if passes else ""]
        same, total = same + (part or {}).get("match", 0), total + (part or {}).get("total", 0)
    shown = f"**`{name}`**" if name == OURS else f"`{name}`"
    return [shown, *(f"**{cell}**" if name == OURS and cell else cell for cell in cells), f"{same}/{total}" if total else ""]


def _times(part: Json | None) -> str:
    return times(part["speedup"]) if part else ""


def part_of(figures: Mapping[str, Any], name: str) -> Json | None:
    """A contestant's figures, policy or baseline; None where it took no part."""
    for kind in ("policies", "baselines"):
        if name in figures.get(kind, {}):
            part: Json = figures[kind][name]
            return part
    return None


# -- the section -----------------------------------------------------------------------------------------------------------


def body(found: Found) -> str:
    """Every decoder on every family, target by target."""
    tables = of_targets(found, "policies")
    parts = [_one(target, figures, found.get(f"tuning_{target}")) for target, figures in tables.items()]
    first = next(iter(tables.values()))
    intro = (
        f"Every policy tuned on the validation split, and `(published)` at its paper's own settings; `{MOST_TOKENS}` is "
        "`sage` tuned for tokens per target pass instead of speed; `cost_aware` keeps its defaults, and has decoded the "
        "validation prompts before to learn from them. `sage` and `cost_aware` draft nothing below a token that ends the "
        "answer; the others do, as their papers have it. All decoders take turns on the same prompts of the test split in "
        f"one process, {first['prompts']} prompts per target, median of {first['repeats']} runs, greedy, fp32. A "
        "speedup is against the fastest autoregressive decoder of the same run, with its 95% interval over prompts; "
        "`accepted` leaves the bonus token out, `tokens/pass` counts it."
    )
    limits = (
        "It shows how the rules compare on the same drafts, one machine and one request at a time. It does not show how "
        "they compare on a GPU, where a pass costs nearly the same whatever its tree, nor on targets whose answers are "
        "harder to guess."
    )
    return paragraphs(intro, *parts, limits)


def _one(target: str, figures: Json, tuned: Json | None) -> str:
    failed = [f"`{name}` is left out: {reason}." for name, reason in figures["failed_baselines"].items()]
    return paragraphs(
        f"### {title_of(target)}",
        _speeds(figures),
        " ".join(failed),
        _families(figures),
        _reasons(figures),
        _options(figures, tuned),
    )


def _speeds(figures: Json) -> str:
    head = [
        "decoder",
        "tokens/pass",
        "accepted",
        "tokens/s",
        "speedup",
        "95%",
        "end to end",
        "95%",
        "nodes",
        "levels",
        "identical",
    ]
    labels = [name for name in figures["policies"] if name != AUTOREGRESSIVE]
    rows = [_speed_row(name, figures["policies"][name]) for name in labels]
    others = {name: part for name, part in figures["baselines"].items()}
    return table(head, [*(_speed_row(name, part) for name, part in others.items()), *rows])


def _speed_row(name: str, part: Json) -> list[str]:
    drafts = "nodes_per_round" in part and part["nodes_per_round"] > 0
    counts = [f"{part['tokens_per_target_pass']:.2f}", f"{part['mean_accepted_draft']:.2f}"] if drafts else ["", ""]
    tree = [f"{part['nodes_per_round']:.1f}", f"{part['draft_steps_per_round']:.2f}"] if drafts else ["", ""]
    speeds = [f"{part['tokens_per_s']:.0f}", times(part["speedup"]), interval(part.get("speedup_ci"))]
    whole = [times(part["speedup_end_to_end"]), interval(part.get("speedup_end_to_end_ci"))]
    return [f"`{name}`", *counts, *speeds, *whole, *tree, f"{part['match']}/{part['total']}" if "match" in part else ""]


def _families(figures: Json) -> str:
    names = [name for name in DRAFTING if name in figures["policies"]]
    baselines = [name for name in figures["baselines"] if name != AUTOREGRESSIVE]
    head = ["speedup (accepted)", *figures["by_family"]]
    rows = []
    for name in [*baselines, *names]:
        cells = [_family_cell(part_of(family, name)) for family in figures["by_family"].values()]
        rows.append([f"`{name}`", *cells])
    return table(head, rows)


def _family_cell(part: Json | None) -> str:
    if part is None:
        return ""
    accepted = f" ({part['mean_accepted_draft']:.2f})" if "mean_accepted_draft" in part else ""
    return f"{times(part['speedup'])}{accepted}"


def _reasons(figures: Json) -> str:
    """Why the fastest policy is ahead of the next, from the time breakdown."""
    order = ranked(figures)
    if len(order) < 2:
        return ""
    first, second = order[:2]
    over = figures["margins"].get("over", {}).get(second) if figures["margins"].get("policy") == first else None
    ahead = f", paired by prompt {ratio(over)}" if over else ""
    cause = why(first, figures["policies"][first], second, figures["policies"][second])
    return f"Fastest as tuned: `{first}` before `{second}`{ahead}. {cause}."


def ranked(figures: Json) -> list[str]:
    """The policies as tuned, the fastest first."""
    names = [name for name in DRAFTING if name in figures["policies"]]
    return sorted(names, key=lambda name: -float(figures["policies"][name]["tokens_per_s"]))


def _options(figures: Json, tuned: Json | None) -> str:
    tried = {name: part["tried"] for name, part in (tuned or {}).get("policies", {}).items()}
    rows = [
        [f"`{label}`", plain_options(one["options"]), str(tried.get(label, ""))]
        for label, one in figures["contestants"].items()
        if one["options"]
    ]
    return table(["tuned", "settings", "tried"], rows, left=2) if rows else ""


# -- what was expected -----------------------------------------------------------------------------------------------------


def findings(found: Found) -> list[Finding]:
    """One line per expectation and target."""
    made = []
    for target, figures in of_targets(found, "policies").items():
        made += [_fast_enough(target, figures), _ahead_of_policies(target, figures), _ahead_of_others(target, figures)]
        made += [_sage_over_static(target, figures), _same_text(target, figures)]
    return [one for one in made if one is not None]


def _fast_enough(target: str, figures: Json) -> Finding | None:
    part = part_of(figures["by_family"].get(CAPTIONS, {}), OURS)
    if part is None:
        return None
    said = measured(part)
    if part["speedup"] < ENOUGH:
        autoregressive = figures["by_family"][CAPTIONS]["policies"][AUTOREGRESSIVE]
        said += ". " + why(OURS, part, AUTOREGRESSIVE, autoregressive)
    return Finding(f"{title_of(target)}: `{OURS}` at least {times(ENOUGH)} on captions", part["speedup"] >= ENOUGH, said)


def _ahead_of_policies(target: str, figures: Json) -> Finding | None:
    first, *rest = ranked(figures)
    if OURS not in figures["policies"] or not rest:
        return None
    claim = f"{title_of(target)}: `{OURS}` ahead of every other policy as tuned"
    if first != OURS:
        return Finding(claim, False, why(first, figures["policies"][first], OURS, figures["policies"][OURS]))
    over = figures["margins"]["over"].get(rest[0]) if figures["margins"].get("policy") == OURS else None
    lead = {"ratio": figures["policies"][OURS]["speedup"] / figures["policies"][rest[0]]["speedup"]} if over is None else over
    return Finding(claim, True, f"{ratio(lead)} of the speed of the next, `{rest[0]}`")


def _ahead_of_others(target: str, figures: Json) -> Finding | None:
    others = {name: part for name, part in figures["baselines"].items() if name != AUTOREGRESSIVE}
    if OURS not in figures["policies"] or not others:
        return None
    best = max(others, key=lambda name: others[name]["speedup"])
    own = figures["policies"][OURS]["speedup"]
    said = f"{times(own)} against {times(others[best]['speedup'])} of `{best}`"
    return Finding(f"{title_of(target)}: `{OURS}` ahead of all of Hugging Face's decoders", own > others[best]["speedup"], said)


def _sage_over_static(target: str, figures: Json) -> Finding | None:
    policies = figures["policies"]
    static = policies.get(PUBLISHED.format("static"), policies.get("static"))
    if static is None or MOST_TOKENS not in policies:
        return None
    base, lead = static["tokens_per_target_pass"], policies[MOST_TOKENS]["tokens_per_target_pass"]
    said = [f"`{name}` {policies[name]['tokens_per_target_pass'] / base - 1:+.0%}" for name in _sages(policies)]
    speeds = listed([f"{times(policies[name]['speedup'])}" for name in _sages(policies)])
    return Finding(
        f"{title_of(target)}: `sage` at least 20% more tokens per pass than the static tree of 25 nodes",
        lead >= SAGE_LEAD * base,
        f"{listed(said)}; their speedups are {speeds}, the static tree's {times(static['speedup'])}",
    )


def _sages(policies: Mapping[str, Any]) -> list[str]:
    return [name for name in (MOST_TOKENS, "sage", PUBLISHED.format("sage")) if name in policies]


def _same_text(target: str, figures: Json) -> Finding:
    different = {n: part["total"] - part["match"] for n, part in figures["policies"].items() if part["match"] < part["total"]}
    count = len(figures["policies"])
    said = f"all {count} on all {figures['prompts']} prompts"
    if different:
        gaps = [gap for name in different for gap in figures["policies"][name]["first_gaps"]]
        said = f"{len(different)} of {count} differ somewhere; the target's top-2 logit gap there is at most {max(gaps):.2g}"
    return Finding(f"{title_of(target)}: every policy gives the target's own text", not different, said)
