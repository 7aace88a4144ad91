"""The tables of docs/results.md and README.md, from figures alone: equal figures give equal tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.papers.figures import Json
from sage.io.tables import markdown_table

Figures = Mapping[str, Any]  # of a study, by measurement
TITLES = {"qwen": "Qwen2.5-VL", "qwen3": "Qwen3-VL", "llava": "LLaVA-OneVision", "smollm2": "SmolLM2-135M"}
VARIANTS = "(published)", "(most tokens)"
VLLM_ROWS = {  # of `ratios`: which pair, whose side
    "vLLM": ("autoregressive", "theirs"),
    "**sage-draft**, no draft": ("autoregressive", "ours"),
    "vLLM with our `eagle3`": ("same draft", "theirs"),
    "**sage-draft** with the same draft": ("same draft", "ours"),
    "**sage-draft** with a `block` draft": ("any draft", "ours"),
}


def times(value: float | None) -> str:
    """Returns `2.31x`; empty without a value."""
    return "" if value is None else f"{value:.2f}x"


def with_interval(value: float, bounds: Sequence[float] | None) -> str:
    """Returns `2.31x (1.94-2.68)`; no brackets without an interval."""
    return f"{times(value)} ({bounds[0]:.2f}-{bounds[1]:.2f})" if bounds and bounds[0] != bounds[1] else times(value)


def speedup(part: Json) -> str:
    """Returns the speedup of a decoder with its 95% interval."""
    return with_interval(part["speedup"], part.get("speedup_ci"))


def per_pass(part: Json) -> str:
    """Returns the tokens per target pass of a decoder; empty for one without passes of ours."""
    return f"{part['tokens_per_target_pass']:.2f}" if part.get("tokens_per_target_pass") else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table, its first column on the left."""
    return markdown_table(head, rows, "<" + ">" * (len(head) - 1))


def headline(figures: Figures) -> str:
    """Every decoder on every target, the fastest on the first target on top."""
    first = next(iter(figures.values()))["decoders"]
    names = sorted(
        (name for name in first if not name.endswith(VARIANTS)), key=lambda name: first[name]["speedup"], reverse=True
    )
    head = ["decoder"]
    for name in figures:
        head += [f"{TITLES[name]}: speedup (95%)", "captions", "tokens/pass"]
    rows = []
    for name in names:
        parts = [part["decoders"][name] for part in figures.values()]
        cells = [cell for part in parts for cell in (speedup(part), times(part["captions"]), per_pass(part))]
        rows.append([f"`{name}`", *cells, identical(parts)])
    return table([*head, "identical"], rows)


def adaptive(figures: Figures) -> str:
    """`sage` against the static tree, with the nodes that each verifies per round."""
    names = ("static (published)", "sage (published)", "sage (most tokens)", "sage", "static")
    head = ["decoder", *(f"{TITLES[name]}: {what}" for name in figures for what in ("tokens/pass", "nodes/round", "speedup"))]
    rows = []
    for name in names:
        parts = [part["decoders"][name] for part in figures.values()]
        cells = [cell for one in parts for cell in (per_pass(one), f"{one['nodes_per_round']:.1f}", times(one["speedup"]))]
        rows.append([f"`{name}`", *cells])
    return table(head, rows)


def sizes(figures: Figures) -> str:
    """Decoders by size of the weights."""
    head = ["decoder", *(f"{size} MB: {what}" for size in figures for what in ("tokens/s", "speedup (95%)", "tokens/pass"))]
    names = list(next(iter(figures.values()))["decoders"])
    rows = []
    for name in names:
        parts = [part["decoders"][name] for part in figures.values()]
        cells = [cell for one in parts for cell in (f"{one['tokens_per_s']:.0f}", speedup(one), per_pass(one))]
        rows.append([f"`{name}`", *cells])
    return table(head, rows)


def vllm(figures: Figures) -> str:
    """Tokens per second of the fastest decoder of each kind, ours and vLLM's."""
    head = ["one request, tokens/s", *(f"{size} MB" for size in figures)]
    rows = []
    pairs = [
        pair for pair in ("autoregressive", "same draft", "any draft") if all(pair in p["ratios"] for p in figures.values())
    ]
    for name, (pair, side) in VLLM_ROWS.items():
        if pair not in pairs:  # a single draft
            continue
        chosen = [part["decoders"][part["ratios"][pair][side]]["tokens_per_s"] for part in figures.values()]
        rows.append([name, *(f"{speed:.0f}" for speed in chosen)])
    for pair in sorted(pairs, key=("autoregressive", "same draft", "any draft").index):
        ratios = [part["ratios"][pair] for part in figures.values()]
        rows.append([f"ratio, {pair}", *(with_interval(one["ratio"], one["range"]) for one in ratios)])
    for name, side in (("first token, vLLM", "theirs"), ("first token, sage-draft", "ours")):
        chosen = [part["decoders"][part["ratios"]["autoregressive"][side]]["first_token_ms"] for part in figures.values()]
        rows.append([name, *(f"{ms:.0f} ms" for ms in chosen)])
    return table(head, rows)


