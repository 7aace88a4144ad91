"""The list of prompts on the page of a validation: question, pictures, tokens per pass by policy, and links to traces.

What report.json does not contain lies beside it in `prompts.json`, so that the page can be drawn again: `text`, `pictures` and
`traces` (policy -> page, relative to the folder) by name of the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage.inputs.messages import text_of
from sage.inputs.thumbnails import media_thumbnails
from sage.io.page import link, span, table
from sage.trees import AUTOREGRESSIVE
from train.report.verdict import best_policy

if TYPE_CHECKING:
    from sage.bench.measurement import BenchPrompt

FILE = "prompts.json"
IMAGE_SIDE, FRAME_SIDE, MAX_FRAMES = 64, 40, 4  # of pictures in the list: pixels, pixels, frames of a video
MAX_TEXT = 160  # characters of a question
MAX_PICTURED = 128  # prompts with pictures; those of more would make the page large
UNKNOWN: Mapping[str, Any] = {"text": "", "pictures": (), "traces": {}}

Report = Mapping[str, Any]


def describe(prompts: Sequence[BenchPrompt], traces: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, Any]]:
    """Returns the content of `prompts.json`: the prompts whose chat messages are known, or that were traced.

    Args:
        traces: by name of the prompt, then of the policy: the file of the page.
    """
    known = [prompt for prompt in prompts if prompt.messages or prompt.name in traces]
    return {
        prompt.name: {
            "text": _question(prompt),
            "pictures": _pictures(prompt) if place < MAX_PICTURED else [],
            "traces": dict(traces.get(prompt.name, {})),
        }
        for place, prompt in enumerate(known)
    }


def _question(prompt: BenchPrompt) -> str:
    words = " ".join(text_of(prompt.messages[-1]).split()) if prompt.messages else ""
    return words if len(words) <= MAX_TEXT else f"{words[: MAX_TEXT - 1]}\u2026"


def _pictures(prompt: BenchPrompt) -> list[dict[str, Any]]:
    media = media_thumbnails(prompt.messages, IMAGE_SIDE, FRAME_SIDE, MAX_FRAMES)
    return [asdict(frame) for one in media for frame in one.frames]


def read_prompts(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the content of `prompts.json` in the folder of a report; {} without one."""
    path = folder / FILE
    found: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def drafting_by_speed(report: Report) -> list[str]:
    """Returns the policies that draft, the fastest first."""
    names = [name for name in report["policies"] if name != AUTOREGRESSIVE]
    return sorted(names, key=lambda name: -float(report["policies"][name]["speedup"]))


def ranked_prompts(report: Report) -> list[str]:
    """Returns the names of the prompts by tokens per target pass of the fastest policy, the most first."""
    best = best_policy(report)
    rows = report["policies"][best].get("per_prompt", []) if best is not None else []
    return [str(row["name"]) for row in sorted(rows, key=lambda row: -float(row["tokens_per_target_pass"]))]


def prompt_section(report: Report, described: Mapping[str, Mapping[str, Any]], home: Path) -> dict[str, Any] | None:
    """Returns `note`, `table` and `has_traces` of the list, a row per prompt; None if no prompt was decoded with a draft.

    Args:
        described: the content of `prompts.json`.
        home: its folder, relative to that of the page.
    """
    ranked, policies = ranked_prompts(report), drafting_by_speed(report)
    if not ranked:
        return None
    found = {name: {str(row["name"]): row for row in report["policies"][name]["per_prompt"]} for name in policies}
    first = found[policies[0]]
    columns: dict[str, list[Any]] = {"prompt": ranked}
    known = [described.get(name, UNKNOWN) for name in ranked]
    if has_traces := any(one["traces"] for one in known):
        columns["traces"] = [_links(one["traces"], home) for one in known]
    if any(one["pictures"] for one in known):
        columns["picture"] = [[{"kind": "picture", **frame} for frame in one["pictures"]] for one in known]
    if any(one["text"] for one in known):
        columns["question"] = [one["text"] for one in known]
    if any(row["family"] for row in first.values()):
        columns["task"] = [first[name]["family"] or "-" for name in ranked]
    text_columns = range(len(columns))
    columns["tokens"] = [first[name]["tokens"] for name in ranked]
    for policy, rows in found.items():
        columns[policy] = [f"{rows[name]['tokens_per_target_pass']:.2f}" if name in rows else "-" for name in ranked]
    note = [span("Tokens per target pass of every prompt, sorted by those of "), span(policies[0], "code"), span(".")]
    if has_traces:
        note.append(span(" A trace shows every round of an answer, which was decoded once more after the measurement."))
    cells = list(zip(*columns.values(), strict=True))
    return {"note": note, "has_traces": has_traces, "table": table(list(columns), cells, text_columns=text_columns)}


def _links(traces: Mapping[str, str], home: Path) -> list[dict[str, Any]]:
    spans = [part for policy, page in traces.items() for part in (link(policy, (home / page).as_posix()), span(" "))]
    return spans[:-1] or [span("-")]
