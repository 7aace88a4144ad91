"""sage-data: what it prints and writes, and the words in which it refuses."""

from __future__ import annotations

import json
import logging
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from support.data_helpers import make_processor, picture, save_pictures, save_target, says, user
from support.messages import refused

from data_prep.build import build_dataset
from data_prep.chat import build_example
from data_prep.config import DataConfig, OnBad, RegenerateConfig, SourceConfig
from data_prep.conversation import BadItem, Conversation
from data_prep.splits import Split
from data_prep.tools import cli
from data_prep.tools.html_report import render_html
from data_prep.tools.stats import measure, sample
from train.cli import data as data_cli


def test_numbers_counted_by_hand() -> None:
    processor = make_processor("qwen2_5_vl")
    talks = [
        Conversation("a", [user(picture(), "Hi?"), says("Yes.")], "one", "qa"),
        Conversation("b", [user("Hi?"), says("Yes."), user("No"), says("ab")], "two", "talk"),
    ]
    items = [(talk, build_example(talk, processor)) for talk in talks]
    found = measure(items, 10, Counter({"broken": 3}), processor)
    assert found.values["tokens"] == [51, 70]
    assert found.values["visual_tokens"] == [4, 0]
    assert found.values["answer_tokens"] == [5, 8]
    assert found.values["mask_share"] == [5 / 47, 8 / 70]
    assert found.values["turns"] == [1, 2]
    assert found.values["pictures"] == [1, 0]
    text = found.as_text()
    assert "10 examples, 2 measured" in text
    assert "source one: 1" in text
    assert "3 x broken" in text
    assert re.search(r"tokens per example +51 +\S+ +60.5", text)
    assert json.loads(json.dumps(found.as_json()))["measures"]["turns"]["mean"] == 1.5


def test_sample() -> None:
    assert list(sample(5, 0)) == list(sample(5, 9)) == [0, 1, 2, 3, 4]
    assert len(set(sample(100, 10))) == 10
    assert list(sample(100, 10)) == list(sample(100, 10)) == sorted(sample(100, 10))


def test_page_shows_what_is_supervised() -> None:
    processor = make_processor("llava_onevision")
    said = "a <b> & ü"
    talk = Conversation("<id>", [user(picture(), [picture(), picture()], "Hi?"), says(said)], "one")
    example = build_example(talk, processor)
    html = render_html("title", measure([(talk, example)], 1, Counter({"<why>": 2}), processor), [(talk, example)], processor)
    coloured = "".join(re.findall(r'<span class="y">(.*?)</span>', html))
    assert coloured.endswith("a &lt;b&gt; &amp; ü&lt;|im_end|&gt;")  # the legend's own word comes before
    assert html.count("data:image/jpeg;base64,") == 3
    assert "image &times; 10" in html
    assert "video &times; 3" in html
    assert "&lt;id&gt;" in html
    assert "&lt;why&gt;" in html
    assert "http" not in html.replace("viewport", "")
    assert html.count("<svg") == 6


def test_page_shows_the_segment_of_a_clip() -> None:
    processor = make_processor("llava_onevision")
    asked = user([picture()] * 8, "Hi?")
    asked["content"][0] |= {"start": 1.0, "end": 2.0}  # two of them, at two per second
    talk = Conversation("c", [asked, says("a")], "one")
    example = build_example(talk, processor)
    html = render_html("title", measure([(talk, example)], 1, Counter(), processor), [(talk, example)], processor)
    assert html.count("data:image/jpeg;base64,") == 2


def test_convert_and_back(tmp_path: Path) -> None:
    """Rows written by `convert` give the very examples of the source, pictures and clips included."""
    config = DataConfig(num_examples=8, cache_dir=str(tmp_path / "cache"))
    processor = make_processor("qwen2_5_vl")
    out = tmp_path / "rows.jsonl"
    assert cli.convert(config, processor, "train", out) == 8
    source = SourceConfig(kind="messages", path=str(out))
    back = build_dataset(DataConfig(sources={"it": source}, holdout=0.0, cache_dir=config.cache_dir), processor)
    fresh = build_dataset(config, processor)
    assert len(back) == 8
    for i in range(8):
        assert {k: str(v) for k, v in back[i].items()} == {k: str(v) for k, v in fresh[i].items()}
    with pytest.raises(ValueError, match="rows.jsonl: exists already"):
        cli.convert(config, processor, "train", out)


def bad_rows(folder: Path) -> DataConfig:
    save_pictures(folder, "a.png", "cut.png")
    (folder / "cut.png").write_bytes((folder / "a.png").read_bytes()[:40])
    said = [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "Red."}]
    rows = [{"id": i, "image": image, "conversations": said} for i, image in enumerate(("a.png", "cut.png", "no.png"))]
    (folder / "rows.json").write_text(json.dumps(rows))
    source = SourceConfig(kind="llava_json", path=str(folder / "rows.json"))
    return DataConfig(name="mine", sources={"it": source}, cache_dir=str(folder / "cache"), holdout=0.0)


