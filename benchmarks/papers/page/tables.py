"""From a bench report to the figures worth keeping, and from figures to Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.papers.figures import Json
from sage.bench.measurement import Measurement
from sage.bench.summary import summarize
from sage.stats import PHASES

KEPT = (
    *("tokens_per_target_pass", "mean_accepted_draft", "nodes_per_round", "draft_steps_per_round", "rounds", "tokens"),
    *("tokens_per_s", "tokens_per_s_ci", "speedup", "speedup_ci", "speedup_end_to_end", "speedup_end_to_end_ci"),
    *("match", "total", "match_hf", "first_gaps", "time_s", "is_autoregressive", "prompt_tokens", "draft_context"),
)


def kept(measurement: Measurement, target: Any, labels: Sequence[str]) -> Json:
    """A measurement's figures: every policy and baseline over all prompts, margins, and the same by family.

    Args:
        labels: runners to report as policies; the others are baselines.
    """
    families = list(dict.fromkeys(prompt.family for prompt in measurement.prompts))
    return {
        **_summary(measurement, target, labels),
        "repeats": measurement.repeats,
        "by_family": {family: _summary(only(measurement, family), target, labels) for family in families},
    }


def _summary(measurement: Measurement, target: Any, labels: Sequence[str]) -> Json:
    found = summarize(measurement, target, labels)
    return {
        "prompts": len(measurement.prompts),
        "fastest_baseline": found["fastest_baseline"],
        "failed_baselines": found["failed_baselines"],
        "margins": found["margins"],
        "policies": {name: _kept(part) for name, part in found["policies"].items()},
        "baselines": {name: _kept(part) for name, part in found["baselines"].items()},
    }


def _kept(part: Mapping[str, Any]) -> Json:
    return {key: part[key] for key in KEPT if key in part}


def only(measurement: Measurement, family: str) -> Measurement:
    """The part of a measurement that is of one family's prompts."""
    chosen = [index for index, prompt in enumerate(measurement.prompts) if prompt.family == family]
    return replace(
        measurement,
        prompts=[measurement.prompts[index] for index in chosen],
        runs={name: [own[index] for index in chosen] for name, own in measurement.runs.items()},
    )


# -- Markdown ----------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table whose first `left` columns are left-aligned and the others right-aligned."""
    rule = [":--" if column < left else "--:" for column in range(len(head))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *rows])


def times(value: float) -> str:
    """`2.31x`."""
    return f"{value:.2f}x"


def interval(bounds: Sequence[float] | None) -> str:
    """`1.94-2.31`, or nothing where there is no interval."""
    return "" if not bounds or bounds[0] == bounds[1] else f"{bounds[0]:.2f}-{bounds[1]:.2f}"


def measured(part: Mapping[str, Any]) -> str:
    """`2.31x (1.94-2.68)`, without brackets where there is no interval."""
    bounds = interval(part.get("speedup_ci"))
    return f"{times(part['speedup'])} ({bounds})" if bounds else times(part["speedup"])


def ratio(over: Mapping[str, Any]) -> str:
    """The same of a paired margin."""
    return measured({"speedup": over["ratio"], "speedup_ci": over.get("ci")})


def plain_options(options: Mapping[str, Any]) -> str:
    """`depth 8, top_k 2`; the paths of a static tree by their number."""
    return ", ".join(f"{key} {f'{len(value)} nodes' if key == 'paths' else value}" for key, value in options.items())


def per_round(part: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds of one round by what they went to: the target's pass, the draft, everything else."""
    rounds = max(part["rounds"], 1)
    time_s = {stage: part["time_s"].get(stage, 0.0) for stage in PHASES}
    draft = time_s["draft_prefill"] + time_s["draft_steps"]
    rest = sum(time_s[stage] for stage in ("accept", "commit", "policy", "other"))
    milliseconds = {"target": time_s["verify"], "draft": draft, "other": rest}
    return {name: 1e3 * seconds / rounds for name, seconds in milliseconds.items()}


def why(name: str, part: Mapping[str, Any], other: str, against: Mapping[str, Any]) -> str:
    """Where a difference in speed comes from: tokens per round, and what a round costs."""
    own, theirs = per_round(part), per_round(against)
    return (
        f"`{name}` gets {part['tokens_per_target_pass']:.2f} tokens from a round of {sum(own.values()):.2f} ms (target "
        f"{own['target']:.2f} for {part['nodes_per_round']:.1f} nodes, draft {own['draft']:.2f}, other {own['other']:.2f}), "
        f"`{other}` {against['tokens_per_target_pass']:.2f} from {sum(theirs.values()):.2f} ms (target {theirs['target']:.2f} "
        f"for {against['nodes_per_round']:.1f} nodes, draft {theirs['draft']:.2f}, other {theirs['other']:.2f})"
    )
