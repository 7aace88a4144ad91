"""Settings of data: refused with their dotted key; a source is one module and one entry."""

from pathlib import Path
from typing import Any

import pytest
from support.data_helpers import save_target
from support.messages import exit_code, refused

from data_prep.config import Answers, Cache, DataConfig, validate
from data_prep.sources import KINDS, Kind, SourceConfig
from data_prep.sources.base import Split
from train.cli import data as data_cli

STREAM = SourceConfig(kind="hub", streaming=True)


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"sources": {}}, ["data.sources", "data=pocket"]),
        ({"sources": {"a": SourceConfig(kind="excel")}}, ["data.sources.a.kind", "'excel'", *KINDS]),
        ({"sources": {"a": SourceConfig(weight=0.0)}}, ["data.sources.a.weight: 0.0"]),
        ({"sources": {"a": SourceConfig(weight=1.0), "b": SourceConfig()}}, ["data.sources", "weight"]),
        ({"sources": {"a": SourceConfig(path="x")}}, ["data.sources.a.path: x", "pocket"]),
        ({"sources": {"a": SourceConfig(streaming=True)}}, ["data.sources.a.streaming: True", "pocket", "families"]),
        ({"validation": {"v": SourceConfig(kind="gqa", prompt="x")}}, ["data.validation.v.prompt: x", "gqa"]),
        ({"path": "rows.json"}, ["data.path: rows.json", "data=pocket"]),
        ({"max_length": 1}, ["data.max_length: 1", "2"]),
        ({"holdout": 0.6, "test_holdout": 0.4}, ["data.test_holdout: 0.4", "data.holdout=0.6"]),
        ({"holdout": 0.0, "test_holdout": 0.1}, ["data.test_holdout: 0.1", "data.holdout=0"]),
        ({"sources": {"a": STREAM, "b": SourceConfig(kind="hub")}}, ["data.sources", "streaming"]),
        ({"sources": {"a": STREAM}, "answers": Answers.target}, ["data.answers: target", "action=convert"]),
        ({"sources": {"a": STREAM}, "cache": Cache.examples}, ["data.sources", "data.cache=rows"]),
    ],
)
def test_invalid_settings_are_refused_with_their_key(config: dict[str, Any], parts: list[str]) -> None:
    with refused(*parts):
        validate(DataConfig(**config))


def test_top_level_keys_are_defaults_of_the_sources() -> None:
    sources = {"a": SourceConfig(kind="llava_json"), "b": SourceConfig(kind="llava_json", path="own", num_examples=3)}
    config = DataConfig(sources=sources, path="~/shared", num_examples=9)
    resolved = config.resolved(Split.train)
    found = [(source.path, source.num_examples) for source in resolved.values()]
    assert found == [(str(Path.home() / "shared"), 9), ("own", 3)]
    assert config.resolved(Split.validation).keys() == sources.keys()
    config.validation = {"v": SourceConfig(kind="gqa")}
    assert config.resolved(Split.validation) == {"v": SourceConfig(kind="gqa")}


def test_a_kind_is_a_module_and_an_entry(tmp_path, monkeypatch, capsys):
    """That of the example."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    monkeypatch.setitem(KINDS, "sums", Kind("custom_source", ("path",)))
    target = save_target("qwen2_5_vl", tmp_path / "target")
    words = ["data.sources.pocket.kind=sums", "data.path=ode", "data.num_examples=0", "data.holdout=0"]
    out = tmp_path / "page.html"
    assert exit_code(data_cli.main, f"target.path={target}", *words, f"out={out}", f"data.cache_dir={tmp_path}") == 0
    assert "48 examples, 48 measured" in capsys.readouterr().out
    assert "family arithmetic" in out.read_text()
    with refused("data.sources.it.prompt: x", "sums", "path"):
        validate(DataConfig(sources={"it": SourceConfig(kind="sums", path="ode", prompt="x")}))
