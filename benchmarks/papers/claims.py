"""The tables of claims on docs/results.md: what the papers and this project expected, and whether the figures meet it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from benchmarks.papers.tables import SAGE, STATIC, TITLES, Figures, gain, per_pass, static_gain, times
from sage.io.tables import markdown_table
from sage.trees import AUTOREGRESSIVE

NOISE = 0.02  # of gains and of tokens per pass

Claim = tuple[str, bool, str]  # what is expected, whether it is met, what was measured


def claims(studies: Mapping[str, Figures]) -> str:
    """What the papers and this project expected, unmet first."""
    decoders = [
        part for study in studies.values() for measured in study.values() for part in measured.get("decoders", {}).values()
    ]
    exact = [part for part in decoders if part.get("dtype", "fp32") == "fp32"]
    match, total = (sum(part.get(key, 0) for part in exact) for key in ("match", "total"))
    claim = "in float32, every decoder, ours and the engines', emits the target's own text"
    same = (claim, match == total, f"{match} of {total} texts")
    return _claim_table(sorted([*_paper_claims(studies), same], key=lambda claim: claim[1]))


def real_claims(studies: Mapping[str, Figures]) -> str:
    """The same of a published model and real language."""
    return _claim_table([*_sage_claims(studies), *_other_claims(studies)])


def _claim_table(rows: Iterable[Claim]) -> str:
    cells = [[claim, "yes" if is_met else "**no**", measured] for claim, is_met, measured in rows]
    return markdown_table(("expected", "met", "measured"), cells, "<<<")


def _paper_claims(studies: Mapping[str, Figures]) -> Iterator[Claim]:
    by_target = {name: part["decoders"] for name, part in studies["headline"].items()}
    gains = {name: gain(part["sage (most tokens)"], part[STATIC]) for name, part in by_target.items()}
    yield "SAGE: 20% more tokens per pass than the static tree", min(gains.values()) >= 0.2, _by_target(gains, "{:+.0%}")
    speeds = {name: part["sage"]["speedup"] / part["chain"]["speedup"] for name, part in by_target.items()}
    yield "SAGE: faster than a chain", min(speeds.values()) > 1, _by_target(speeds)
    policies = ("chain", "static", "eagle2", "ddd", "sage")
    leads = {
        name: part["cost_aware"]["speedup"] / max(part[policy]["speedup"] for policy in policies)
        for name, part in by_target.items()
    }
    yield "`cost_aware` at least as fast as every other policy, tuned", min(leads.values()) >= 1, _by_target(leads)
    correlations = {name: part["between_rounds"] or 0.0 for name, part in studies["confidence"].items()}
    yield "SAGE: alpha of neighboring rounds correlates", min(correlations.values()) > 0.1, _by_target(correlations, "{:+.2f}")
    by_length = {tokens: static_gain(part["decoders"]) for tokens, part in studies["length"].items()}
    measured = ", ".join(f"{value:+.0%} at {tokens}" for tokens, value in by_length.items())
    yield "SAGE: its gain grows with the length of the answer", _grows(by_length.values()), measured
    pruned = studies["pruning"]["qwen"]["decoders"]
    share = 1 + gain(pruned["0.9"], pruned["0.0"], "mean_accepted_draft")
    yield "SAGE: pruning 90% of the visual tokens keeps acceptance", share >= 0.98, f"{share:.0%} of the accepted tokens"
    heads = {name: part["speedup"] for name, part in studies["compressor"]["llava"]["decoders"].items()}
    plain, best = heads["none"], max(value for name, value in heads.items() if name not in ("none", AUTOREGRESSIVE))
    yield "SpecVLM: a compressed head is faster", best > plain, f"{times(best)}, uncompressed {times(plain)}"
    for name, part in studies["epochs"].items():
        tokens = part["tokens_per_target_pass"]
        yield f"SpecVLM: acceptance grows with every epoch, `{name}`", _grows(tokens), _listed(tokens, "{:.2f}")


def _sage_claims(studies: Mapping[str, Figures]) -> Iterator[Claim]:
    decoders, sources = studies["real"]["greedy"]["decoders"], studies["real"]["greedy"]["sources"]
    more, speeds = gain(decoders[SAGE], decoders[STATIC]), [decoders[name]["speedup"] for name in (SAGE, "chain")]
    yield "SAGE: 20% more tokens per pass than the static tree", more >= 0.2, f"{more:+.0%}"
    tasks = [gain(sources[name][SAGE], sources[name][STATIC]) for name in ("humaneval", "gsm8k")]
    yield "SAGE: more tokens per pass on HumanEval and GSM8K", min(tasks) > 0, _listed(tasks, "{:+.0%}")
    yield "SAGE: faster than a chain", speeds[0] > speeds[1], ", ".join(map(times, speeds))
    names = {
        "between_tokens": "alpha of neighboring tokens correlates",
        "between_rounds": "alpha of neighboring rounds correlates",
        "length_from_last_round": "alpha predicts the reachable length of the next round",
    }
    correlations = {claim: studies["real_confidence"]["smollm2"][key] or 0.0 for key, claim in names.items()}
    yield from ((f"SAGE: {claim}", value > 0.1, f"{value:+.2f}") for claim, value in correlations.items())
    lengths = [part["decoders"] for part in studies["real_length"].values()]
    gains = [static_gain(part) for part in lengths]
    history = [gain(part[SAGE], part["sage (no history)"]) for part in lengths]
    yield "SAGE: its gain grows with the length of the answer", _grows(gains), _listed(gains, "{:+.0%}")
    yield "SAGE: its history adds tokens at every length", min(history) > 0, _listed(history, "{:+.1%}")


def _other_claims(studies: Mapping[str, Figures]) -> Iterator[Claim]:
    decoders, tokens = studies["real"]["greedy"]["decoders"], studies["real_tokens"]["real_eagle3"].values()
    yield "SpecVLM: acceptance grows with training", _grows(tokens), _listed(tokens, "{:.2f}")
    dynamic, static = decoders["spec_llava"], decoders[STATIC]
    claim = "Spec-LLaVA: its dynamic tree of 24 nodes yields more than the static one of 25"
    yield claim, gain(dynamic, static) > 0, f"{per_pass(dynamic)}, {per_pass(static)} tokens per pass"
    speeds = {name: part["speedup"] for name, part in decoders.items() if name != AUTOREGRESSIVE and per_pass(part)}
    best = max(speeds, key=speeds.__getitem__)
    yield "a draft pays: at least 1.5x", speeds[best] >= 1.5, f"`{best}` {times(speeds[best])}"
    parts = [part for study in studies["real"].values() for part in study["decoders"].values()]
    match, total = (sum(part.get(key, 0) for part in parts) for key in ("match", "total"))
    yield "every text is the target's own", match == total, f"{match} of {total} texts"


def _grows(values: Iterable[float]) -> bool:
    """Returns whether values increase, by more than `NOISE` in all."""
    ordered = list(values)
    return ordered == sorted(ordered) and ordered[-1] - ordered[0] > NOISE


def _listed(values: Iterable[float], form: str) -> str:
    return ", ".join(map(form.format, values))


def _by_target(values: Mapping[str, float], form: str = "{:.2f}x") -> str:
    return ", ".join(f"{TITLES[name]} {form.format(value)}" for name, value in values.items())
