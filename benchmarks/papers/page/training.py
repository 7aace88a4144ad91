"""Sections of the page about training: epochs, compressors, pruning."""

from __future__ import annotations

from itertools import pairwise

from benchmarks.papers.figures import Json
from benchmarks.papers.page.parts import Finding, Found, listed, paragraphs, title_of
from benchmarks.papers.page.tables import interval, table, times

CURVE = "static"  # the same tree every round: what changes from epoch to epoch is the draft alone
HELD = 0.98  # of a figure: what still counts as kept
MEASURED = ("draft context", "tokens/pass", "accepted", "speedup", "95%", "draft prefill", "identical")

# -- epochs ----------------------------------------------------------------------------------------------------------------


def epochs(found: Found) -> str:
    """Acceptance by epoch."""
    runs = found["epochs"]["runs"]
    tables = [_epoch_table(name, run) for name, run in runs.items()]
    return paragraphs(
        "Tokens per target pass on held-out prompts after each epoch of one run (cosine schedule over all epochs); "
        "`estimate` is what training itself expects of chains, on its own batches.",
        *tables,
        "It shows that training longer on the same pictures keeps helping up to the last epoch, or where it stops to. The "
        "learning rate falls within the same run, so an early epoch is worse than a run of that length would be.",
    )


def _epoch_table(name: str, run: Json) -> str:
    policies = list(run["points"][0]["policies"])
    head = ["epoch", "step", "estimate", *(f"`{policy}`" for policy in policies), *(f"`{one}` speedup" for one in policies)]
    rows = []
    for point in run["points"]:
        parts = [point["policies"][policy] for policy in policies]
        estimate = f"{point['estimate']:.2f}" if point["estimate"] else ""
        counts = [f"{part['tokens_per_target_pass']:.2f}" for part in parts]
        rows.append([str(point["epoch"]), str(point["step"]), estimate, *counts, *(times(part["speedup"]) for part in parts)])
    about = (
        f"`{name}` on {title_of(run['target'])}, {run['prompts']} prompts, {run['training_s'] / 60:.1f} minutes of training:"
    )
    return paragraphs(about, table(head, rows), f"```\n{run['command']}\n```")


def epoch_findings(found: Found) -> list[Finding]:
    """SpecVLM: acceptance rises with every epoch."""
    return [_rising(name, run) for name, run in found["epochs"]["runs"].items()] if "epochs" in found else []


def _rising(name: str, run: Json) -> Finding:
    policy = CURVE if CURVE in run["points"][0]["policies"] else next(iter(run["points"][0]["policies"]))
    curve = [point["policies"][policy]["tokens_per_target_pass"] for point in run["points"]]
    holds = all(after > before for before, after in pairwise(curve))
    said = f"`{policy}`: {', '.join(f'{value:.2f}' for value in curve)} tokens per pass"
    if not holds:
        lost = min(after - before for before, after in pairwise(curve)) if len(curve) > 1 else 0.0
        said += f"; the largest step back is {lost:.2f}, on {run['prompts']} prompts"
    return Finding(f"SpecVLM: acceptance rises with every epoch, `{name}`", holds, said)


# -- compressors -----------------------------------------------------------------------------------------------------------


def compressor(found: Found) -> str:
    """Compressors side by side."""
    figures = found["compressor"]
    head = ["compressor", "policy", *MEASURED]
    rows = [[f"`{label_of(row)}`", f"`{row['policy']}`", *_measured(row)] for row in figures["rows"]]
    whole = figures["rows"][0]["prompt_tokens"]
    return paragraphs(
        f"One head per compressor on {title_of(figures['target'])}, trained alike and briefly, decoding the same "
        f"{figures['prompts']} prompts in turns. A prompt has {whole:.0f} tokens on average; the target reads them all.",
        table(head, rows, left=2),
        f"Each was trained with its own line of options; the first: `{figures['rows'][0]['command']}`.",
        "It shows what a draft loses or gains by reading fewer visual rows when all are trained for the same short time. It "
        "does not show the gain in speed of long pictures and clips: the pocket's are a few dozen tokens, and a draft of "
        "one layer reads them in about a millisecond.",
    )


