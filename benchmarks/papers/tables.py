"""The tables of docs/results.md, docs/targets.md and README.md and two pictures, from figures alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from benchmarks.engines.measure import NGRAM
from benchmarks.papers.runs import Json
from sage.io.tables import markdown_table
from sage.trees import AUTOREGRESSIVE
from train.report import style

Figures = Mapping[str, Any]  # of a study, by measurement
TITLES = {"qwen": "Qwen2.5-VL", "qwen3": "Qwen3-VL", "llava": "LLaVA-OneVision", "smollm2": "SmolLM2-135M"}
VARIANTS = "(published)", "(most tokens)"
STATIC, SAGE = "static (published)", "sage (published)"
VLLM_ROWS = {  # of `ratios`: which pair, whose side
    "vLLM": ("autoregressive", "theirs"),
    "**sage-draft**, no draft": ("autoregressive", "ours"),
    "vLLM with our `eagle3`": ("same draft", "theirs"),
    "**sage-draft** with the same draft": ("same draft", "ours"),
    "**sage-draft** with a `block` draft": ("any draft", "ours"),
}
DTYPES = ("fp32", "bf16", "q8_0")
OURS, THEIRS = "#b23a6b", "#9aa5b1"  # colors


def times(value: float | None) -> str:
    """Returns `2.31x`; empty without a value."""
    return "" if value is None else f"{value:.2f}x"


def with_interval(value: float, bounds: Sequence[float] | None) -> str:
    """Returns `2.31x (1.94-2.68)`; no brackets without an interval."""
    return f"{times(value)} ({bounds[0]:.2f}-{bounds[1]:.2f})" if bounds and bounds[0] != bounds[1] else times(value)


def speedup(part: Json) -> str:
    return with_interval(part["speedup"], part.get("speedup_ci"))


def per_pass(part: Json) -> str:
    """Returns the tokens per target pass of a decoder; empty for one without passes of ours."""
    return f"{part['tokens_per_target_pass']:.2f}" if part.get("tokens_per_target_pass") else ""


COLUMNS: dict[str, Callable[[Json], str]] = {  # of tables of decoders: head, and text of a decoder's figures
    "tokens/pass": per_pass,
    "nodes/round": lambda part: f"{part['nodes_per_round']:.1f}" if part.get("nodes_per_round") else "",
    "accepted per round": lambda part: f"{part['mean_accepted_draft']:.2f}",
    "draft tokens of the prompt": lambda part: f"{part['draft_context']:.0f}",
    "tokens/s": lambda part: f"{part['tokens_per_s']:.0f}",
    "speedup": lambda part: times(part["speedup"]),
    "speedup (95%)": speedup,
    "end to end": lambda part: times(part["speedup_end_to_end"]),
}


def identical(parts: Sequence[Json]) -> str:
    return "/".join(str(sum(part.get(key, 0) for part in parts)) for key in ("match", "total"))


def fastest_first(decoders: Figures) -> list[str]:
    names = [name for name in decoders if not name.endswith(VARIANTS)]
    return sorted(names, key=lambda name: decoders[name]["speedup"], reverse=True)


def gain(part: Json, other: Json, figure: str = "tokens_per_target_pass") -> float:
    """Returns by which share a decoder yields more tokens per pass than another one."""
    return float(part[figure]) / float(other[figure]) - 1


def static_gain(decoders: Json) -> float:
    """Returns by which share `sage` accepts more drafted tokens than the static tree, as published."""
    return gain(decoders[SAGE], decoders[STATIC], "mean_accepted_draft")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return markdown_table(head, rows, "<" + ">" * (len(head) - 1))


def of_decoders(names: Iterable[str], figures: Figures, columns: Sequence[str], title: Callable[[str], str]) -> str:
    """Returns the same columns of every measurement side by side; `title` is that of a measurement."""
    head = ["decoder", *(f"{title(name)}: {column}" for name in figures for column in columns)]
    parts = [part["decoders"] for part in figures.values()]
    rows = [[f"`{name}`", *(COLUMNS[column](part[name]) for part in parts for column in columns)] for name in names]
    return table(head, rows)


def of_variants(head: str, decoders: Figures, columns: Sequence[str], form: str = "`{}`") -> str:
    drafting = {name: part for name, part in decoders.items() if name != AUTOREGRESSIVE}
    rows = [[form.format(name), *(COLUMNS[column](part) for column in columns)] for name, part in drafting.items()]
    return table((head, *columns), rows)


def headline(figures: Figures) -> str:
    parts = [part["decoders"] for part in figures.values()]
    head = [cell for name in figures for cell in (f"{TITLES[name]}: speedup (95%)", "captions", "tokens/pass")]
    rows = []
    for name in fastest_first(parts[0]):
        cells = [cell for part in parts for cell in (speedup(part[name]), times(part[name]["captions"]), per_pass(part[name]))]
        rows.append([f"`{name}`", *cells, identical([part[name] for part in parts])])
    return table(("decoder", *head, "identical"), rows)


def adaptive(figures: Figures) -> str:
    """`sage` against the static tree, with the nodes that each verifies per round."""
    names = (STATIC, SAGE, "sage (most tokens)", "sage", "static")
    return of_decoders(names, figures, ("tokens/pass", "nodes/round", "speedup"), TITLES.__getitem__)


def sizes(figures: Figures) -> str:
    names = next(iter(figures.values()))["decoders"]
    return of_decoders(names, figures, ("tokens/s", "speedup (95%)", "tokens/pass"), "{} MB".format)


def vllm(figures: Figures) -> str:
    """Tokens per second of the fastest decoder of each kind, ours and vLLM's."""

    def chosen(pair: str, side: str, figure: str, form: str) -> list[str]:
        return [form.format(part["decoders"][part["ratios"][pair][side]][figure]) for part in figures.values()]

    known = ("autoregressive", "same draft", "any draft")
    pairs = [pair for pair in known if all(pair in part["ratios"] for part in figures.values())]  # two with a single draft
    rows = [[name, *chosen(pair, side, "tokens_per_s", "{:.0f}")] for name, (pair, side) in VLLM_ROWS.items() if pair in pairs]
    for pair in pairs:
        ratios = [part["ratios"][pair] for part in figures.values()]
        rows.append([f"ratio, {pair}", *(with_interval(ratio["ratio"], ratio["range"]) for ratio in ratios)])
    for name, side in (("vLLM", "theirs"), ("sage-draft", "ours")):
        rows.append([f"first token, {name}", *chosen("autoregressive", side, "first_token_ms", "{:.0f} ms")])
    return table(["one request, tokens/s", *(f"{size} MB" for size in figures)], rows)


