"""`report.md`: the page a person reads first. A headline, the table, the plots, and what it takes to repeat it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sage.bench.projection import BOOKKEEPING
from sage.bench.table import interval
from train.report.plots import Plot

Report = Mapping[str, Any]


def render_page(report: Report, plots: Sequence[Plot] = ()) -> str:
    """The whole page as Markdown. Pictures are embedded by their name, so the folder can be moved as one."""
    parts = [
        f"# Validation of `{report['draft']}` on {report['target']}",
        headline(report),
        _policies(report),
        _losslessness(report),
        *[f"![{plot.caption}]({plot.file})\n\n*{plot.caption}*" for plot in plots],
        _breakdown(report),
        _families(report),
        _setup(report),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def headline(report: Report) -> str:
    """The result in one or two sentences: the fastest speculative policy, and whether output is the target's own."""
    name = best_policy(report)
    if name is None:
        return "Only autoregressive decoding was measured."
    part = report["policies"][name]
    verdict = "faster than" if part["speedup"] > 1 else "**slower** than"
    factor = part["speedup"] if part["speedup"] > 1 else 1 / max(part["speedup"], 1e-9)
    return (
        f"`{name}` decodes **{factor:.2f}x** {verdict} the fastest autoregressive baseline (`{report['fastest_baseline']}`), "
        f"with {part['tokens_per_target_pass']:.2f} tokens per target pass. {_same_output(report)}"
    )


def best_policy(report: Report) -> str | None:
    """The speculative policy with the highest decode speedup; None if there is none."""
    names = [name for name in report["policies"] if name != "autoregressive"]
    return max(names, key=lambda name: report["policies"][name]["speedup"], default=None)


def _same_output(report: Report) -> str:
    parts = [part for name, part in report["policies"].items() if name != "autoregressive"]
    match, total = sum(part["match"] for part in parts), sum(part["total"] for part in parts)
    own = "the target's own greedy decoding" if report["temperature"] == 0 else "the target's own sampling with the same seed"
    if match == total:
        return f"All {total} outputs are identical to {own}."
    return f"{match} of {total} outputs are identical to {own}."


def _policies(report: Report) -> str:
    head = ["policy", "tokens per target pass", "mean accepted draft", "tokens/s", "speedup", "95% interval", "end to end"]
    rows = [
        [
            f"`{name}`",
            f"{part['tokens_per_target_pass']:.2f}",
            f"{part['mean_accepted_draft']:.2f}",
            f"{part['tokens_per_s']:.1f}",
            f"{part['speedup']:.2f}x",
            interval(part.get("speedup_ci")),
            f"{part['speedup_end_to_end']:.2f}x",
        ]
        for name, part in report["policies"].items()
    ]
    rows += [
        [
            f"`{name}`",
            "",
            "",
            f"{part['tokens_per_s']:.1f}",
            f"{part['speedup']:.2f}x",
            interval(part.get("speedup_ci")),
            f"{part['speedup_end_to_end']:.2f}x",
        ]
        for name, part in report["baselines"].items()
        if name not in report["policies"]
    ]
    note = (
        "Speeds are decode-only: the clock starts when the target's prefill has yielded the first token, and the draft's own "
        "prefill counts against it. *End to end* includes the vision tower and both prefills. `mean accepted draft` leaves "
        "out the token that every target pass yields anyway, `tokens per target pass` includes it."
    )
    failed = [f"`{name}` was left out: {reason}." for name, reason in report["failed_baselines"].items()]
    return "\n\n".join([_table(head, rows, left=1), note, *failed])


def _losslessness(report: Report) -> str:
    has_hf = any("match_hf" in part for part in report["policies"].values())
    head = [
        "policy",
        "same as the target's own decoding",
        *(["same as Hugging Face `generate`"] if has_hf else []),
        "top-2 gap where it differs",
    ]
    rows = []
    for name, part in report["policies"].items():
        row = [f"`{name}`", f"{part['match']} of {part['total']}"]
        row += [f"{part['match_hf']} of {part['total']}" if "match_hf" in part else "-"] if has_hf else []
        rows.append([*row, ", ".join(f"{gap:.2g}" for gap in part["first_gaps"]) or "-"])
    return f"## Is the output the target's own?\n\n{_table(head, rows, left=1)}"


def _breakdown(report: Report) -> str:
    """The share of decoding time that is no model compute, the figure that a decoder is judged by."""
    policies = {name: part for name, part in report["policies"].items() if _decode_s(part) > 0}
    head = ["policy", "target passes", "draft", "acceptance", "cache commit", "policy", "other", "not model compute"]
    rows = []
    for name, part in policies.items():
        time_s, total = part["time_s"], _decode_s(part)
        shares = [time_s["verify"], time_s["draft_prefill"] + time_s["draft_steps"], *(time_s[stage] for stage in BOOKKEEPING)]
        rows.append([f"`{name}`", *(f"{value / total:.1%}" for value in shares), f"{sum(shares[2:]) / total:.1%}"])
    return f"## Decoding time\n\n{_table(head, rows, left=1)}" if rows else ""


def _decode_s(part: Mapping[str, Any]) -> float:
    time_s = part["time_s"]
    return sum(seconds for stage, seconds in time_s.items() if stage not in ("vision", "target_prefill"))


def _families(report: Report) -> str:
    if not report["by_family"]:
        return ""
    rows = [
        [family, str(part["prompts"]), f"`{name}`", f"{part['tokens_per_target_pass']:.2f}", f"{part['speedup']:.2f}x"]
        for family, policies in report["by_family"].items()
        for name, part in policies.items()
        if name != "autoregressive"
    ]
    head = ["task", "prompts", "policy", "tokens per target pass", "speedup"]
    return f"## By task\n\n{_table(head, rows, left=3)}"


def _setup(report: Report) -> str:
    machine = report["machine"]
    processor = machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores, {machine['torch_threads']} threads"
    processor += f", load average {machine['load_average']:.1f} during the last minute"
    sampling = "greedy" if report["temperature"] == 0 else f"temperature {report['temperature']:g}, seed {report['seed']}"
    lines = [
        f"- prompts: {report['prompts']}, interleaved runs of each: {report['repeats']} (medians), at most "
        f"{report['max_new_tokens']} new tokens, {sampling}; the draft after {report.get('step', 0)} steps",
        f"- {report['dtype']} on `{report['device']}`: {processor}, {machine['system']}",
        "- " + ", ".join(f"{package} {number}" for package, number in report["versions"].items()),
    ]
    command = f"\n\n```\n{report['command']}\n```" if report.get("command") else ""
    return "## To repeat it\n\n" + "\n".join(lines) + command


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """A Markdown table whose first `left` columns are left-aligned and the others right-aligned."""
    rule = [":--" if column < left else "--:" for column in range(len(head))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *rows])