def test_check_counts_what_is_skipped(tmp_path: Path) -> None:
    config = bad_rows(tmp_path)
    processor = make_processor("qwen2_5_vl")
    with refused("item 2:", "no.png"):
        cli.check_data(config, processor, "train", 0)
    config.on_bad = OnBad.skip
    for _ in range(2):  # the second time the index is already there
        found, dataset = cli.check_data(config, processor, "train", 0)
        assert (found.total, found.num_measured) == (2, 1)
        assert sorted(found.skipped.values()) == [1, 1]
    cli.write_report(tmp_path / "page.html", config, found, dataset, "train", 5)
    assert "mine for qwen2_5_vl" in (tmp_path / "page.html").read_text()
    assert json.loads((tmp_path / "page.json").read_text())["measured"] == 1


@pytest.fixture
def streamed(tmp_path: Path) -> DataConfig:
    """Two streamed tables, of ten rows and of four, the third row of the second without its picture."""
    save_pictures(tmp_path, "a.png")
    for name, count in (("long", 10), ("short", 4)):
        rows = {"id": [f"{name}{i}" for i in range(count)], "question": ["q"] * count, "answer": ["a"] * count}
        rows["image"] = ["a.png" if (name, i) != ("short", 2) else "gone.png" for i in range(count)]
        datasets.Dataset.from_dict(rows).to_parquet(tmp_path / f"{name}.parquet")
    paths = {name: str(tmp_path / f"{name}.parquet") for name in ("long", "short")}
    sources = {name: SourceConfig(kind="hub", path=path, streaming=True) for name, path in paths.items()}
    return DataConfig(
        name="s", sources=sources, media_root=str(tmp_path), holdout=0.0, on_bad=OnBad.skip, cache_dir=str(tmp_path / "c")
    )


def test_a_stream_is_looked_at_from_its_beginning(streamed: DataConfig, tmp_path: Path) -> None:
    processor = make_processor("qwen2_5_vl")
    found, dataset = cli.check_data(streamed, processor, "train", 5)
    assert (found.total, found.num_measured) == (None, 5)
    assert dict(found.sources) == {str(tmp_path / "long.parquet"): 3, str(tmp_path / "short.parquet"): 2}
    assert "a stream, its first 5 examples measured" in found.as_text()
    cli.write_report(tmp_path / "page.html", streamed, found, dataset, "train", 3)
    assert (tmp_path / "page.html").read_text().count('<div class="example">') == 3
    found, _ = cli.check_data(streamed, processor, "train", 0)  # all of it, once
    assert found.num_measured == 13
    assert list(found.skipped.values()) == [1]
    streamed.on_bad = OnBad.error
    with pytest.raises(BadItem, match=r"short\.parquet: item 2 .*gone\.png: no such file"):
        cli.check_data(streamed, processor, "train", 0)


def test_a_stream_is_held_out_by_hash(tmp_path: Path) -> None:
    """No item is in two splits, and none is lost."""
    datasets.Dataset.from_dict({"question": ["q"] * 20, "answer": ["a"] * 20}).to_parquet(tmp_path / "t.parquet")
    source = SourceConfig(kind="hub", path=str(tmp_path / "t.parquet"), streaming=True)
    config = DataConfig(sources={"it": source}, holdout=0.3, cache_dir=str(tmp_path / "c"))
    dataset = build_dataset(config, make_processor("qwen2_5_vl"))
    ids = [{found.id for found in dataset.one_pass(split)} for split in Split]
    assert sum(map(len, ids)) == len(set.union(*ids)) == 20
    assert all(ids)


def test_a_stream_is_converted_in_one_pass_and_then_regenerated(streamed: DataConfig, tmp_path: Path) -> None:
    processor = make_processor("qwen2_5_vl")
    out = tmp_path / "rows.jsonl"
    assert cli.convert(replace(streamed, num_examples=3), processor, "train", out) == 5  # the third of `short` is broken
    source = SourceConfig(kind="messages", path=str(out))
    back = build_dataset(DataConfig(sources={"it": source}, holdout=0.0, cache_dir=streamed.cache_dir), processor)
    assert [back[i]["id"] for i in range(5)] == ["long0", "short0", "long1", "short1", "long2"]
    with pytest.raises(ValueError, match=r"a stream has no fixed items .*action=convert data\.num_examples=N"):
        cli.regenerate_data(streamed, SimpleNamespace(processor=processor), None, RegenerateConfig(), "train", out)