def _measured(row: Json) -> list[str]:
    """The cells under `MEASURED`."""
    return [
        f"{row['draft_context']:.0f}",
        f"{row['tokens_per_target_pass']:.2f}",
        f"{row['mean_accepted_draft']:.2f}",
        times(row["speedup"]),
        interval(row.get("speedup_ci")),
        f"{row['draft_prefill_ms']:.1f} ms",
        f"{row['match']}/{row['total']}",
    ]


def label_of(row: Json) -> str:
    """`conv ratio=20`."""
    return " ".join(word.rpartition("compressor=")[2].rpartition("compressor.")[2] for word in row["choice"])


def compressor_findings(found: Found) -> list[Finding]:
    """SpecVLM: a compressed head accepts no less and is faster than one that reads everything."""
    if "compressor" not in found:
        return []
    rows, made = found["compressor"]["rows"], []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = [row for row in rows if row["policy"] == policy]
        whole, others = own[0], own[1:]
        if not others:
            continue
        best = max(others, key=lambda row: row["speedup"])
        kept = [label_of(row) for row in others if row["tokens_per_target_pass"] >= HELD * whole["tokens_per_target_pass"]]
        said = (
            f"`{policy}`: best is `{label_of(best)}` with {times(best['speedup'])} and {best['tokens_per_target_pass']:.2f} "
            f"tokens per pass, uncompressed {times(whole['speedup'])} and {whole['tokens_per_target_pass']:.2f}; {len(kept)} "
            f"of {len(others)} keep {HELD:.0%} of its tokens per pass"
        )
        if best["speedup"] <= whole["speedup"]:
            saved = whole["draft_prefill_ms"] - best["draft_prefill_ms"]
            said += f". The draft's prefill, which it shortens, is {saved:.1f} ms shorter: little to win here"
        made.append(
            Finding("SpecVLM: a compressed head is faster than an uncompressed one", best["speedup"] > whole["speedup"], said)
        )
    return made


# -- pruning while decoding --------------------------------------------------------------------------------------------------


def pruning(found: Found) -> str:
    """Pruning ratios side by side."""
    figures = found["pruning"]
    head = ["draft", "ratio", *MEASURED]
    rows = [[row["draft"], f"{row['ratio']:g}", *_measured(row)] for row in figures["rows"]]
    return paragraphs(
        "Visual tokens left out for the draft while decoding, by the attention they get (two stages), on "
        f"{title_of(figures['target'])} with `{figures['policy']}`, {figures['prompts']} prompts: the trained head, which "
        "was never trained without them, and a smaller model as the draft, as in the paper.",
        table(head, rows),
        "It shows what the two kinds of draft lose without retraining. It does not show the paper's gain in speed, which "
        "comes from clips of thousands of tokens read by a draft of 7B.",
    )


def pruning_findings(found: Found) -> list[Finding]:
    """SAGE's Table 5: 90% of the visual tokens can go without losing acceptance, and it is faster."""
    if "pruning" not in found:
        return []
    rows, made = found["pruning"]["rows"], []
    for draft in dict.fromkeys(row["draft"] for row in rows):
        own = [row for row in rows if row["draft"] == draft]
        whole, most = own[0], max((row for row in own if row["ratio"] <= 0.9), key=lambda row: row["ratio"])
        share = most["mean_accepted_draft"] / max(whole["mean_accepted_draft"], 1e-9)
        kept = [f"{row['ratio']:g}" for row in own[1:] if row["mean_accepted_draft"] >= HELD * whole["mean_accepted_draft"]]
        speeds = f"{times(most['speedup'])} instead of {times(whole['speedup'])}"
        said = f"at {most['ratio']:g}, {share:.0%} of the accepted tokens and {speeds}"
        said += f"; {HELD:.0%} is kept at {listed(kept)}" if kept else f"; no ratio keeps {HELD:.0%}"
        if share < HELD and draft == "head":
            said += ". A head attends to few rows and was trained on all of them: it misses what it was used to"
        made.append(Finding(f"SAGE: 90% of the visual tokens can go without losing acceptance, {draft}", share >= HELD, said))
    return made