def engines(figures: Figures) -> str:
    """Tokens per second of the fastest decoders by engine and dtype, without a draft and with one, and their ratios."""

    def cells(side: str, dtype: str) -> Iterator[str]:
        for part in figures.values():
            of_side = [row for row in part["decoders"].values() if (row["side"], row["dtype"]) == (side, dtype)]
            found = [row for row in of_side if row["draft"] != NGRAM["method"]]
            for is_drafting in (False, True):
                best = max((row for row in found if bool(row["draft"]) is is_drafting), key=lambda row: row["tokens_per_s"])
                yield f"{best['tokens_per_s']:.0f}"

    parts = [row for part in figures.values() for row in part["decoders"].values()]
    rows = []
    for side, dtype in sorted({(row["side"], row["dtype"]) for row in parts}, key=lambda pair: (DTYPES.index(pair[1]), pair)):
        same = identical([row for row in parts if (row["side"], row["dtype"]) == (side, dtype)])
        rows.append([f"{side.replace('ours', '**sage-draft**')}, {dtype}", *cells(side, dtype), same])
    for dtype in DTYPES:
        ratios = [part["ratios"][f"{pair}, {dtype}"] for part in figures.values() for pair in ("autoregressive", "same draft")]
        beside = "sage-draft bf16 / llama.cpp q8_0" if dtype == "q8_0" else f"sage-draft / fastest engine, {dtype}"
        rows.append([beside, *(with_interval(ratio["ratio"], ratio["range"]) for ratio in ratios), ""])
    sizes = [TITLES.get(size, f"{size} MB") for size in figures]
    return table(("tokens/s", *(cell for size in sizes for cell in (size, "draft")), "identical"), rows)


def drafts(figures: Figures) -> str:
    rows = []
    for name, part in figures.items():
        target, _, muon = name.partition("_")
        where = f"{TITLES[target]}, {'Muon' if muon else 'AdamW'}"
        for label, figures_of in part["decoders"].items():
            if (chain := part["decoders"].get(f"{label} chain")) is not None:
                seconds = f"{part['runs'][f'kinds_{label}_{name}']['training_s']:.0f} s"
                rows.append([where, f"`{label}`", seconds, per_pass(chain), per_pass(figures_of), speedup(figures_of)])
    return table(("target", "draft", "training", "chain of 5", "`cost_aware`", "speedup (95%)"), rows)


