"""What a page contains: its elements, its texts, and the JSON of a trace."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "img", "input"}


class Page(HTMLParser):
    """Tags with attributes, the content of scripts and style sheets, all other text, and the answer of a trace by token."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.raw: dict[str, list[str]] = {"script": [], "style": []}
        self.text = ""
        self.answer: list[str] = []
        self._is_answer = False
        self.feed(text)
        assert not self.open, "an element is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open += [tag] if tag not in VOID else []
        if dict(attrs).get("id") == "answer":
            self._is_answer = True
        elif self._is_answer and tag == "span":
            self.answer.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"<{tag}> is closed at another place than opened"
        self._is_answer = self._is_answer and tag != "div"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in self.raw:
            self.raw[self.open[-1]].append(data)
            return
        self.text += data
        if self._is_answer:
            self.answer[-1] += data

    @property
    def data(self) -> dict[str, Any]:
        """The JSON of a trace."""
        found: dict[str, Any] = json.loads(self.raw["script"][0])
        return found
