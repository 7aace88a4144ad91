"""Prompts of the benchmarks in `prompt_layouts.LAYOUTS`, from their annotation files or parquet versions.

Ref: SpecVLM, arXiv 2509.11815, section 4: with `long_answers`, a request for a detailed explanation replaces the request for a
one-word answer, which leaves nothing to speculate on.
"""

from __future__ import annotations

import os
from dataclasses import replace

from data_prep.conversation import FOLLOW_UPS, Conversation, Message, Row
from data_prep.sources.base import Source
from data_prep.sources.files import JSON_SUFFIXES
from data_prep.sources.kinds import SourceConfig
from data_prep.sources.prompt_layouts import LAYOUTS, Layout, MediaFinder
from data_prep.sources.rows import JsonRows, ListRows, RawRows, RowSource, require_path
from data_prep.splits import Split

EXPLAIN = "Please give a detailed and reasonable explanation for the answer."


class PromptSource(RowSource):
    """The rows of one benchmark; `long_answers` requests a detailed explanation in place of a one-word answer."""

    def __init__(self, rows: RawRows, kind: str, find: MediaFinder, long_answers: bool) -> None:
        self.layout, self.find, self.long_answers = LAYOUTS[kind], find, long_answers
        layout = self.layout
        settings = (kind, find.root, long_answers)
        super().__init__(rows, self._messages, settings, layout.id_key, layout.family, layout.family_key)

    def _messages(self, row: Row) -> list[Message]:
        """Returns the user message (media, question, instruction) and, if known, the reference answer."""
        question = self.layout.read(row, self.find)
        text = _lines(question.text, EXPLAIN if self.long_answers else question.instruction)
        messages: list[Message] = [{"role": "user", "content": [*question.media, {"type": "text", "text": text}]}]
        if question.answer is not None:
            messages.append({"role": "assistant", "content": [{"type": "text", "text": str(question.answer)}]})
        return messages

    def conversation(self, index: int) -> Conversation:
        found = super().conversation(index)
        ending = EXPLAIN if self.long_answers else ""
        later = [_lines(text, ending) for text in self.layout.read(self.rows.row(index), self.find).follow_ups]
        return replace(found, meta=found.meta | {FOLLOW_UPS: later}) if later else found


def _lines(question: str, ending: str) -> str:
    return "\n".join(part for part in (question.strip(), ending) if part)


def _open_rows(config: SourceConfig, path: str, layout: Layout, cache_dir: str) -> RawRows:
    is_json = path.endswith(JSON_SUFFIXES)
    if (config.subset or config.split) and is_json:
        raise ValueError(f"{path}: a JSON file has no subset ({config.subset!r}) and no split ({config.split!r})")
    if is_json and not path.endswith(".json"):
        return JsonRows(path, cache_dir)
    if is_json:
        return ListRows(path, layout.select_rows)
    from data_prep.sources.hub import TableRows

    return TableRows(path, config.subset, config.split or "test", cache_dir)


def open_source(label: str, config: SourceConfig, split: Split, cache_dir: str) -> Source:
    """Opens the annotation file or the parquet version; other images and videos are located below `media_root`."""
    path = require_path(label, config.path, f"the annotation file of {config.kind}")
    find = MediaFinder(config.media_root or os.path.dirname(path))
    rows = _open_rows(config, path, LAYOUTS[config.kind], cache_dir)
    return PromptSource(rows, config.kind, find, config.long_answers)