def eagle31(figures: Figures) -> str:
    """EAGLE-3 and EAGLE-3.1: tokens per pass, and which share of the drafted tokens of level 7 is accepted after six others."""

    def last_level(part: Json) -> str:
        level = part["acceptance_by_depth"][-1]
        return f"{level['kept'] / level['tried']:.0%} of {level['tried']}"

    rows = []
    for name, part in figures.items():
        target = name.partition(",")[0]
        drafting = [part["decoders"][label] for label in ("EAGLE-3", "EAGLE-3.1")]
        context = f"{drafting[0]['draft_context']:.0f}"
        rows.append([TITLES[target], context, *map(per_pass, drafting), *map(last_level, drafting)])
    head = ("tokens/pass", "level 7")
    return table(("target", "prompt", *(f"{label}: {column}" for column in head for label in ("EAGLE-3", "EAGLE-3.1"))), rows)


def ablations(figures: Figures) -> str:
    return of_variants("`sage` with", figures["qwen"]["decoders"], ("tokens/pass", "nodes/round", "speedup (95%)"))


def confidence(figures: Figures) -> str:
    names = {
        "between_tokens": "alpha of neighboring tokens",
        "between_rounds": "alpha of neighboring rounds",
        "length_from_this_round": "reachable length, alpha of this round",
        "length_from_last_round": "reachable length, alpha of the last round",
    }
    rows = [[label, *(f"{part[key] or 0:+.2f}" for part in figures.values())] for key, label in names.items()]
    return table(("correlation of", *(TITLES[name] for name in figures)), rows)


def length(figures: Figures) -> str:
    rows = []
    for tokens, part in figures.items():
        accepted = (f"{part['decoders'][name]['mean_accepted_draft']:.2f}" for name in (STATIC, SAGE))
        rows.append([tokens, *accepted, f"{static_gain(part['decoders']):+.0%}", speedup(part["decoders"]["cost_aware"])])
    return table(("tokens", "`static` accepts", "`sage` accepts", "gain", "`cost_aware`: speedup (95%)"), rows)


def temperature(figures: Figures) -> str:
    """Tokens per pass by temperature, with the noise of the draws and without it."""
    names = ("chain", "static", "sage", "cost_aware")
    rows = []
    for degree, part in figures.items():
        cells = []
        for name in names:
            coupled, alone = part["decoders"].get(name), part["decoders"].get(f"{name} uncoupled")
            cells.append("" if coupled is None else per_pass(coupled) + (f" ({per_pass(alone)})" if alone else ""))
        rows.append([degree, *cells, identical(list(part["decoders"].values()))])
    return table(("temperature", *(f"`{name}`" for name in names), "identical"), rows)


def compressor(figures: Figures) -> str:
    columns = ("draft tokens of the prompt", "tokens/pass", "speedup", "end to end")
    return of_variants("`draft/compressor=`", figures["llava"]["decoders"], columns)


def pruning(figures: Figures) -> str:
    columns = ("draft tokens of the prompt", "accepted per round", "speedup (95%)")
    return of_variants("share pruned", figures["qwen"]["decoders"], columns, "{}")


def quantized(figures: Figures) -> str:
    """Tokens per pass on a quantized target, of drafts trained with the original and with it; the share of equal tokens."""
    names = [name for name in next(iter(figures.values()))["decoders"] if name != AUTOREGRESSIVE]
    rows = []
    for method, part in figures.items():
        share = f", {part['same_tokens']:.1%}" if "same_tokens" in part else ""
        rows.append([f"`{method}`{share}", *(per_pass(part["decoders"][name]) for name in names)])
    return table(("target", *names), rows)


def epochs(figures: Figures) -> str:
    rows = [[f"`{name}`", *(f"{value:.2f}" for value in part["tokens_per_target_pass"])] for name, part in figures.items()]
    return table(("run", *(f"epoch {epoch}" for epoch in range(1, max(map(len, rows))))), rows)


