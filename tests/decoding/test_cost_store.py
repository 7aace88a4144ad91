"""Costs of passes kept on disk: measured once, read by later requests, measured again if anything that matters differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.messages import check_message
from support.models import make_inputs, make_qwen, random_draft

import sage
from sage.costs import measure
from sage.costs.measure import ROOM, costs_folder, known_costs, rounded_contexts
from sage.costs.tables import Costs
from sage.drafts.model import ModelDraft
from sage.runtime.modes import PassMode
from sage.runtime.pass_function import key_bucket


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[int, int]]:
    """An empty cache folder; returns the contexts at which costs are asked for from here on. Nothing is measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls: list[tuple[int, int]] = []

    def recorded(target: Any, draft: Any, context: int, longer: int) -> Costs:
        calls.append((context, longer))
        return Costs(measure.Curve([1, 2], [1.0, 1.1]), measure.Curve([1], [0.1]), context)

    monkeypatch.setattr(measure, "measure_costs", recorded)
    return calls


def files() -> list[Path]:
    return sorted(costs_folder().iterdir())


def test_measured_once_for_requests_of_similar_length(measured: list[Any], tiny_qwen: sage.Target) -> None:
    draft = random_draft(tiny_qwen).eval()
    first = known_costs(tiny_qwen, draft, 20, 60)
    again = known_costs(make_qwen(seed=1), draft, 60, 100)
    assert len(measured) == 1 and again == first
    (path,) = files()
    known = json.loads(path.read_text())["depends_on"]
    assert known["threads"] == torch.get_num_threads() and known["contexts"] == list(measured[0])


def test_a_request_reads_them(measured: list[Any], tiny_qwen: sage.Target) -> None:
    draft = random_draft(tiny_qwen).eval()
    for _ in range(2):
        sage.generate(tiny_qwen, draft, make_inputs(tiny_qwen), "cost_aware", max_new_tokens=2)
    assert len(measured) == 1
    sage.generate(tiny_qwen, draft, make_inputs(tiny_qwen), sage.policy("cost_aware", fresh_costs=True), max_new_tokens=2)
    assert len(measured) == 2 and len(files()) == 1


@pytest.mark.parametrize("what", ["threads", "passes", "dtype", "draft", "kind", "target", "context", "processor", "source"])
def test_measured_again_where_something_differs(
    what: str, measured: list[Any], tiny_qwen: sage.Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, context = tiny_qwen, 20
    known_costs(target, random_draft(target).eval(), context, 60)
    if what == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    elif what == "processor":
        monkeypatch.setattr(measure, "processor_name", lambda device: "another one")
    elif what == "source":
        monkeypatch.setattr("sage.io.machine.source_digest", lambda *modules: "another one")
    elif what == "passes":
        monkeypatch.setattr(target, "passes", PassMode.captured)
    elif what == "dtype":
        target.model.double()
    elif what == "target":
        target.text_config.max_position_embeddings += 1
    elif what == "context":
        context = 2000
    draft: Any = random_draft(target, intermediate_size=24 if what == "draft" else 48).eval()
    draft = ModelDraft(make_qwen(seed=1), target) if what == "kind" else draft.to(target.dtype)
    known_costs(target, draft, context, context + 40)
    assert len(measured) == 2 and len(files()) == 2


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"costs": {"verify": 1, "draft": 2}}', "seconds", "unknown"],
)
def test_a_damaged_file_is_replaced(content: str, measured: list[Any], tiny_qwen: sage.Target) -> None:
    draft = random_draft(tiny_qwen).eval()
    known_costs(tiny_qwen, draft, 20, 60)
    (path,) = files()
    good = json.loads(path.read_text())
    if content == "seconds":
        good["costs"]["verify"]["seconds"][0] = "fast"
        content = json.dumps(good)
    elif content == "unknown":
        content = json.dumps({"costs": good["costs"] | {"new": 1}})
    path.write_text(content)
    known_costs(tiny_qwen, draft, 20, 60)
    known_costs(tiny_qwen, draft, 20, 60)
    assert len(measured) == 2 and files() == [path]


def test_a_folder_that_cannot_be_written(measured: list[Any], tiny_qwen: sage.Target, tmp_path: Path) -> None:
    (tmp_path / "sage-draft").mkdir()
    costs_folder().write_text("a file")
    with pytest.warns(UserWarning) as caught:
        known_costs(tiny_qwen, random_draft(tiny_qwen).eval(), 20, 60)
    (warning,) = caught
    check_message(str(warning.message), str(costs_folder()), "not kept")


@pytest.mark.parametrize(("context", "longer"), [(1, 2), (100, 300), (191, 192), (192, 193), (2000, 5000)])
def test_contexts_fill_buckets(context: int, longer: int) -> None:
    first, second = rounded_contexts(context, longer, 1 << 20)
    assert first >= context and second >= longer and second - first >= measure.MIN_CONTEXT_SPAN
    for found in (first, second):
        assert key_bucket(found + ROOM + 1) == found + ROOM + 1 < key_bucket(found + ROOM + 2)
