"""HTML pages of one file: a template that extends `html/base.html`, the one style sheet, inline scripts.

Style sheet and script are named by hash in the page's Content-Security-Policy, so that no other script, style, font, frame or
request can run or leave, whatever text the page shows.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from sage.io.files import writing

HTML = Path(__file__).parent / "html"
FRAME_HEIGHT = 900  # pixels, in a notebook
REPLACED = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]|\r\n?")


def render(
    template: Path, *, script: Path | None = None, filters: dict[str, Callable[..., Any]] | None = None, **values: Any
) -> str:
    """Returns a page; all values are escaped. `script` runs after that of all pages; `visible` and `json_block` are filters."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    pages = Environment(
        loader=FileSystemLoader([template.parent, HTML]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    pages.filters |= {"visible": visible, "json_block": lambda value: Markup(json_block(value)), **(filters or {})}
    style = (HTML / "style.css").read_text(encoding="utf-8")
    code = "\n".join(path.read_text(encoding="utf-8") for path in (HTML / "page.js", script) if path is not None)
    inline = {"style": Markup(style), "script": Markup(code), "security": security(style, code)}
    return pages.get_template(template.name).render(**inline, **values)


def security(style: str, script: str) -> str:
    """Returns the Content-Security-Policy of a page with this inline style sheet and script."""
    return (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def visible(text: str) -> str:
    """Returns a text with control characters, which HTML does not allow, as their pictures; keeps line breaks and tabs."""

    def picture(match: re.Match[str]) -> str:
        code = ord(match[0][0])
        if code == 0x0D:
            return "\n"
        return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"

    return REPLACED.sub(picture, text)


def json_block(value: Any) -> str:
    """Returns JSON for a `<script type="application/json">` element, whose end it cannot contain."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return re.sub("[<>&\u2028\u2029]", lambda match: f"\\u{ord(match[0]):04x}", text)


def framed(page: str) -> str:
    """Returns a page in a frame of its own, for the output of a notebook."""
    looks = f'width="100%" height="{FRAME_HEIGHT}" frameborder="0" sandbox="allow-scripts"'
    return f'<iframe srcdoc="{html.escape(page)}" {looks} title="trace"></iframe>'


def write_page(path: Path, page: str) -> None:
    """Writes a page atomically; CannotWrite if the disk is full or not writable."""
    with writing(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


def table(
    head: Sequence[str], rows: Sequence[Sequence[Any]], *, text_columns: Collection[int] = (0,), **looks: str
) -> dict[str, Any]:
    """Returns a table for the macro `table` of `parts.html`, whose columns the reader can sort.

    A cell is a text, a number, or a list of spans for the macro `inline`; columns other than `text_columns` are aligned right.
    `looks`: caption, id.
    """
    cells = [[cell if isinstance(cell, list) else [span(str(cell))] for cell in row] for row in rows]
    return {"head": list(head), "rows": cells, "text_columns": set(text_columns), "caption": "", "id": "", **looks}


def span(text: str, kind: str = "text") -> dict[str, Any]:
    """Returns text for the macro `inline`; `kind`: text, code."""
    return {"kind": kind, "text": text}


def link(text: str, href: str) -> dict[str, Any]:
    return {"kind": "link", "href": href, "text": text}