def drafts(figures: Figures) -> str:
    """Kinds of draft: tokens per pass of a chain, and speed under `cost_aware`."""
    rows = []
    for name, part in figures.items():
        target, _, muon = name.partition("_")
        for head in (label for label in part["decoders"] if f"{label} chain" in part["decoders"]):
            own = part["decoders"][head]
            run = part["runs"][f"kinds_{head}_{name}"]
            where = f"{TITLES[target]}, {'Muon' if muon else 'AdamW'}"
            seconds = f"{run['training_s']:.0f} s"
            rows.append([where, f"`{head}`", seconds, per_pass(part["decoders"][f"{head} chain"]), per_pass(own), speedup(own)])
    return table(("target", "draft", "training", "chain of 5", "`cost_aware`", "speedup (95%)"), rows)


def ablations(figures: Figures) -> str:
    """The tuned `sage` with one option changed."""
    rows = [
        [f"`{name}`", per_pass(part), f"{part['nodes_per_round']:.1f}", speedup(part)]
        for name, part in figures["qwen"]["decoders"].items()
        if name != "autoregressive"
    ]
    return table(("`sage` with", "tokens/pass", "nodes/round", "speedup (95%)"), rows)


def confidence(figures: Figures) -> str:
    """Correlations of alpha along an answer."""
    names = {
        "between_tokens": "alpha of neighboring tokens",
        "between_rounds": "alpha of neighboring rounds",
        "length_from_this_round": "reachable length, alpha of this round",
        "length_from_last_round": "reachable length, alpha of the last round",
    }
    rows = [[label, *(f"{part[key] or 0:+.2f}" for part in figures.values())] for key, label in names.items()]
    return table(("correlation of", *(TITLES[name] for name in figures)), rows)


def length(figures: Figures) -> str:
    """Accepted tokens by length of the answer."""
    rows = []
    for tokens, part in figures.items():
        static, sage = (part["decoders"][f"{name} (published)"]["mean_accepted_draft"] for name in ("static", "sage"))
        ours = part["decoders"]["cost_aware"]
        rows.append([tokens, f"{static:.2f}", f"{sage:.2f}", f"{sage / static - 1:+.0%}", speedup(ours)])
    return table(("tokens", "`static` accepts", "`sage` accepts", "gain", "`cost_aware`: speedup (95%)"), rows)


def temperature(figures: Figures) -> str:
    """Tokens per pass by temperature, with the noise of the draws and without it."""
    names = ("chain", "static", "sage", "cost_aware")
    rows = []
    for degree, part in figures.items():
        decoders = part["decoders"]
        texts = "/".join(str(sum(own[key] for own in decoders.values() if "match" in own)) for key in ("match", "total"))
        cells = []
        for name in names:
            coupled, alone = decoders.get(name), decoders.get(f"{name} uncoupled")
            cells.append("" if coupled is None else per_pass(coupled) + (f" ({per_pass(alone)})" if alone else ""))
        rows.append([degree, *cells, texts])
    return table(("temperature", *(f"`{name}`" for name in names), "identical"), rows)


def compressor(figures: Figures) -> str:
    """Heads that were trained with each compressor."""
    rows = [
        [f"`{name}`", f"{part['draft_context']:.0f}", per_pass(part), times(part["speedup"]), times(part["speedup_end_to_end"])]
        for name, part in figures["llava"]["decoders"].items()
        if name != "autoregressive"
    ]
    return table(("`draft/compressor=`", "draft tokens of the prompt", "tokens/pass", "speedup", "end to end"), rows)


def pruning(figures: Figures) -> str:
    """Visual tokens pruned while decoding."""
    rows = [
        [name, f"{part['draft_context']:.0f}", f"{part['mean_accepted_draft']:.2f}", speedup(part)]
        for name, part in figures["qwen"]["decoders"].items()
        if name != "autoregressive"
    ]
    return table(("share pruned", "draft tokens of the prompt", "accepted per round", "speedup (95%)"), rows)


def epochs(figures: Figures) -> str:
    """Tokens per pass after each epoch."""
    number = max(len(part["tokens_per_target_pass"]) for part in figures.values())
    rows = [[f"`{name}`", *(f"{value:.2f}" for value in part["tokens_per_target_pass"])] for name, part in figures.items()]
    return table(("run", *(f"epoch {epoch}" for epoch in range(1, number + 1))), rows)


