"""The list of skipped items and its summary: every id and every quoted text is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.data_helpers import make_processor, share_turns

from data_prep.build import build_dataset
from data_prep.config import DataConfig, OnBad
from data_prep.dataset.skip_log import count_reasons, read_skipped
from data_prep.sources import SourceConfig


def row(index: str, reason: str) -> dict[str, str]:
    return {"source": "rows.json", "index": index, "reason": reason}


def test_reasons_that_differ_in_values_are_counted_together_and_shown_by_the_first() -> None:
    rows = [
        row("3 (id c)", "ends with 'user'; the last message must be the assistant's"),
        row("4", "image a/b.png: 1x1 pixels"),
        row("7 (id g)", "ends with 'system'; the last message must be the assistant's"),
    ]
    assert count_reasons(rows) == {
        "ends with 'user'; the last message must be the assistant's (first: item 3 (id c))": 2,
        "image a/b.png: 1x1 pixels (item 4)": 1,
    }
    assert count_reasons([]) == {}


def test_every_skipped_item_is_listed_with_its_id(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An invalid row, an invalid conversation and one that is too long."""
    rows = [
        {"id": "robot", "conversations": [{"from": "robot", "value": "a"}]},
        {"id": "open", "conversations": share_turns("a")},
        {"id": "long", "conversations": share_turns("a", "b" * 200)},
        {"id": "fine", "conversations": share_turns("a", "b")},
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    source = SourceConfig(kind="sharegpt", path=str(tmp_path / "rows.json"))
    config = DataConfig(sources={"it": source}, holdout=0.0, max_length=100, on_bad=OnBad.skip, cache_dir=str(tmp_path))
    dataset = build_dataset(config, make_processor("qwen2_5_vl"))
    assert [dataset[i]["id"] for i in range(len(dataset))] == ["fine", "fine"]
    listed = read_skipped(dataset.skipped.path)
    assert [item["index"] for item in listed] == ["0 (id robot)", "1 (id open)", "2 (id long)"]
    assert "'robot'" in caplog.text and "'user'" in caplog.text
    assert "item 0 (id robot)" in caplog.text
    assert "skipped" in caplog.text and str(dataset.skipped.path) in caplog.text