# -- the command line -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target("qwen2_5_vl", tmp_path_factory.mktemp("target"))


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """A command sets up its loggers for the rest of its process; here the process goes on."""
    loggers = [logging.getLogger(name) for name in ("train", "data_prep", "checkpoints", "sage")]
    before = [(own, list(own.handlers), own.level, own.propagate) for own in loggers]
    yield
    for own, handlers, level, propagate in before:
        own.handlers, own.propagate = handlers, propagate
        own.setLevel(level)


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["sage-data", *words])
    with pytest.raises(SystemExit) as caught:
        data_cli.main()
    return int(caught.value.code or 0)


def test_check_from_the_command_line(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"target.path={target_folder}", "data.num_examples=6", f"data.cache_dir={tmp_path}"]
    page_path = tmp_path / "page.html"
    assert command(monkeypatch, *words, f"out={page_path}", "data.max_length=null") == 0
    printed = capsys.readouterr().out
    assert "6 examples, 6 measured" in printed
    assert f"page: {page_path}" in printed
    assert page_path.read_text().startswith("<!doctype html>")
    rows = tmp_path / "rows.jsonl"
    assert command(monkeypatch, *words, "action=convert", f"out={rows}") == 0
    assert len(rows.read_text().splitlines()) == 6


def test_regenerate_from_the_command_line(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "own.jsonl"
    words = [f"target.path={target_folder}", "data.num_examples=2", f"data.cache_dir={tmp_path}", "action=regenerate"]
    words += [f"out={out}", "regenerate.max_new_tokens=4", "launch.device=cpu"]
    assert command(monkeypatch, *words) == 0
    assert f"2 conversations answered (2 now): {out}" in capsys.readouterr().out
    assert command(monkeypatch, *words) == 0
    assert "(0 now)" in capsys.readouterr().out
    assert command(monkeypatch, *words, "regenerate.temperature=1.0") == 2
    assert "(temperature: 0.0 there, 1.0 here)" in capsys.readouterr().err


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A process that a shell starts in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_interrupted_regeneration_says_how_to_go_on(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C and SIGTERM alike; the handlers of the process are as before."""
    out = tmp_path / "own.jsonl"
    words = [f"target.path={target_folder}", "data.num_examples=2", f"data.cache_dir={tmp_path}", "action=regenerate"]
    words += [f"out={out}", "regenerate.max_new_tokens=4", "launch.device=cpu"]
    before = signal.getsignal(signal.SIGTERM)
    for number in (signal.SIGINT, signal.SIGTERM):

        def interrupted(*_: Any, number: int = number, **__: Any) -> None:
            signal.raise_signal(number)

        with monkeypatch.context() as patch:
            patch.setattr(cli, "regenerate", interrupted)
            assert command(patch, *words) == 3
        assert str(out) in capsys.readouterr().err
        assert signal.getsignal(signal.SIGTERM) is before
    assert command(monkeypatch, *words) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bogus=1"], "bogus: unknown key"),
        (["action=dance"], "action"),
        (["target.path=/nowhere"], "target.path=/nowhere: no such folder"),
        (["data.max_length=1"], "data.max_length: 1; allowed: 2 or more"),
        (["limit=-1"], "limit=-1; allowed: 0 or more"),
        (["action=convert"], "out=: convert writes rows; give out=FILE.jsonl"),
        (["out=page.txt"], "out=page.txt: check writes a page; give out=FILE.html"),
        (["action=regenerate", "out=a.jsonl", "regenerate.draft=/nowhere"], "regenerate.draft=/nowhere: no such"),
        (["action=convert", "out=a.jsonl", "limit=3"], "limit=3: has no effect with action=convert; data.num_examples=N"),
        (["regenerate.seed=1"], "regenerate.seed=1: has no effect with action=check; it is for action=regenerate"),
        (["launch.gpus=8"], "launch.gpus=8: has no effect with action=check; ranks are for"),
        (["action=regenerate", "out=a.jsonl", "shown=3"], "shown=3: has no effect with action=regenerate"),
        (["action=regenerate", "out=a.jsonl", "launch.plan=true"], "launch.plan=true: has no effect with action=regenerate"),
        (["data=llava_instruct"], "data.sources.llava.path: empty; set it (or data.path)"),
        (["data=llava_instruct", "data.path=/nowhere.json"], "/nowhere.json: no such file"),
        (["out=/proc/nowhere/page.html"], "/proc/nowhere/page.html: could not be written"),
        (["action=regenerate", "out=/proc/nowhere/a.jsonl"], "/proc/nowhere/a.jsonl: could not be written"),
        (["data=messages", "data.path=FILE", "data.cache_dir=/proc/nowhere"], "could not be written"),
    ],
)
def test_mistakes_take_one_line(
    words: list[str],
    message: str,
    target_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text("{}\n")
    assert command(monkeypatch, f"target.path={target_folder}", *words) == 2
    said: Any = capsys.readouterr()
    assert message in said.err
    assert said.err.count("error:") == 1
    assert not list(tmp_path.glob("runs"))