def identical(parts: Sequence[Json]) -> str:
    return "/".join(str(sum(part.get(key, 0) for part in parts)) for key in ("match", "total"))


# -- claims ----------------------------------------------------------------------------------------------------------------


def claims(studies: Mapping[str, Figures]) -> str:
    """What the papers and this project expected, unmet first."""
    rows = list(_paper_claims(studies))
    decoders = [own for study in studies.values() for part in study.values() for own in part.get("decoders", {}).values()]
    match, total = (sum(own.get(key, 0) for own in decoders) for key in ("match", "total"))
    rows.append(("every decoder, ours and vLLM's, emits the target's own text", match == total, f"{match} of {total} texts"))
    rows.sort(key=lambda row: row[1])
    cells = [[claim, "yes" if is_met else "**no**", found] for claim, is_met, found in rows]
    return markdown_table(("expected", "met", "measured"), cells, "<<<")


def _paper_claims(studies: Mapping[str, Figures]) -> Iterator[tuple[str, bool, str]]:
    by_target = {name: part["decoders"] for name, part in studies["headline"].items()}
    gains = {name: gain(own["sage (most tokens)"], own["static (published)"]) for name, own in by_target.items()}
    yield "SAGE: 20% more tokens per pass than the static tree", min(gains.values()) >= 0.2, _by_target(gains, "{:+.0%}")
    speeds = {name: own["sage"]["speedup"] / own["chain"]["speedup"] for name, own in by_target.items()}
    yield "SAGE: faster than a chain", min(speeds.values()) > 1, _by_target(speeds)
    policies = ("chain", "static", "eagle2", "ddd", "sage")
    leads = {name: own["cost_aware"]["speedup"] / max(own[p]["speedup"] for p in policies) for name, own in by_target.items()}
    yield "`cost_aware` at least as fast as every other policy, tuned", min(leads.values()) >= 1, _by_target(leads)
    correlations = {name: part["between_rounds"] or 0.0 for name, part in studies["confidence"].items()}
    yield "SAGE: alpha of neighboring rounds correlates", min(correlations.values()) > 0.1, _by_target(correlations, "{:+.2f}")
    by_length = {tokens: static_gain(part["decoders"]) for tokens, part in studies["length"].items()}
    grows = list(by_length.values()) == sorted(by_length.values())
    yield (
        "SAGE: its gain grows with the length of the answer",
        grows,
        ", ".join(f"{v:+.0%} at {k}" for k, v in by_length.items()),
    )
    pruned = studies["pruning"]["qwen"]["decoders"]
    share = pruned["0.9"]["mean_accepted_draft"] / pruned["0.0"]["mean_accepted_draft"]
    yield "SAGE: pruning 90% of the visual tokens keeps acceptance", share >= 0.98, f"{share:.0%} of the accepted tokens"
    compressed = dict(studies["compressor"]["llava"]["decoders"])
    plain = compressed.pop("none")["speedup"]
    best = max(part["speedup"] for name, part in compressed.items() if name != "autoregressive")
    yield "SpecVLM: a compressed head is faster", best > plain, f"{times(best)}, uncompressed {times(plain)}"
    for name, part in studies["epochs"].items():
        tokens = part["tokens_per_target_pass"]
        grows = tokens == sorted(tokens)
        yield f"SpecVLM: acceptance grows with every epoch, `{name}`", grows, ", ".join(f"{value:.2f}" for value in tokens)


def gain(part: Json, other: Json) -> float:
    """Returns by which share a decoder yields more tokens per pass than another one."""
    return float(part["tokens_per_target_pass"]) / float(other["tokens_per_target_pass"]) - 1


def static_gain(decoders: Json) -> float:
    """Returns by which share `sage` accepts more drafted tokens than the static tree, as published."""
    sage, static = (float(decoders[f"{name} (published)"]["mean_accepted_draft"]) for name in ("sage", "static"))
    return sage / static - 1


def _by_target(values: Mapping[str, float], form: str = "{:.2f}x") -> str:
    return ", ".join(f"{TITLES[name]} {form.format(value)}" for name, value in values.items())


TABLES: dict[str, tuple[str, Callable[[Figures], str]]] = {  # by name on the page: study and table
    "headline": ("headline", headline),
    "adaptive": ("headline", adaptive),
    **{
        function.__name__: (function.__name__, function)
        for function in (sizes, vllm, drafts, ablations, confidence, length, temperature, compressor, pruning, epochs)
    },
    "real_length": ("real_length", length),
    "real_confidence": ("real_confidence", confidence),
}