def real(figures: Figures) -> str:
    greedy, sampled = figures["greedy"]["decoders"], figures["T = 0.7"]["decoders"]
    rows = []
    for name in sorted(greedy, key=lambda name: greedy[name]["speedup"], reverse=True):
        part, drawn = greedy[name], sampled.get(name, {})
        cells = [per_pass(part), COLUMNS["nodes/round"](part), f"{part['tokens_per_s']:.1f}", speedup(part), per_pass(drawn)]
        rows.append([f"`{name}`", *cells, identical([part, drawn])])
    head = ("decoder", "tokens/pass", "nodes/round", "tokens/s", "speedup (95%)", "tokens/pass, T = 0.7", "identical")
    return table(head, rows)


def real_sources(figures: Figures) -> str:
    names = ("chain", STATIC, SAGE, "cost_aware")
    rows = [
        [source, str(part["chain"]["prompts"]), *(per_pass(part[name]) for name in names), times(part["chain"]["speedup"])]
        for source, part in figures["greedy"]["sources"].items()
    ]
    return table(("prompts from", "number", *(f"`{name}`" for name in names), "`chain`: speedup"), rows)


def real_tokens(figures: Figures) -> str:
    (part,) = figures.values()
    head = ("training tokens", *(f"{int(tokens):,}" for tokens in part))
    return table(head, [["tokens/pass", *(f"{value:.2f}" for value in part.values())]])


TABLES: dict[str, tuple[str, Callable[[Figures], str]]] = {  # by name on the page: study and table
    "adaptive": ("headline", adaptive),
    "real_quantized": ("real_quantized", quantized),
    "real_sources": ("real", real_sources),
    "real_length": ("real_length", length),
    "real_confidence": ("real_confidence", confidence),
    **{
        make.__name__: (make.__name__, make)
        for make in (
            *(headline, sizes, vllm, engines, drafts, eagle31, ablations, confidence, length, temperature, compressor, pruning),
            *(epochs, quantized, real, real_tokens),
        )
    },
}


def draw_vllm(figures: Mapping[str, Any]) -> Figure:
    """Draws tokens per second beside vLLM, a panel per size of the weights, the largest first."""
    figure = style.figure(2.6, "Tokens per second of one request", "pocket Qwen2.5-VL in float32 on two CPU cores, same text")
    panels = {size: figures[size] for size in reversed(list(figures))}
    for axes, (size, part) in zip(figure.subplots(1, len(panels), sharey=True), panels.items(), strict=True):
        for place, (pair, side) in enumerate(VLLM_ROWS.values()):
            speed = part["decoders"][part["ratios"][pair][side]]["tokens_per_s"]
            axes.barh(place, speed, height=0.62, color=OURS if side == "ours" else THEIRS)
            axes.text(speed, place, f" {speed:.0f}", va="center", fontsize=9)
        axes.set_title(f"{size} MB of weights", fontsize=10, loc="left")
        style.despine(axes, "x")
        axes.set_xticks([])
        axes.margins(x=0.2)
    style.label_bars(figure.axes[0], [name.replace("*", "").replace("`", "") for name in VLLM_ROWS])
    return figure


def draw_headline(figures: Mapping[str, Any]) -> Figure:
    """Draws the speedup by decoder and target with its 95% interval, the fastest on top."""
    decoders = {name: part["decoders"] for name, part in figures.items()}
    names = fastest_first(next(iter(decoders.values())))
    subtitle = "over the autoregressive loop of the same run, with 95% intervals; 20 MB of weights, in the cache"
    figure = style.figure(1.5 + 0.3 * len(names), "Speedup of decoding by decoder", subtitle)
    for axes, (target, found) in zip(figure.subplots(1, len(decoders), sharey=True), decoders.items(), strict=True):
        for place, name in enumerate(names):
            value = found[name]["speedup"]
            low, high = found[name].get("speedup_ci") or (value, value)
            axes.barh(place, value, height=0.62, color=style.policy_color(name))
            axes.plot([low, high], [place, place], color=style.INK, linewidth=1.2)
            axes.text(max(high, value), place, f" {value:.2f}x", va="center", fontsize=9)
        axes.set_title(TITLES[target], fontsize=10.5, loc="left")
        axes.axvline(1.0, **style.BASELINE)
        axes.margins(x=0.2)
        style.despine(axes, "x")
    style.label_bars(figure.axes[0], names)
    return figure


PLOTS = {"vllm.png": ("vllm", draw_vllm), "headline.png": ("headline", draw_headline)}
