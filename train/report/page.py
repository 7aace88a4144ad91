"""`report.md` and `report.html` of a validation: headline, tables, plots, and setup. All figures come from report.json."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from checkpoints.run_folder import REPORT_PAGE
from sage.bench.report_table import SHARES, decode_shares, interruption, interval, margins, measured_with
from sage.io.files import write_text
from sage.io.tables import counted, markdown_table
from sage.trees import AUTOREGRESSIVE
from train.report.plots import Plot, write_plots
from train.report.prompt_list import prompt_section, read_prompts
from train.report.verdict import best_policy, verdict_markdown
from train.report.web import PAGE_SUFFIX, write_html

Report = Mapping[str, Any]
NUM_SINGLE_DEPTHS = 6  # deeper levels share a row

SPEED_NOTE = (
    "Speeds are those of decoding only: the clock starts after the target's prefill, which produces the first token, and "
    "includes the draft's prefill. *End to end* includes the vision tower and both prefills. *Mean accepted draft* excludes "
    "the token that every target pass produces, *tokens per target pass* includes it."
)
CALIBRATION_NOTE = (
    "the mean distance between predicted and observed acceptance, over ten equal bins of the prediction. Every prediction was "
    "made before its outcome was used for learning."
)
REPLAY_NOTE = (
    "*Coverage*: share of the nodes expanded by the policy that the recording contains. *Truncated*: rounds in which the "
    "policy would expand a node that the recording does not contain; its figure is then a lower bound. Speeds follow from "
    "timed passes and exclude the time of the policy itself."
)


def render_page(report: Report, plots: Sequence[Plot] = ()) -> str:
    """Returns the page as Markdown. Plots are embedded by relative name, so that the folder can be moved."""
    parts = [
        f"# Validation of `{report['draft']}` on {report['target']}",
        f"**{interruption(report['partial']).capitalize()}.**" if "partial" in report else "",
        headline(report),
        verdict_markdown(report),
        _policies(report),
        _losslessness(report),
        *[f"![{plot.caption}]({plot.file})\n\n*{plot.caption}*" for plot in plots],
        _decoding_time(report),
        _calibration(report),
        _replay(report),
        _families(report),
        _setup(report),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def write_pages(report: Report, folder: Path, markdown: Path | None = None) -> None:
    """Draws the plots of a report and writes its pages, Markdown and HTML, beside them.

    Args:
        folder: contains `prompts.json`, if there is one.
        markdown: path of the Markdown page; None: `report.md` in `folder`.
    """
    path = markdown or folder / REPORT_PAGE
    text = render_page(report, write_plots(report, path.parent))
    write_text(path, text)
    home = Path(os.path.relpath(folder, path.parent))
    section = prompt_section(report, read_prompts(folder), home)
    write_html(text, path.with_suffix(PAGE_SUFFIX), prompts=section)


def headline(report: Report) -> str:
    """Returns the speedup of the fastest speculative policy, and whether all outputs are identical, as sentences."""
    name, drafting = best_policy(report), [part for name, part in report["policies"].items() if name != AUTOREGRESSIVE]
    if name is None:
        return "Only autoregressive decoding was measured."
    part = report["policies"][name]
    factor = f"**{part['speedup']:.2f}x**"
    speed = f"{factor} faster than" if part["speedup"] > 1 else f"**slower**, at {factor} the speed of"
    match, total = sum(part["match"] for part in drafting), sum(part["total"] for part in drafting)
    reference = "greedy decoding of the target" if report["temperature"] == 0 else "sampling from the target with the same seed"
    return (
        f"`{name}` decodes {speed} the fastest autoregressive baseline (`{report['fastest_baseline']}`), "
        f"with {part['tokens_per_target_pass']:.2f} tokens per target pass. "
        f"{f'All {total}' if match == total else f'{match} of {total}'} outputs are identical to {reference}."
    )


def _policies(report: Report) -> str:
    head = ["policy", "tokens per target pass", "mean accepted draft", "tokens/s", "speedup", "95% interval", "end to end"]
    rows = [
        [f"`{name}`", f"{part['tokens_per_target_pass']:.2f}", f"{part['mean_accepted_draft']:.2f}", *_speeds(part)]
        for name, part in report["policies"].items()
    ]
    baselines = {name: part for name, part in report["baselines"].items() if name not in report["policies"]}
    rows += [[f"`{name}`", "", "", *_speeds(part)] for name, part in baselines.items()]
    failed = [f"`{name}` was left out: {reason}." for name, reason in report["failed_baselines"].items()]
    ahead = f"{margins(report)}." if margins(report) else ""
    parts = [markdown_table(head, rows), f"Measured with {measured_with(report)}.", SPEED_NOTE, ahead, *failed]
    return "\n\n".join(part for part in parts if part)


def _speeds(part: Mapping[str, Any]) -> list[str]:
    bounds, end_to_end = interval(part.get("speedup_ci")), f"{part['speedup_end_to_end']:.2f}x"
    return [f"{part['tokens_per_s']:.1f}", f"{part['speedup']:.2f}x", bounds, end_to_end]


def _losslessness(report: Report) -> str:
    has_hf = any("match_hf" in part for part in report["policies"].values())
    hf_head = ["identical to Hugging Face `generate`"] if has_hf else []
    head = ["policy", "identical to the target", *hf_head, "top-2 logit gap at the first difference"]
    rows = []
    for name, part in report["policies"].items():
        row = [f"`{name}`", f"{part['match']} of {part['total']}"]
        row += [f"{part['match_hf']} of {part['total']}" if "match_hf" in part else "-"] if has_hf else []
        rows.append([*row, ", ".join(f"{gap:.2g}" for gap in part["first_gaps"]) or "-"])
    return f"## Losslessness\n\n{markdown_table(head, rows)}"


def _decoding_time(report: Report) -> str:
    shares = {name: decode_shares(part) for name, part in report["policies"].items()}
    rows = [[f"`{name}`", *(f"{share:.1%}" for share in own)] for name, own in shares.items() if own is not None]
    return f"## Decoding time\n\n{markdown_table(['policy', *SHARES], rows)}" if rows else ""


def _calibration(report: Report) -> str:
    """Expected calibration error by depth, of every policy with calibration."""
    sections = {name: part for name, part in report.get("calibration", {}).items() if part["by_depth"]}
    if not sections:
        return ""
    head = ["policy", "depth", "labels", "error before calibration", "after calibration"]
    rows = []
    for name, part in sections.items():
        total = {"depth": "all", **{key: part[key] for key in ("labels", "before", "after")}}
        rows += [
            [f"`{name}`", str(row["depth"]), str(row["labels"]), f"{row['before']:.3f}", f"{row['after']:.3f}"]
            for row in [*_merge_deep(part["by_depth"]), total]
        ]
    rounds = ", ".join(f"{part['rounds']} rounds of `{name}`" for name, part in sections.items())
    accepted = " ".join(
        f"`{name}` expected {part['expected']:.2f} accepted draft tokens per round and measured {part['accepted']:.2f}."
        for name, part in sections.items()
    )
    note = f"Expected calibration error over {rounds}: {CALIBRATION_NOTE} {accepted}"
    return f"## Calibration\n\n{markdown_table(head, rows)}\n\n{note}"


def _merge_deep(by_depth: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Merges the depths that few trees reach into one row: the mean weighted by labels."""
    deep = by_depth[NUM_SINGLE_DEPTHS:]
    if len(deep) < 2:
        return list(by_depth)
    labels = sum(row["labels"] for row in deep)
    means = {key: sum(row[key] * row["labels"] for row in deep) / labels for key in ("before", "after")}
    return [*by_depth[:NUM_SINGLE_DEPTHS], {"depth": f"{deep[0]['depth']}+", "labels": labels, **means}]


