"""Reports as HTML pages: the Markdown of a report with tables that sort and its plots inside.

Raw HTML in a report is text, and only relative links are links: names of policies, prompts and files may contain anything.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from sage.io.page import render, visible, write_page

HTML = Path(__file__).parent / "html"
TABLE = '<div class="wide" tabindex="0" role="region" aria-label="table"><table class="sortable">', "</table></div>"
PAGE_SUFFIX, TEXT_SUFFIX = ".html", ".md"


def write_html(markdown: str, path: Path, **sections: Any) -> None:
    """Writes a report as a page.

    Args:
        markdown: the content of the Markdown page beside it.
        path: its folder contains the plots; links to Markdown pages with an HTML page beside them lead to that.
        sections: `prompts`, the rows of train.report.prompt_list.

    Raises:
        CannotWrite: the disk is full or not writable.
    """
    from markupsafe import Markup

    heading, _, rest = visible(markdown).partition("\n")
    title = heading.removeprefix("# ").replace("`", "")
    content = Markup(markdown_html(rest, path.parent))
    write_page(path, render(HTML / "report.html", title=title, content=content, **{"prompts": None, **sections}))


def markdown_html(text: str, home: Path) -> str:
    """Returns Markdown (CommonMark and tables) as HTML.

    Args:
        home: the folder of its links and plots.
    """
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
            if part.type == "link_open":
                part.attrs["href"] = _link(str(part.attrs["href"]), home)
            elif part.type == "image":
                part.attrs |= {"src": _data_url(home / str(part.attrs["src"])), "class": "plot"}
    made = parser.renderer.render(tokens, parser.options, {})
    return str(made).replace("<table>", TABLE[0]).replace("</table>", TABLE[1])


def _link(href: str, home: Path) -> str:
    page = str(Path(href).with_suffix(PAGE_SUFFIX).as_posix())
    return page if href.endswith(TEXT_SUFFIX) and (home / page).is_file() else href


def _data_url(plot: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(plot.read_bytes()).decode()}"
