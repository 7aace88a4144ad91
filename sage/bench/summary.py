"""Summary of a measurement for `report.json`: medians over repeats, totals over prompts, intervals over prompts.

A speed is a ratio of totals, sum of tokens / sum of median seconds. A speedup is the speed of a policy relative to the
*fastest* autoregressive runner of the same measurement. Counts and time breakdown are those of each prompt's median run.

Intervals are bootstrap confidence intervals over prompts. Prompts are resampled, not repeats: they differ far more from each
other than the repeats of one prompt, which are reduced to a median beforehand. Method and baseline are resampled together, so
the difficulty of a prompt, which affects both, cancels.

Legend: P prompts, R resamples, V vocabulary.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from sage.bench.measurement import Measurement
from sage.bench.runners import AUTOREGRESSIVE, HF_GENERATE, Runner, TimedRun
from sage.runtime.timing import PHASES
from sage.tracing.trace_page import num_equal

logger = logging.getLogger(__name__)

Runs = list[list[TimedRun]]  # [prompt][repeat]
LEVEL = 0.95
RESAMPLES = 2000


def summarize(measurement: Measurement, target: Any, policies: Sequence[str]) -> dict[str, Any]:
    """Returns the report's sections `policies`, `baselines`, `margins`, `fastest_baseline`, `failed_baselines`, `by_family`.

    Args:
        target: computes the top-2 gaps where a generation differs from the target's own.
        policies: names of runners to report as policies, in this order; all other runners are baselines, and
            `autoregressive` is always listed as a baseline.
    """
    runs = measurement.runs
    fastest = max(measurement.autoregressive, key=lambda name: decode_rate(runs[name]))
    if decode_rate(runs[fastest]) == 0.0:
        logger.warning("every answer ended with its first token; no decoding speed was measured")
    baselines = [AUTOREGRESSIVE, *(name for name in runs if name not in policies and name != AUTOREGRESSIVE)]
    return {
        "fastest_baseline": fastest,
        "margins": _margins(measurement, policies),
        "policies": {name: _policy(measurement, target, name, fastest) for name in policies},
        "baselines": {name: _baseline(measurement, name, fastest) for name in baselines if name in runs},
        "failed_baselines": dict(measurement.failed),
        "by_family": _by_family(measurement, policies, fastest),
    }


def decode_rate(runs: Runs) -> float:
    return _rate(*_decode(runs))


def pooled_counts(runs: Runs) -> dict[str, float]:
    """Returns counts over all rounds of all runs.

    `mean_accepted_draft` is the mean over rounds; `tokens_per_target_pass` weights each generation by its target passes.
    """
    answers = [run.stats for repeats in runs for run in repeats]
    accepted = [count for stats in answers for count in stats.accepted]
    rounds = sum(stats.rounds for stats in answers)
    passes = sum(stats.target_passes for stats in answers)
    nodes = sum(entry.get("nodes", 0) for stats in answers for entry in stats.rounds_log)
    tokens = sum(stats.tokens_per_target_pass * stats.target_passes for stats in answers)
    return {
        "mean_accepted_draft": sum(accepted) / len(accepted) if accepted else 0.0,
        "tokens_per_target_pass": tokens / passes if passes else 0.0,
        "draft_steps_per_round": sum(stats.draft_steps for stats in answers) / rounds if rounds else 0.0,
        "nodes_per_round": nodes / rounds if rounds else 0.0,
    }


def acceptance_by_depth(runs: Runs) -> list[dict[str, int]]:
    """Returns conditional acceptance, [{"depth": 1, "tried": rounds, "kept": rounds}, ...] down to the deepest drafted level.

    `tried` counts rounds that accepted depth - 1 tokens and drafted deeper, `kept` those of them that accepted one more.
    """
    log = [entry for repeats in runs for run in repeats for entry in run.stats.rounds_log]
    deepest = max((entry["depth"] for entry in log), default=0)
    levels = []
    for depth in range(1, deepest + 1):
        tried = [entry for entry in log if entry["accepted"] >= depth - 1 and entry["depth"] >= depth]
        kept = sum(entry["accepted"] >= depth for entry in tried)
        levels.append({"depth": depth, "tried": len(tried), "kept": kept})
    return [level for level in levels if level["tried"]]


def _policy(measurement: Measurement, target: Any, name: str, fastest: str) -> dict[str, Any]:
    runs = measurement.runs[name]
    chosen = [[_median_run(repeats)] for repeats in runs]
    return {
        **pooled_counts(chosen),
        **_speeds(runs, measurement.runs[fastest]),
        **_losslessness(measurement, target, name),
        "time_s": {phase: sum(run.time_s.get(phase, 0.0) for [run] in chosen) for phase in PHASES},
        "rounds": sum(run.stats.rounds for [run] in chosen),
        "prompt_tokens": mean(run.stats.prompt_tokens for [run] in chosen),
        "draft_context": mean(run.stats.draft_context for [run] in chosen),
        "acceptance_by_depth": acceptance_by_depth(chosen),
        "per_prompt": [
            {
                "name": prompt.name,
                "family": prompt.family,
                "tokens": len(repeats[0].tokens),
                "tokens_per_target_pass": pooled_counts([median_run])["tokens_per_target_pass"],
            }
            for prompt, repeats, median_run in zip(measurement.prompts, runs, chosen, strict=True)
        ],
    }


def _baseline(measurement: Measurement, name: str, fastest: str) -> dict[str, Any]:
    runs = measurement.runs[name]
    same = _differences(measurement.runs.get(AUTOREGRESSIVE, runs), runs).count(None)
    section = _speeds(runs, measurement.runs[fastest])
    return {**section, "match": same, "total": len(runs)} if measurement.sampling.temperature == 0 else section


def _margins(measurement: Measurement, policies: Sequence[str]) -> dict[str, Any]:
    """Returns the lead of the fastest policy over every other runner: ratio of decode speeds, paired by prompt, as {"policy":
    name, "over": {name: {"ratio": float, "ci": [low, high]}}}, no "ci" for one prompt; {} without a policy that drafts.

    Intervals of two speedups may overlap although one policy is faster on every prompt; paired margins avoid this problem.
    """
    rates = {name: decode_rate(measurement.runs[name]) for name in policies if name not in measurement.autoregressive}
    if not rates:
        return {}
    best = max(rates, key=lambda name: rates[name])
    fastest, over = _decode(measurement.runs[best]), {}
    for name, runs in measurement.runs.items():
        if name != best:
            other = _decode(runs)
            bounds = rate_interval(*fastest, *other)
            ratio = _ratio_or_zero(_rate(*fastest), _rate(*other))
            over[name] = {"ratio": ratio, **({"ci": list(bounds)} if bounds else {})}
    return {"policy": best, "over": over}


def _speeds(runs: Runs, base: Runs) -> dict[str, Any]:
    """Returns speed and speedups, that of decoding with its 95% interval over prompts; no interval for a single prompt."""
    decode, base_decode = _decode(runs), _decode(base)
    bounds = rate_interval(*decode, *base_decode)
    return {
        "tokens_per_s": _rate(*decode),
        "speedup": _ratio_or_zero(_rate(*decode), _rate(*base_decode)),
        "speedup_end_to_end": _ratio_or_zero(_rate(*_end_to_end(runs)), _rate(*_end_to_end(base))),
        "tokens": sum(len(repeats[0].tokens) for repeats in runs),
        **({"speedup_ci": list(bounds)} if bounds else {}),
    }


def _losslessness(measurement: Measurement, target: Any, name: str) -> dict[str, Any]:
    """Compares with the target's own decoding: by this decoder (same seed when sampling) and, if greedy, by `generate`."""
    own = measurement.runs[name]
    differences = _differences(measurement.runs[AUTOREGRESSIVE], own)
    gaps = [
        top2_gap(target, prompt.inputs, repeats[0].tokens[:index])
        for prompt, repeats, index in zip(measurement.prompts, measurement.runs[AUTOREGRESSIVE], differences, strict=True)
        if index is not None
    ]
    section = {"match": differences.count(None), "total": len(own), "first_gaps": gaps}
    if HF_GENERATE in measurement.runs and measurement.sampling.temperature == 0:
        section["match_hf"] = _differences(measurement.runs[HF_GENERATE], own).count(None)
    return section