def _replay(report: Report) -> str:
    section = report.get("replay")
    if not section:
        return ""
    head = ["policy", "tokens per target pass", "nodes", "depth", "draft steps", "tokens/s, predicted", "coverage", "truncated"]
    formats = {"tokens_per_target_pass": ".2f", "nodes_per_round": ".1f", "depth": ".1f", "draft_steps_per_round": ".2f"}
    formats |= {"tokens_per_s": ".0f", "coverage": ".1%", "cut": ".1%"}
    policies = section["policies"].items()
    rows = [[f"`{name}`", *(f"{part[key]:{form}}" for key, form in formats.items())] for name, part in policies]
    recorder = ", ".join(f"{key} {value}" for key, value in section["recorder"].items())
    note = f"Per round, over the same {section['rounds']} recorded rounds for every policy ({recorder}). {REPLAY_NOTE}"
    return f"## Replay: the same drafts under every policy\n\n{markdown_table(head, rows)}\n\n{note}"


def _families(report: Report) -> str:
    if not report["by_family"]:
        return ""
    rows = [
        [family, str(part["prompts"]), f"`{name}`", f"{part['tokens_per_target_pass']:.2f}", f"{part['speedup']:.2f}x"]
        for family, policies in report["by_family"].items()
        for name, part in policies.items()
        if name != AUTOREGRESSIVE
    ]
    head = ["task", "prompts", "policy", "tokens per target pass", "speedup"]
    return f"## By task\n\n{markdown_table(head, rows, '<><>')}"


def _setup(report: Report) -> str:
    machine = report["machine"]
    cores = f"{counted(machine['cores'], 'core')}, {counted(machine['torch_threads'], 'thread')}"
    processor = machine.get("gpu") or f"{machine['cpu']}, {cores}"
    processor += f", load average {machine['load_average']:.1f} during the last minute"
    sampling = "greedy" if report["temperature"] == 0 else f"temperature {report['temperature']:g}, seed {report['seed']}"
    runs = "one run" if report["repeats"] == 1 else f"medians of {report['repeats']} interleaved runs"
    trained = f"; draft after {counted(report['step'], 'training step')}" if report.get("step") is not None else ""
    together = f"; policies decode {report['batch_size']} prompts together" if "batch_size" in report else ""
    lines = [
        f"- {counted(report['prompts'], 'prompt')}, {runs} each, at most {report['max_new_tokens']} new tokens, "
        f"{sampling}{together}{trained}",
        f"- {report['dtype']} on `{report['device']}`: {processor}, {machine['system']}",
        "- " + ", ".join(f"{package} {number}" for package, number in report["versions"].items()),
    ]
    command = f"\n\n```\n{report['command']}\n```" if report.get("command") else ""
    return "## Setup\n\n" + "\n".join(lines) + command
