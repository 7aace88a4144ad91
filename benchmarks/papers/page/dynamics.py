"""Sections of the page about what changes within an answer: its length, the temperature, the draft's entropy."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from benchmarks.papers.figures import Json
from benchmarks.papers.measure.policies import PUBLISHED
from benchmarks.papers.page.parts import Finding, Found, listed, paragraphs, title_of
from benchmarks.papers.page.tables import table, times

STATIC, SAGE = PUBLISHED.format("static"), PUBLISHED.format("sage")
NOISE = 0.1  # a correlation of some hundred pairs below this is none

# -- length ----------------------------------------------------------------------------------------------------------------


def length(found: Found) -> str:
    """Forced lengths, and stretches of answers that end by themselves."""
    figures = found["length"]
    names = list(figures["forced"][0]["policies"])
    head = [
        "tokens",
        *(f"`{name}` tokens/pass" for name in names),
        *(f"`{name}` speedup" for name in names),
        "`sage` over `static`",
    ]
    rows = [_length_row(row, names) for row in figures["forced"]]
    stretches = [
        [f"{row['from']} to {row['to']}", str(row["rounds"]), *(f"{row['policies'][name]:.2f}" for name in row["policies"])]
        for row in figures["stretches"]
    ]
    labels = list(figures["stretches"][0]["policies"])
    return paragraphs(
        f"Answers forced to a length (the end is forbidden before it), {title_of(figures['target'])}, captions, "
        f"{figures['forced'][0]['prompts']} prompts, policies as published.",
        table(head, rows),
        "Answers that end by themselves, by where in the answer a round starts, replayed on the same drafts (tokens per pass):",
        table(["tokens so far", "rounds", *(f"`{name}`" for name in labels)], stretches),
        "It shows what policies make of longer answers of one target. Pocket captions end by themselves after some fifty "
        "tokens; what is forced out of the target beyond that is repetition, which no longer tells policies apart as a "
        "paper's long answers do.",
    )


def _length_row(row: Json, names: list[str]) -> list[str]:
    parts = [row["policies"][name] for name in names]
    counts = [f"{part['tokens_per_target_pass']:.2f}" for part in parts]
    return [str(row["length"]), *counts, *(times(part["speedup"]) for part in parts), f"{_gain(row):+.1%}"]


def _gain(row: Json) -> float:
    """In accepted drafted tokens, as the paper counts."""
    own, base = (row["policies"][name]["mean_accepted_draft"] for name in (SAGE, STATIC))
    return float(own / max(base, 1e-9) - 1)


def length_findings(found: Found) -> list[Finding]:
    """SAGE's Figure 3: its gain over a static tree grows with the length."""
    if "length" not in found:
        return []
    gains = {row["length"]: _gain(row) for row in found["length"]["forced"]}
    grows = all(after > before for before, after in pairwise(gains.values()))
    said = ", ".join(f"{gain:+.0%} at {tokens}" for tokens, gain in gains.items()) + " in accepted tokens"
    return [Finding("SAGE: its gain over the static tree grows with the length of the answer", grows, said)]


# -- temperature -----------------------------------------------------------------------------------------------------------


def temperature(found: Found) -> str:
    """Acceptance, speed and equality by temperature."""
    rows = found["temperature"]["rows"]
    names = list(rows[0]["policies"])
    head = [
        "target",
        "T",
        *(f"`{name}` tokens/pass" for name in names),
        *(f"`{name}` speedup" for name in names),
        "identical by seed",
    ]
    cells = []
    for row in rows:
        parts = [row["policies"][name] for name in names]
        same, total = (sum(part[key] for part in parts) for key in ("match", "total"))
        counts = [f"{part['tokens_per_target_pass']:.2f}" for part in parts]
        speeds = [times(part["speedup"]) for part in parts]
        cells.append([title_of(row["target"]), f"{row['temperature']:g}", *counts, *speeds, f"{same}/{total}"])
    return paragraphs(
        f"Sampling at a temperature with one seed, {rows[0]['prompts']} prompts per target, policies as tuned on greedy "
        "answers. *Identical by seed* counts policies times prompts whose text equals that of decoding without speculation "
        "and the same seed.",
        table(head, cells),
        "It shows that one seed gives one text under every policy, and what sampling costs in acceptance. It does not show "
        "other schemes of acceptance: ours takes a drafted token only where it is the very token that was drawn.",
    )