def _differences(reference: Runs, own: Runs) -> list[int | None]:
    """Returns, per prompt, the first token in which any repeat differs; None where all are equal."""
    found = []
    for (first, *_), repeats in zip(reference, own, strict=True):
        indices = (first_difference(first.tokens, run.tokens) for run in repeats)
        found.append(min((index for index in indices if index is not None), default=None))
    return found


def _by_family(measurement: Measurement, policies: Sequence[str], fastest: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for family in sorted({prompt.family for prompt in measurement.prompts if prompt.family}):
        chosen = [index for index, prompt in enumerate(measurement.prompts) if prompt.family == family]
        base_rate = decode_rate([measurement.runs[fastest][index] for index in chosen])
        found[family] = {}
        for name in policies:
            runs = [measurement.runs[name][index] for index in chosen]
            counts = pooled_counts([[_median_run(repeats)] for repeats in runs])
            found[family][name] = {
                "prompts": len(chosen),
                "mean_accepted_draft": counts["mean_accepted_draft"],
                "tokens_per_target_pass": counts["tokens_per_target_pass"],
                "tokens_per_s": decode_rate(runs),
                "speedup": _ratio_or_zero(decode_rate(runs), base_rate),
            }
    return found


def _median_run(repeats: Sequence[TimedRun]) -> TimedRun:
    return sorted(repeats, key=lambda run: run.decode_s)[(len(repeats) - 1) // 2]


def _decode(runs: Runs) -> tuple[list[float], list[float]]:
    """Returns, per prompt, tokens decoded after the prefill and their median seconds."""
    tokens = [float(median(run.decode_tokens for run in repeats)) for repeats in runs]
    return tokens, [median(run.decode_s for run in repeats) for repeats in runs]


def _end_to_end(runs: Runs) -> tuple[list[float], list[float]]:
    tokens = [float(median(len(run.tokens) for run in repeats)) for repeats in runs]
    return tokens, [median(run.wall_s for run in repeats) for repeats in runs]


def _rate(tokens: Sequence[float], seconds: Sequence[float]) -> float:
    return _ratio_or_zero(sum(tokens), sum(seconds))


def _ratio_or_zero(value: float, by: float) -> float:
    """Returns 0.0 if nothing was decoded: reports contain finite numbers only."""
    return value / by if by > 0 else 0.0


def rate_interval(
    tokens: Sequence[float], seconds: Sequence[float], base_tokens: Sequence[float] = (), base_seconds: Sequence[float] = ()
) -> tuple[float, float] | None:
    """Returns the interval (low, high) of sum tokens / sum seconds, with a base over that of the base, prompts resampled in
    pairs; None for fewer than two prompts, or if nothing was decoded.
    """
    if len(tokens) < 2:
        return None
    rates_R = _rates(tokens, seconds) / (_rates(base_tokens, base_seconds) if base_tokens else 1.0)
    finite_R = rates_R[torch.isfinite(rates_R)]  # a resample of one-token answers only has no decoding speed
    if not len(finite_R):
        return None
    tail = (1.0 - LEVEL) / 2.0
    low, high = torch.quantile(finite_R, torch.tensor([tail, 1.0 - tail], dtype=torch.float64)).tolist()
    return low, high


def _rates(tokens: Sequence[float], seconds: Sequence[float]) -> Tensor:
    """Returns tokens per second [R] of every resample; the same prompts are drawn, with replacement, in every call."""
    drawn_RP = torch.randint(len(tokens), (RESAMPLES, len(tokens)), generator=torch.Generator().manual_seed(0))
    tokens_P = torch.tensor(tokens, dtype=torch.float64)
    seconds_P = torch.tensor(seconds, dtype=torch.float64)
    return tokens_P[drawn_RP].sum(1) / seconds_P[drawn_RP].sum(1).clamp_min(1e-12)


def first_difference(reference: Sequence[int], other: Sequence[int]) -> int | None:
    """Returns the index of the first token that differs or is missing; None if the generations are equal."""
    index = num_equal(reference, other)
    return None if index == len(reference) == len(other) else index


@torch.no_grad()
def top2_gap(target: Any, inputs: Mapping[str, Tensor], prefix: Sequence[int]) -> float:
    """Returns the target's logit gap between its two best next tokens after the prompt and `prefix`, by a pass without a cache.

    At a gap near the rounding error of the dtype, two correct computations may disagree; a large gap indicates a bug.
    """
    prompt = inputs["input_ids"]
    ids = torch.cat([prompt, prompt.new_tensor([list(prefix)])], dim=1)
    tokens = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **target.family.token_inputs(ids)}
    logits_V = target.logits(target.features(target.embed({**inputs, **tokens})).last[0, -1]).float()
    best, second = torch.topk(logits_V, 2).values.tolist()
    return float(best - second)


class RunningFigures:
    """Tokens per target pass and speedup so far of the runners in `shown` that draft; the fastest autoregressive one so far is
    the baseline.
    """

    def __init__(self, runners: Sequence[Runner], shown: Sequence[str]) -> None:
        self._baselines = [runner.name for runner in runners if runner.is_autoregressive]
        self._shown = [name for name in shown if name not in self._baselines]
        self._runs: defaultdict[str, Runs] = defaultdict(list)

    def add(self, runs: Mapping[str, TimedRun]) -> None:
        for name, run in runs.items():
            self._runs[name].append([run])

    def __str__(self) -> str:
        """`sage 2.31 tokens/pass 1.85x, chain 2.10 tokens/pass 1.60x`; empty before the first run."""
        base = max((decode_rate(self._runs[name]) for name in self._baselines), default=0.0)
        parts = []
        for name in self._shown:
            if tokens := pooled_counts(self._runs[name])["tokens_per_target_pass"]:
                speedup = f" {decode_rate(self._runs[name]) / base:.2f}x" if base else ""
                parts.append(f"{name} {tokens:.2f} tokens/pass{speedup}")
        return ", ".join(parts)
