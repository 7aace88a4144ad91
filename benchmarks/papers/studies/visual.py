"""Visual tokens of the draft: compressors that heads are trained with, and pruning while decoding."""

from __future__ import annotations

from collections.abc import Iterator

from matplotlib.figure import Figure

from benchmarks.papers import runs
from benchmarks.papers.figures import Json
from benchmarks.papers.lab import Lab, compare, select
from benchmarks.papers.markdown import grouped, listing, times
from benchmarks.papers.plots import COLORS, Curve, plot_curves
from benchmarks.papers.study import Expectation, Study
from benchmarks.papers.tuning import tuned_options
from sage.bench.runners import PolicyRunner
from sage.drafts.pruning import Pruning
from train.report import style

PRUNED_POLICY = "sage"
PAPER_RATIO = 0.9
RETAINED = 0.98  # share of the reference that counts as retained
STORED = (
    *("tokens_per_target_pass", "mean_accepted_draft", "prompt_tokens", "draft_context", "nodes_per_round"),
    *("speedup", "speedup_ci", "speedup_end_to_end", "match", "total"),
)


def _rows(lab: Lab, study: str, target: str, variants: list[tuple[PolicyRunner, Json]]) -> Json:
    """Times the runners; returns a row for each: what it is, acceptance, speed, draft context, draft prefill per prompt."""
    prompts = lab.test_prompts(target, study)
    policies = compare(lab, target, [runner for runner, _ in variants], prompts, lab.sizes[study]["repeats"])["policies"]
    rows = [
        {
            **what,
            **select(policies[runner.name], STORED),
            "draft_prefill_ms": 1e3 * policies[runner.name]["time_s"]["draft_prefill"] / len(prompts),
        }
        for runner, what in variants
    ]
    return {"target": target, "prompts": len(prompts), "rows": rows}


def measure_compressor(lab: Lab) -> None:
    """Measures `compressor`: one identically trained head per mode. Ref: SpecVLM, arXiv 2509.11815, Tables 3 and 4."""
    sizes, trained = lab.sizes["compressor"], lab.settings.training.runs
    target = trained[sizes["runs"][0]].target
    options = {name: tuned_options(lab, target, name) for name in sizes["policies"]}

    def variant(run: str, policy: str) -> tuple[PolicyRunner, Json]:
        trained_by = {"command": runs.command_line(lab.settings, run), "choice": list(trained[run].extra)}
        runner = lab.runner(target, f"{run} {policy}", policy, options[policy], run)
        return runner, {"run": run, "policy": policy, **trained_by}

    def compute() -> Json:
        variants = [variant(run, policy) for run in sizes["runs"] for policy in sizes["policies"]]
        return _rows(lab, "compressor", target, variants)

    lab.figures("compressor", "compressor", compute, sizes["runs"], study=sizes, options=options)


def measure_pruning(lab: Lab) -> None:
    """Measures `pruning`: all ratios for the main draft and the smaller model of the first target that has one.

    Ref: SAGE, arXiv 2602.00523, Table 5.
    """
    sizes, target = lab.sizes["pruning"], next(iter(lab.settings.assistant_runs))
    drafts = {"head": lab.settings.main_runs[target], "smaller model": lab.settings.assistant_runs[target]}
    options = tuned_options(lab, target, PRUNED_POLICY)

    def runner(kind: str, ratio: float) -> PolicyRunner:
        pruning = Pruning(ratio=ratio)
        return lab.runner(target, f"{kind} {ratio:g}", PRUNED_POLICY, options, drafts[kind], pruning=pruning)

    def compute() -> Json:
        variants = [(runner(kind, ratio), {"draft": kind, "ratio": ratio}) for kind in drafts for ratio in sizes["ratios"]]
        return {"policy": PRUNED_POLICY, "options": options, **_rows(lab, "pruning", target, variants)}

    lab.figures("pruning", "pruning", compute, list(drafts.values()), study=sizes, options=options)


# -- compressor ------------------------------------------------------------------------------------------------------------


def _labelled(found: Json) -> list[Json]:
    """Returns the rows with the compressor options as `label`, like `conv ratio=20`."""
    return [
        {**row, "label": " ".join(word.rpartition("compressor=")[2].rpartition("compressor.")[2] for word in row["choice"])}
        for row in found["rows"]
    ]


