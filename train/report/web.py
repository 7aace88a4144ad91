"""Reports as HTML pages: the Markdown of a report with tables that sort, and its plots.

The text is that of the Markdown page. Only what our own reports contain is read: headings, tables, lists, fenced code, plots,
and code, strong and emphasized text, relative links and escaped asterisks within a line; everything else is text.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from sage.io.page import render, span, table, write_page

HTML = Path(__file__).parent / "html"
PAGE_SUFFIX, TEXT_SUFFIX = ".html", ".md"
INLINE = re.compile(
    r"\\(?P<mark>[*])|"
    r"`(?P<code>[^`]+)`|\*\*(?P<strong>.+?)\*\*|(?<![\w*])\*(?P<em>[^*\s][^*]*)\*|\[(?P<label>[^\]]+)\]\((?P<href>[^):\s]+)\)"
)
PLOT = re.compile(r"!\[(?P<caption>.*)\]\((?P<file>[^)]+)\)")
RULE = re.compile(r"\|( (:--|--:) \|)+")
Spans = list[dict[str, Any]]


def write_html(markdown: str, path: Path, **sections: Any) -> None:
    """Writes a report as a page.

    Args:
        markdown: the content of the Markdown page beside it.
        path: its folder contains the plots; links to Markdown pages with an HTML page beside them lead to that.
        sections: `prompts`, the rows of train.report.prompt_list.

    Raises:
        CannotWrite: the disk is full or not writable.
    """
    found = list(blocks(markdown, path.parent))
    title = next((block["text"] for block in found if block["kind"] == "title"), path.stem)
    groups = [list(group) for _, group in groupby(found, lambda block: block["kind"] == "plot")]
    write_page(path, render(HTML / "report.html", title=title, groups=groups, **{"prompts": None, **sections}))


def blocks(markdown: str, home: Path) -> Iterator[dict[str, Any]]:
    """Yields the blocks of a page as `kind` and content; `home` is the folder of its links."""
    for block in re.split(r"\n{2,}", markdown.strip()):
        lines = block.split("\n")
        if lines[0].startswith("# "):
            yield {"kind": "title", "text": "".join(_texts(spans(lines[0][2:], home)))}
        elif lines[0].startswith("## "):
            yield {"kind": "heading", "text": "".join(_texts(spans(lines[0][3:], home)))}
        elif lines[0].startswith("```"):
            yield {"kind": "code", "text": "\n".join(lines[1:-1])}
        elif found := PLOT.fullmatch(block):
            yield {"kind": "plot", "caption": found["caption"], "url": _data_url(home / found["file"])}
        elif len(lines) > 1 and RULE.fullmatch(lines[1]):
            head, *rows = (_cells(line) for line in (lines[0], *lines[2:]))
            names = ["".join(_texts(spans(cell, home))) for cell in head]
            text_columns = [place for place, rule in enumerate(_cells(lines[1])) if rule.startswith(":")]
            cells = [[spans(cell, home) for cell in row] for row in rows]
            yield {"kind": "table", "table": table(names, cells, text_columns=text_columns)}
        elif all(line.startswith(("* ", "- ")) for line in lines):
            yield {"kind": "list", "items": [spans(line[2:], home) for line in lines]}
        elif not re.fullmatch(r"\*[^*]+\*", block):  # the caption below a plot, which the plot has already
            yield {"kind": "text", "spans": spans(" ".join(lines), home), "is_warning": block.startswith("warning: ")}


def _data_url(plot: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(plot.read_bytes()).decode()}"


def _cells(line: str) -> list[str]:
    inside = line.strip().removeprefix("|").removesuffix("|")
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", inside)]


def spans(text: str, home: Path) -> Spans:
    """Returns the parts of a line as `kind` (text, code, strong, em, link), `text` or nested `spans`, and `href`."""
    parts: Spans = []
    end = 0
    for match in INLINE.finditer(text):
        parts.append(span(text[end : match.start()]))
        end = match.end()
        if match["mark"] is not None:
            parts.append(span(match["mark"]))
        elif match["code"] is not None:
            parts.append(span(match["code"], "code"))
        elif match["href"] is not None:
            parts.append({"kind": "link", "spans": spans(match["label"], home), "href": _link(match["href"], home)})
        else:
            kind = "strong" if match["strong"] is not None else "em"
            parts.append({"kind": kind, "spans": spans(match[kind], home)})
    parts.append(span(text[end:]))
    return [part for part in parts if part.get("text") != ""]


def _link(href: str, home: Path) -> str:
    page = str(Path(href).with_suffix(PAGE_SUFFIX).as_posix())
    return page if href.endswith(TEXT_SUFFIX) and (home / page).is_file() else href


def _texts(parts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for part in parts:
        yield from [part["text"]] if "text" in part else _texts(part["spans"])
