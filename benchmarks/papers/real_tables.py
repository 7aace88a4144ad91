"""The tables of docs/results.md about a published model and real language, from figures alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from benchmarks.papers.figures import Json
from benchmarks.papers.tables import Figures, gain, identical, per_pass, speedup, static_gain, table, times
from sage.io.tables import markdown_table

STATIC, SAGE = "static (published)", "sage (published)"


def real(figures: Figures) -> str:
    """Every decoder, the fastest on top."""
    greedy, sampled = figures["greedy"]["decoders"], figures["T = 0.7"]["decoders"]
    rows = []
    for name in sorted(greedy, key=lambda one: greedy[one]["speedup"], reverse=True):
        own, drawn = greedy[name], sampled.get(name, {})
        nodes = f"{own['nodes_per_round']:.1f}" if own.get("nodes_per_round") else ""
        cells = [per_pass(own), nodes, f"{own['tokens_per_s']:.1f}", speedup(own), per_pass(drawn), identical([own, drawn])]
        rows.append([f"`{name}`", *cells])
    head = ("decoder", "tokens/pass", "nodes/round", "tokens/s", "speedup (95%)", "tokens/pass, T = 0.7", "identical")
    return table(head, rows)


def real_sources(figures: Figures) -> str:
    """Tokens per pass by source of the prompts."""
    names = ("chain", STATIC, SAGE, "cost_aware")
    rows = [
        [source, str(part["chain"]["prompts"]), *(per_pass(part[name]) for name in names), times(part["chain"]["speedup"])]
        for source, part in figures["greedy"]["sources"].items()
    ]
    return table(("prompts from", "number", *(f"`{name}`" for name in names), "`chain`: speedup"), rows)


def real_tokens(figures: Figures) -> str:
    """Estimated tokens per pass by number of training tokens."""
    (part,) = figures.values()
    return table(
        ("training tokens", *(f"{int(tokens):,}" for tokens in part)), [["tokens/pass", *(f"{v:.2f}" for v in part.values())]]
    )


def real_claims(studies: Mapping[str, Figures]) -> str:
    """What the papers and this project expected."""
    rows = [*_sage_claims(studies), *_other_claims(studies)]
    cells = [[claim, "yes" if is_met else "**no**", measured] for claim, is_met, measured in rows]
    return markdown_table(("expected", "met", "measured"), cells, "<<<")


def _sage_claims(studies: Mapping[str, Figures]) -> Iterator[tuple[str, bool, str]]:
    decoders, sources = studies["real"]["greedy"]["decoders"], studies["real"]["greedy"]["sources"]
    more, speeds = gain(decoders[SAGE], decoders[STATIC]), [decoders[name]["speedup"] for name in (SAGE, "chain")]
    yield "SAGE: 20% more tokens per pass than the static tree", more >= 0.2, f"{more:+.0%}"
    tasks = [gain(sources[name][SAGE], sources[name][STATIC]) for name in ("humaneval", "gsm8k")]
    yield "SAGE: more tokens per pass on HumanEval and GSM8K", min(tasks) > 0, ", ".join(map("{:+.0%}".format, tasks))
    yield "SAGE: faster than a chain", speeds[0] > speeds[1], ", ".join(map(times, speeds))
    names = {
        "between_tokens": "alpha of neighboring tokens correlates",
        "between_rounds": "alpha of neighboring rounds correlates",
        "length_from_last_round": "alpha predicts the reachable length of the next round",
    }
    found = {claim: studies["real_confidence"]["smollm2"][key] or 0.0 for key, claim in names.items()}
    yield from ((f"SAGE: {claim}", value > 0.1, f"{value:+.2f}") for claim, value in found.items())
    lengths = [part["decoders"] for part in studies["real_length"].values()]
    gains = [static_gain(part) for part in lengths]
    history = [gain(part[SAGE], part["sage (no history)"]) for part in lengths]
    yield "SAGE: its gain grows with the length of the answer", gains == sorted(gains), ", ".join(map("{:+.0%}".format, gains))
    yield "SAGE: its history adds tokens at every length", min(history) > 0, ", ".join(map("{:+.1%}".format, history))


def _other_claims(studies: Mapping[str, Figures]) -> Iterator[tuple[str, bool, str]]:
    decoders, tokens = studies["real"]["greedy"]["decoders"], list(studies["real_tokens"]["real_eagle3"].values())
    yield "SpecVLM: acceptance grows with training", tokens == sorted(tokens), ", ".join(map("{:.2f}".format, tokens))
    dynamic, static = decoders["spec_llava"], decoders[STATIC]
    claim = "Spec-LLaVA: its dynamic tree of 24 nodes yields more than the static one of 25"
    yield claim, gain(dynamic, static) > 0, f"{per_pass(dynamic)}, {per_pass(static)} tokens per pass"
    speeds = {name: part["speedup"] for name, part in decoders.items() if name != "autoregressive" and per_pass(part)}
    best = max(speeds, key=speeds.__getitem__)
    yield "a draft pays: at least 1.5x", speeds[best] >= 1.5, f"`{best}` {times(speeds[best])}"
    parts: list[Json] = [part for one in studies["real"].values() for part in one["decoders"].values() if "match" in part]
    match, total = (sum(part[key] for part in parts) for key in ("match", "total"))
    yield "every text is the target's own", match == total, f"{match} of {total} texts"


REAL_TABLES = {"real": ("real", real), "real_sources": ("real", real_sources), "real_tokens": ("real_tokens", real_tokens)}
