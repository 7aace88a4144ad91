"""The list of prompts on the page of a validation: question, pictures, tokens per pass by policy, and links to traces.

What report.json does not contain lies beside it in `prompts.json`, so that the page can be drawn again: `text`, `pictures` and
`traces` (policy -> page, relative to the folder) by name of the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sage.inputs.thumbnails import media_thumbnails
from sage.io.page import table
from sage.replay.trace import message_text
from sage.trees import AUTOREGRESSIVE
from train.report.verdict import best_policy

FILE = "prompts.json"
IMAGE_SIDE, FRAME_SIDE, MAX_FRAMES = 64, 40, 4  # of pictures in the list: pixels, pixels, frames of a video
MAX_TEXT = 160  # characters of a question
MAX_PICTURED = 128  # prompts with pictures; those of more would make the page large

Report = Mapping[str, Any]


def describe(names: Sequence[str], messages: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Returns the content of `prompts.json` without traces, for the prompts whose chat messages are known."""
    known = [name for name in names if name in messages]
    return {
        name: {
            "text": _shortened(message_text(messages[name][-1].get("content", ""))),
            "pictures": _pictures(messages[name]) if place < MAX_PICTURED else [],
            "traces": {},
        }
        for place, name in enumerate(known)
    }


def _shortened(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= MAX_TEXT else f"{words[: MAX_TEXT - 1]}\u2026"


def _pictures(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [asdict(frame) for one in media_thumbnails(messages, IMAGE_SIDE, FRAME_SIDE, MAX_FRAMES) for frame in one.frames]


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
    """Returns the names of the prompts by tokens per target pass of the fastest policy, the best first."""
    best = best_policy(report)
    rows = report["policies"][best].get("per_prompt", []) if best is not None else []
    return [str(row["name"]) for row in sorted(rows, key=lambda row: -float(row["tokens_per_target_pass"]))]


def prompt_section(report: Report, described: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """Returns `note` and `table` of the list, a row per prompt; None if no prompt was decoded with a draft.

    Args:
        described: the content of `prompts.json`.
    """
    policies, ranked = drafting_by_speed(report), ranked_prompts(report)
    if not ranked:
        return None
    found = {name: {str(row["name"]): row for row in report["policies"][name]["per_prompt"]} for name in policies}
    first = found[policies[0]]
    has_pictures = any(one["pictures"] for one in described.values())
    has_traces = any(one["traces"] for one in described.values())
    has_families, has_text = any(row["family"] for row in first.values()), bool(described)
    head = ["prompt", *["picture"] * has_pictures, *["question"] * has_text, *["task"] * has_families, "tokens", *policies]
    rows = []
    for name in ranked:
        one = described.get(name, {"text": "", "pictures": [], "traces": {}})
        row: list[Any] = [name, *[{"frames": one["pictures"]}] * has_pictures, *[{"text": one["text"]}] * has_text]
        row += [*[first[name]["family"] or "-"] * has_families, first[name]["tokens"]]
        row += [f"{found[policy][name]['tokens_per_target_pass']:.2f}" if name in found[policy] else "-" for policy in policies]
        links = [{"href": page, "text": policy} for policy, page in one["traces"].items()]
        rows.append([*row, *[links or "-"] * has_traces])
    note = f"Tokens per target pass of every prompt, those that {policies[0]} decodes in the fewest passes first."
    note += " The traces show every round of these answers, decoded once more after the measurement." if has_traces else ""
    return {"note": note, "table": table([*head, *["traces"] * has_traces], rows, id="prompts", text=_text_columns(head))}


def _text_columns(head: Sequence[str]) -> list[int]:
    return [place for place, name in enumerate(head) if name in ("prompt", "picture", "question", "task")]
