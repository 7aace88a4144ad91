"""Reports as HTML pages: the Markdown of a report with tables that sort, its plots inside, and a list of prompts.

Raw HTML in a report is text, and only relative links are links: names of policies, prompts and files may contain anything.

What report.json does not contain of its prompts lies beside it in `prompts.json`, so that the page can be drawn again: `text`,
`pictures` and `traces` (policy -> page, relative to the folder) by name of the prompt.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage.inputs.messages import text_of
from sage.inputs.thumbnails import media_thumbnails
from sage.io.files import read_json, write_text
from sage.io.page import link, render, span, table, visible, write_page
from train.report.verdict import best_policy, drafting_by_speed

if TYPE_CHECKING:
    from sage.bench.measurement import BenchPrompt

HTML = Path(__file__).parent / "html"
TABLE = '<div class="wide" tabindex="0" role="region" aria-label="table"><table class="sortable">', "</table></div>"
PAGE_SUFFIX, TEXT_SUFFIX = ".html", ".md"
PROMPTS_FILE = "prompts.json"
IMAGE_SIDE, FRAME_SIDE, MAX_FRAMES = 64, 40, 4  # of pictures in the list: pixels, pixels, frames of a video
MAX_TEXT = 160  # characters of a question
MAX_PICTURED = 128  # prompts with pictures; those of more would make the page large
UNKNOWN: Mapping[str, Any] = {"text": "", "pictures": (), "traces": {}}

Report = Mapping[str, Any]


def write_report(markdown: str, path: Path, prompts: Mapping[str, Any] | None = None) -> None:
    """Writes a report as Markdown, and beside it as an HTML page. Raises CannotWrite if the disk is full or not writable.

    Args:
        path: of the Markdown; its folder contains the plots. Links to Markdown with an HTML page beside it lead to that page.
        prompts: of `prompt_section`.
    """
    from markupsafe import Markup

    write_text(path, markdown)
    heading, _, rest = visible(markdown).partition("\n")
    title = heading.removeprefix("# ").replace("`", "")
    content = Markup(markdown_html(rest, path.parent))
    page = render(HTML / "report.html", title=title, content=content, prompts=prompts)
    write_page(path.with_suffix(PAGE_SUFFIX), page)


def markdown_html(text: str, home: Path) -> str:
    """Returns Markdown (CommonMark and tables) as HTML; its links and plots are relative to `home`."""
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    parser.validateLink = lambda url: ":" not in url  # type: ignore[method-assign]
    tokens = parser.parse(text)
    for token in tokens:
        if token.type in ("th_open", "td_open"):
            token.attrs = {"class": "name"} if "left" in str(token.attrs.get("style")) else {}
        elif token.type == "inline" and token.content.startswith("warning: "):
            tokens[tokens.index(token) - 1].attrs = {"class": "warning"}
        for part in token.children or ():
            if part.type == "link_open" and str(part.attrs["href"]).endswith(TEXT_SUFFIX):
                page = Path(str(part.attrs["href"])).with_suffix(PAGE_SUFFIX)
                part.attrs |= {"href": page.as_posix()} if (home / page).is_file() else {}
            elif part.type == "image":
                plot = base64.b64encode((home / str(part.attrs["src"])).read_bytes()).decode()
                part.attrs |= {"src": f"data:image/png;base64,{plot}", "class": "plot"}
    made = parser.renderer.render(tokens, parser.options, {})
    return str(made).replace("<table>", TABLE[0]).replace("</table>", TABLE[1])


def describe_prompts(prompts: Sequence[BenchPrompt], traces: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, Any]]:
    """Returns the content of `prompts.json`: the prompts whose chat messages are known, or that were traced.

    Args:
        traces: by name of the prompt, then of the policy: the file of the page.
    """
    described: dict[str, dict[str, Any]] = {}
    for prompt in (prompt for prompt in prompts if prompt.messages or prompt.name in traces):
        text = " ".join(text_of(prompt.messages[-1]).split()) if prompt.messages else ""
        shown = prompt.messages if len(described) < MAX_PICTURED else ()
        media = media_thumbnails(shown, IMAGE_SIDE, FRAME_SIDE, MAX_FRAMES)
        described[prompt.name] = {
            "text": text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}\u2026",
            "pictures": [asdict(frame) for item in media for frame in item.frames],
            "traces": dict(traces.get(prompt.name, {})),
        }
    return described


def ranked_prompts(report: Report) -> list[str]:
    """Returns the names of the prompts by tokens per target pass of the fastest policy, the most first."""
    best = best_policy(report)
    rows = report["policies"][best].get("per_prompt", []) if best is not None else []
    return [str(row["name"]) for row in sorted(rows, key=lambda row: -float(row["tokens_per_target_pass"]))]


def prompt_section(report: Report, folder: Path, page: Path) -> dict[str, Any] | None:
    """Returns `note`, `table` and `has_traces` of the list, a row per prompt; None if no prompt was decoded with a draft.

    Args:
        folder: contains `prompts.json`, if there is one.
        page: whose links to traces are relative.
    """
    ranked, policies = ranked_prompts(report), drafting_by_speed(report)
    if not ranked:
        return None
    described = read_json(folder / PROMPTS_FILE) if (folder / PROMPTS_FILE).is_file() else {}
    known = [described.get(name, UNKNOWN) for name in ranked]
    home = Path(os.path.relpath(folder, page.parent))
    rows = {policy: {str(row["name"]): row for row in report["policies"][policy]["per_prompt"]} for policy in policies}
    first = rows[policies[0]]
    columns: dict[str, list[Any]] = {"prompt": ranked}
    if has_traces := any(each["traces"] for each in known):
        links = [[link(policy, (home / file).as_posix()) for policy, file in each["traces"].items()] for each in known]
        columns["traces"] = [cell or "-" for cell in links]
    if any(each["pictures"] for each in known):
        columns["picture"] = [[{"kind": "picture", **frame} for frame in each["pictures"]] for each in known]
    if any(each["text"] for each in known):
        columns["question"] = [each["text"] for each in known]
    if any(row["family"] for row in first.values()):
        columns["task"] = [first[name]["family"] or "-" for name in ranked]
    text_columns = range(len(columns))
    columns["tokens"] = [first[name]["tokens"] for name in ranked]
    for policy in policies:
        figures = (rows[policy].get(name, {}).get("tokens_per_target_pass") for name in ranked)
        columns[policy] = ["-" if value is None else f"{value:.2f}" for value in figures]
    note = [span("Tokens per target pass of every prompt, sorted by those of "), span(policies[0], "code"), span(".")]
    if has_traces:
        note.append(span(" A trace shows every round of an answer, which was decoded once more after the measurement."))
    cells = list(zip(*columns.values(), strict=True))
    return {"note": note, "has_traces": has_traces, "table": table(list(columns), cells, text_columns=text_columns)}
