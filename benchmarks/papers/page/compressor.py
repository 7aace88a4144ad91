"""Section: compressors of the draft's visual input."""

from __future__ import annotations

from benchmarks.papers.figures import Json
from benchmarks.papers.page.expectations import Expectation
from benchmarks.papers.page.markdown import Figures, interval, times, title_of
from sage.bench.tables import markdown_table

RETAINED = 0.98  # share of the reference that counts as retained
VISUAL_COLUMNS = ("draft context", "tokens/pass", "accepted", "speedup", "95%", "draft prefill", "identical")


def values(figures: Figures) -> dict[str, str]:
    """Returns the placeholders of compressor.md."""
    study = figures["compressor"]
    rows = [[f"`{label_of(row)}`", f"`{row['policy']}`", *visual_cells(row)] for row in study["rows"]]
    return {
        "target": title_of(study["target"]),
        "prompts": str(study["prompts"]),
        "prompt_tokens": f"{study['rows'][0]['prompt_tokens']:.0f}",
        "table": markdown_table(["compressor", "policy", *VISUAL_COLUMNS], rows, "<<>"),
        "command": study["rows"][0]["command"],
    }


def visual_cells(row: Json) -> list[str]:
    """Returns the cells of `VISUAL_COLUMNS`."""
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
    """Returns the compressor options of a row, like `conv ratio=20`."""
    return " ".join(word.rpartition("compressor=")[2].rpartition("compressor.")[2] for word in row["choice"])


def expectations(figures: Figures) -> list[Expectation]:
    """SpecVLM: a compressed head is faster than an uncompressed one, per policy."""
    rows = figures["compressor"]["rows"]
    policies = dict.fromkeys(row["policy"] for row in rows)
    by_policy = {policy: [row for row in rows if row["policy"] == policy] for policy in policies}
    return [_faster(policy, *group) for policy, group in by_policy.items() if len(group) > 1]


def _faster(policy: str, reference: Json, *others: Json) -> Expectation:
    best = max(others, key=lambda row: float(row["speedup"]))
    least = RETAINED * reference["tokens_per_target_pass"]
    num_retained = sum(row["tokens_per_target_pass"] >= least for row in others)
    evidence = (
        f"fastest is `{label_of(best)}`, {times(best['speedup'])} at {best['tokens_per_target_pass']:.2f} tokens per pass; "
        f"uncompressed {times(reference['speedup'])} at {reference['tokens_per_target_pass']:.2f}; {num_retained} of "
        f"{len(others)} retain {RETAINED:.0%} of the tokens per pass"
    )
    if best["speedup"] <= reference["speedup"]:
        evidence += f"; draft prefill only {reference['draft_prefill_ms'] - best['draft_prefill_ms']:.1f} ms shorter"
    claim = f"SpecVLM: a compressed head is faster than an uncompressed one, `{policy}`"
    return Expectation(claim, best["speedup"] > reference["speedup"], evidence)