def _compressor_expectations(found: Json) -> Iterator[Expectation]:
    for policy, (reference, *others) in grouped(_labelled(found), "policy").items():
        if not others:
            continue
        best = max(others, key=lambda row: float(row["speedup"]))
        least = RETAINED * reference["tokens_per_target_pass"]
        num_retained = sum(row["tokens_per_target_pass"] >= least for row in others)
        evidence = (
            f"fastest is `{best['label']}`, {times(best['speedup'])} at {best['tokens_per_target_pass']:.2f} tokens per pass; "
            f"uncompressed {times(reference['speedup'])} at {reference['tokens_per_target_pass']:.2f}; {num_retained} of "
            f"{len(others)} retain {RETAINED:.0%} of the tokens per pass"
        )
        is_faster = best["speedup"] > reference["speedup"]
        if not is_faster:
            evidence += f"; draft prefill only {reference['draft_prefill_ms'] - best['draft_prefill_ms']:.1f} ms shorter"
        yield Expectation(f"SpecVLM: a compressed head is faster than an uncompressed one, `{policy}`", is_faster, evidence)


def _draw_compressors(found: Json) -> Figure:
    """Draws tokens per target pass and speedup by compressor, a dot per policy."""
    rows = _labelled(found)
    context = {row["label"]: row["draft_context"] for row in rows}
    places = {label: place for place, label in enumerate(context)}
    subtitle = "one head per compressor, equal training"
    figure = style.figure(1.7 + 0.3 * len(context), "Compressors of the draft's visual input", subtitle)
    columns = {"tokens_per_target_pass": "tokens per target pass", "speedup": "speedup"}
    for axes, (key, label) in zip(figure.subplots(1, 2, sharey=True), columns.items(), strict=True):
        for policy, own in grouped(rows, "policy").items():
            x, y = [row[key] for row in own], [places[row["label"]] for row in own]
            axes.scatter(x, y, s=34, color=style.policy_color(policy), label=policy, zorder=2)
        axes.set_xlabel(label)
        style.despine(axes, "x")
    style.label_bars(figure.axes[0], [f"{label} ({tokens:.0f} tokens)" for label, tokens in context.items()])
    style.legend_below(figure, 4, handlelength=1.4)
    return figure


COMPRESSOR = Study(
    name="compressor",
    measure=measure_compressor,
    expectations=_compressor_expectations,
    values=lambda found: {"rows": _labelled(found)},
    plots={"compressor.png": _draw_compressors},
)


# -- pruning ---------------------------------------------------------------------------------------------------------------


def _pruning_expectations(found: Json) -> Iterator[Expectation]:
    for draft, (reference, *others) in grouped(found["rows"], "draft").items():
        pruned = max((row for row in (reference, *others) if row["ratio"] <= PAPER_RATIO), key=lambda row: float(row["ratio"]))
        full = reference["mean_accepted_draft"]
        share = pruned["mean_accepted_draft"] / max(full, 1e-9)
        ratios = [f"{row['ratio']:g}" for row in others if row["mean_accepted_draft"] >= RETAINED * full]
        retained = f"{RETAINED:.0%} retained at ratio {listing(ratios)}" if ratios else f"no ratio retains {RETAINED:.0%}"
        evidence = (
            f"at ratio {pruned['ratio']:g}, {share:.0%} of the accepted tokens and {times(pruned['speedup'])} instead of "
            f"{times(reference['speedup'])}; {retained}"
        )
        if share < RETAINED and draft == "head":
            evidence += "; the head was trained on all visual tokens"
        claim = f"SAGE: pruning {PAPER_RATIO:.0%} of the visual tokens does not lower acceptance, {draft}"
        yield Expectation(claim, share >= RETAINED, evidence)


def _draw_pruning(found: Json) -> Figure:
    """Draws accepted tokens and speedup by pruning ratio, a line per kind of draft."""
    drafts = dict(zip(COLORS, grouped(found["rows"], "draft").items(), strict=False))

    def curves(key: str) -> list[Curve]:
        return [
            Curve(draft, [row["ratio"] for row in rows], [row[key] for row in rows], color)
            for color, (draft, rows) in drafts.items()
        ]

    panels = {"accepted tokens per round": curves("mean_accepted_draft"), "speedup": curves("speedup")}
    subtitle, xlabel = "visual tokens are pruned for the draft only", "share of visual tokens pruned"
    return plot_curves("Pruning while decoding", subtitle, panels, xlabel, share_y=False, legend="lower left")


PRUNING = Study(
    name="pruning", measure=measure_pruning, expectations=_pruning_expectations, plots={"pruning.png": _draw_pruning}
)
