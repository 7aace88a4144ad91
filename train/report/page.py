"""`report.md`: the page a person reads first. A headline, the table, the plots, and what it takes to repeat it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sage.bench.report_table import SHARES, decode_shares, interval, margins
from train.report.plots import Plot

Report = Mapping[str, Any]
DEPTHS_APART = 6


def render_page(report: Report, plots: Sequence[Plot] = ()) -> str:
    """The whole page as Markdown. Pictures are embedded by their name, so the folder can be moved as one."""
    parts = [
        f"# Validation of `{report['draft']}` on {report['target']}",
        headline(report),
        _policies(report),
        _losslessness(report),
        *[f"![{plot.caption}]({plot.file})\n\n*{plot.caption}*" for plot in plots],
        _breakdown(report),
        _calibration(report),
        _replay(report),
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
    ahead = f"{margins(report)}." if margins(report) else ""
    return "\n\n".join(part for part in [_table(head, rows, left=1), note, ahead, *failed] if part)


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
    shares = {name: decode_shares(part) for name, part in report["policies"].items()}
    rows = [[f"`{name}`", *(f"{share:.1%}" for share in own)] for name, own in shares.items() if own is not None]
    return f"## Decoding time\n\n{_table(['policy', *SHARES], rows, left=1)}" if rows else ""


def _calibration(report: Report) -> str:
    """Expected calibration error by depth, of every policy that calibrates."""
    sections = {name: part for name, part in report.get("calibration", {}).items() if part["by_depth"]}
    if not sections:
        return ""
    head = ["policy", "depth", "labels", "error of the draft's probabilities", "after calibration"]
    rows = []
    for name, part in sections.items():
        every = {"depth": "all", **{key: part[key] for key in ("labels", "before", "after")}}
        rows += [
            [f"`{name}`", str(row["depth"]), str(row["labels"]), f"{row['before']:.3f}", f"{row['after']:.3f}"]
            for row in [*_few_depths(part["by_depth"]), every]
        ]
    rounds = ", ".join(f"{part['rounds']} rounds of `{name}`" for name, part in sections.items())
    note = (
        f"Expected calibration error over {rounds}: the mean distance between predicted and observed acceptance, over ten "
        "equal ranges of the prediction. Each prediction was made before its outcome was learned from."
    )
    got = " ".join(
        f"`{name}` expected {part['expected']:.2f} drafted tokens to be accepted per round and got {part['accepted']:.2f}."
        for name, part in sections.items()
    )
    return f"## Calibration\n\n{_table(head, rows, left=1)}\n\n{note} {got}"


def _few_depths(by_depth: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Depths that few trees reach, as one row: the mean weighted by labels."""
    deep = by_depth[DEPTHS_APART:]
    if len(deep) < 2:
        return list(by_depth)
    labels = sum(row["labels"] for row in deep)
    means = {key: sum(row[key] * row["labels"] for row in deep) / labels for key in ("before", "after")}
    return [*by_depth[:DEPTHS_APART], {"depth": f"{deep[0]['depth']}+", "labels": labels, **means}]


def _replay(report: Report) -> str:
    """What each policy would have achieved on the same drafts."""
    section = report.get("replay")
    if not section:
        return ""
    head = ["policy", "tokens per target pass", "nodes", "depth", "draft steps", "tokens/s, predicted", "recorded", "cut short"]
    rows = [
        [
            f"`{name}`",
            f"{part['tokens_per_target_pass']:.2f}",
            f"{part['nodes_per_round']:.1f}",
            f"{part['depth']:.1f}",
            f"{part['draft_steps_per_round']:.2f}",
            f"{part['tokens_per_s']:.0f}",
            f"{part['coverage']:.1%}",
            f"{part['cut']:.1%}",
        ]
        for name, part in section["policies"].items()
    ]
    recorder = ", ".join(f"{key} {value}" for key, value in section["recorder"].items())
    note = (
        f"Every policy at the starts of the same {section['rounds']} recorded rounds ({recorder}), per round. *Recorded*: the "
        "share of the nodes it asks the draft about that the recording holds. *Cut short*: rounds in which it would have gone "
        "on below a node that it does not hold; there its figure is a lower bound. Speeds follow from timed passes and leave "
        "out the policy's own time."
    )
    return f"## The same drafts under every policy\n\n{_table(head, rows, left=1)}\n\n{note}"


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