def temperature_findings(found: Found) -> list[Finding]:
    """Acceptance falls with temperature; texts stay equal."""
    if "temperature" not in found:
        return []
    rows, made = found["temperature"]["rows"], []
    parts = [part for row in rows for part in row["policies"].values()]
    same, total = (sum(part[key] for part in parts) for key in ("match", "total"))
    made.append(
        Finding("Ours: one seed, one text, under every policy at every temperature", same == total, f"{same} of {total}")
    )
    for target in dict.fromkeys(row["target"] for row in rows):
        own = [row for row in rows if row["target"] == target]
        curve = {row["temperature"]: row["policies"]["chain"]["tokens_per_target_pass"] for row in own}
        said = ", ".join(f"{value:.2f} at {degree:g}" for degree, value in curve.items()) + " tokens per pass of `chain`"
        falls = all(after <= before for before, after in pairwise(curve.values()))
        made.append(Finding(f"SpecVLM: acceptance falls with the temperature, {title_of(target)}", falls, said))
    return made


# -- entropy ---------------------------------------------------------------------------------------------------------------


def entropy(found: Found) -> str:
    """Autocorrelation, and what alpha foretells."""
    targets = found["entropy"]["targets"]
    lags = range(1, len(next(iter(targets.values()))["by_token"]) + 1)
    rows = []
    for target, figures in targets.items():
        for unit in ("token", "round"):
            count = figures["tokens" if unit == "token" else "rounds"]
            rows.append([title_of(target), f"{unit}s ({count})", *map(_number, figures[f"by_{unit}"])])
    lengths = [
        [title_of(target), _number(one["length_from_this_round"]), _number(one["length_from_last_round"])]
        for target, one in targets.items()
    ]
    return paragraphs(
        "Correlation of the draft's confidence alpha (one minus the normalised entropy of its ten best) with itself, by lag "
        "within an answer: from token to token along the answer, and from one round's root to the next one's.",
        table(["target", "lag in", *map(str, lags)], rows, left=2),
        "Correlation of alpha at a round's root with how far that round's drafts follow the answer: this round's alpha, and "
        "the last round's, which is what the paper plans by.",
        table(["target", "this round's alpha", "the last round's"], lengths),
        "It shows how much the past of the entropy says about its future on these drafts. It does not show that acting on "
        "it pays; the ablations below do.",
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}"


def entropy_findings(found: Found) -> list[Finding]:
    """SAGE's Figure 2, and its lookahead."""
    if "entropy" not in found:
        return []
    return [one for target, figures in found["entropy"]["targets"].items() for one in _entropy_findings(target, figures)]


def _entropy_findings(target: str, figures: dict[str, Any]) -> list[Finding]:
    near, rounds = figures["by_token"][0] or 0.0, figures["by_round"][0] or 0.0
    now, last = figures["length_from_this_round"] or 0.0, figures["length_from_last_round"] or 0.0
    memory = f"{near:+.2f} from token to token, {rounds:+.2f} from round to round"
    if min(near, rounds) <= NOISE:
        which = listed([unit for unit, value in (("tokens", near), ("rounds", rounds)) if value <= NOISE])
        memory += f": between {which} nothing is left to plan by"
    planned = f"{last:+.2f} from the last round's alpha, {now:+.2f} from this round's own"
    return [
        Finding(
            f"SAGE: entropy is correlated between neighbouring steps, {title_of(target)}", min(near, rounds) > NOISE, memory
        ),
        Finding(
            f"SAGE: the last round's alpha foretells this round's accepted length, {title_of(target)}",
            last > NOISE and last >= now / 2,
            planned,
        ),
    ]
