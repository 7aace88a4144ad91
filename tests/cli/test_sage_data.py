"""sage-data: its output, its files, and the refusal of invalid arguments."""

import html
import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import datasets
import pytest
from support.chat_server import serving
from support.data_helpers import make_processor, save_images, save_target
from support.messages import check_message, exit_code, refused

import sage
from data_prep.build import build_dataset
from data_prep.config import DataConfig, OnBad, RegenerateConfig, check_server
from data_prep.conversation import BadItem
from data_prep.dialog import Outcome, TargetAnswer
from data_prep.sources import SourceConfig
from data_prep.sources.base import Split
from data_prep.tools import actions
from data_prep.tools.actions import InvalidItems
from sage.commands.cli import report as report_error
from train.cli import data as data_cli
from train.config.hydra_app import compose
from train.config.schema import Config
from train.job import build
from train.launch.ranks import Ranks


def test_convert_and_back(tmp_path: Path) -> None:
    """Rows written by `convert` give the same examples as the source, images and videos included."""
    config = DataConfig(num_examples=8, cache_dir=str(tmp_path / "cache"))
    processor = make_processor("qwen2_5_vl")
    out = tmp_path / "rows.jsonl"
    assert actions.convert(config, processor, "train", out) == 8
    source = SourceConfig(kind="messages", path=str(out))
    back = build_dataset(DataConfig(sources={"it": source}, holdout=0.0, cache_dir=config.cache_dir), processor)
    fresh = build_dataset(config, processor)
    assert len(back) == 8
    assert [str(back[i]) for i in range(8)] == [str(fresh[i]) for i in range(8)]
    with refused("rows.jsonl", "out"):
        actions.convert(config, processor, "train", out)


def test_check_names_all_invalid_rows_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With their lines, whatever is invalid: JSON, an empty answer, a missing or a corrupt image, also a held-out one."""
    save_images(tmp_path, *(f"{i}.png" for i in range(8)))

    def row(i: int, answer: str = "Red.") -> str:
        question = {"role": "user", "content": [{"type": "image", "image": f"{i}.png"}, {"type": "text", "text": "What?"}]}
        return json.dumps({"messages": [question, {"role": "assistant", "content": answer}]})

    source = SourceConfig(kind="messages", path=str(tmp_path / "rows.jsonl"))
    config = DataConfig(sources={"it": source}, cache_dir=str(tmp_path / "cache"), holdout=0.5)
    lines = [*(row(i) for i in range(8)), "{", row(0, " "), "", row(99)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines[:8]))
    corrupt = []
    for split in Split.train, Split.validation:
        dataset = build_dataset(replace(config, cache_dir=str(tmp_path / "splits")), make_processor("qwen2_5_vl"), split)
        corrupt.append(int(dataset.conversation(0).id))
        path = tmp_path / f"{corrupt[-1]}.png"
        path.write_bytes(path.read_bytes()[:40])
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    with refused("rows.jsonl: item 8, line 9:", "5 of 11 items are invalid", error=InvalidItems) as caught:
        actions.check_data(config, make_processor("qwen2_5_vl"), "train", 0)
    named = sorted(int(text.split("line ")[1].split(":")[0]) for text in caught.value.details.splitlines())
    assert named == sorted([*(place + 1 for place in corrupt), 9, 10, 12])
    assert "message 1: an empty answer" in caught.value.details
    assert report_error(caught.value) == 2
    assert capsys.readouterr().err.count("\n") == 6


@pytest.fixture
def streamed(tmp_path: Path) -> DataConfig:
    """Two streamed tables, of ten and four rows; the image of the third row of the second is missing."""
    save_images(tmp_path, "a.png")
    for name, count in (("long", 10), ("short", 4)):
        rows = {"id": [f"{name}{i}" for i in range(count)], "question": ["q"] * count, "answer": ["a"] * count}
        rows["image"] = ["a.png" if (name, i) != ("short", 2) else "gone.png" for i in range(count)]
        datasets.Dataset.from_dict(rows).to_parquet(tmp_path / f"{name}.parquet")
    paths = {name: str(tmp_path / f"{name}.parquet") for name in ("long", "short")}
    sources = {name: SourceConfig(kind="hub", path=path, streaming=True) for name, path in paths.items()}
    return DataConfig(
        name="s", sources=sources, media_root=str(tmp_path), holdout=0.0, on_bad=OnBad.skip, cache_dir=str(tmp_path / "c")
    )


def test_check_measures_the_beginning_of_a_stream(streamed: DataConfig, tmp_path: Path) -> None:
    processor = make_processor("qwen2_5_vl")
    found, dataset = actions.check_data(streamed, processor, "train", 5)
    assert (found.total, found.num_measured) == (None, 5)
    assert dict(found.sources) == {str(tmp_path / "long.parquet"): 3, str(tmp_path / "short.parquet"): 2}
    assert "a stream, its first 5 examples measured" in found.as_text()
    actions.write_report(tmp_path / "page.html", "s", found, dataset, "train", 3)
    assert (tmp_path / "page.html").read_text().count('<div class="example">') == 3
    found, _ = actions.check_data(streamed, processor, "train", 0)  # all of it, once
    assert found.num_measured == 13
    assert list(found.skipped.values()) == [1]
    streamed.on_bad = OnBad.error
    with refused("short.parquet: item 2 (id short2)", "gone.png", error=BadItem):
        actions.check_data(streamed, processor, "train", 0)


def test_stream_is_split_by_hash(tmp_path: Path) -> None:
    """Every item is in exactly one split."""
    datasets.Dataset.from_dict({"question": ["q"] * 20, "answer": ["a"] * 20}).to_parquet(tmp_path / "t.parquet")
    source = SourceConfig(kind="hub", path=str(tmp_path / "t.parquet"), streaming=True)
    config = DataConfig(sources={"it": source}, holdout=0.3, test_holdout=0.3, cache_dir=str(tmp_path / "c"))
    dataset = build_dataset(config, make_processor("qwen2_5_vl"))
    ids = [{found.id for found in dataset.one_pass(split)} for split in Split]
    assert sum(map(len, ids)) == len(set.union(*ids)) == 20
    assert all(ids)


def test_stream_is_converted_in_one_pass_and_not_regenerated(streamed: DataConfig, tmp_path: Path) -> None:
    processor = make_processor("qwen2_5_vl")
    out = tmp_path / "rows.jsonl"
    assert actions.convert(replace(streamed, num_examples=3), processor, "train", out) == 5  # the third of `short` is invalid
    source = SourceConfig(kind="messages", path=str(out))
    back = build_dataset(DataConfig(sources={"it": source}, holdout=0.0, cache_dir=streamed.cache_dir), processor)
    assert [back[i]["id"] for i in range(5)] == ["long0", "short0", "long1", "short1", "long2"]
    with refused("data.sources", "action=convert", "data.num_examples=N"):
        actions.regenerate_data(streamed, SimpleNamespace(processor=processor), None, RegenerateConfig(), "train", out)


# -- the command line -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target("qwen2_5_vl", tmp_path_factory.mktemp("target"))


def command(*words: str) -> int:
    return exit_code(data_cli.main, *words)


@pytest.fixture
def regeneration(target_folder: Path, tmp_path: Path) -> list[str]:
    """Arguments that regenerate two short answers to own.jsonl."""
    words = [f"target.path={target_folder}", "data.num_examples=2", f"data.cache_dir={tmp_path}", "action=regenerate"]
    return [*words, f"out={tmp_path / 'own.jsonl'}", "regenerate.max_new_tokens=4", "launch.device=cpu"]


@pytest.mark.slow
def test_check_from_the_command_line(target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"target.path={target_folder}", "data.num_examples=6", f"data.cache_dir={tmp_path}"]
    page_path = tmp_path / "page.html"
    assert command(*words, f"out={page_path}", "data.max_length=null") == 0
    printed, logged = capsys.readouterr()
    check_message(printed, "6 examples, 6 measured", "own answers: ", f"page: {page_path}")
    check_message(logged, "the answers are not the target's own", "regenerate them with: data.answers=target")
    page = page_path.read_text()
    assert page.startswith("<!doctype html>") and "are the target's own choice" in html.unescape(page)
    rows = tmp_path / "rows.jsonl"
    assert command(*words, "action=convert", f"out={rows}") == 0
    assert len(rows.read_text().splitlines()) == 6


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Enables Ctrl-C, which a process in the background of a shell ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.slow
def test_interrupted_regeneration_exits_with_3_once_answers_are_saved(regeneration, tmp_path, monkeypatch, capsys):
    """After Ctrl-C and after SIGTERM; the signal handlers are restored."""
    out = tmp_path / "own.jsonl"
    before = signal.getsignal(signal.SIGTERM)
    for number in (signal.SIGINT, signal.SIGTERM):

        def interrupted(*_: Any, number: int = number, **__: Any) -> None:
            signal.raise_signal(number)

        with monkeypatch.context() as patch:
            patch.setattr(actions, "regenerate", interrupted)
            assert command(*regeneration) == 130
            check_message(capsys.readouterr().err.splitlines()[-1], "stopped", str(out))
            part = out.with_name("own.jsonl.part-0-of-1.jsonl")
            part.write_text("{")
            assert command(*regeneration) == 3
            part.unlink()
        check_message(capsys.readouterr().err.splitlines()[-1], "stopped", str(out))
        assert signal.getsignal(signal.SIGTERM) is before
    assert command(*regeneration) == 0


SERVED = ["action=regenerate", "out=a.jsonl", "regenerate.server=http://127.0.0.1:9/v1"]  # nobody listens there


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["action=convert"], "out=FILE.jsonl"),
        (["action=regenerate", "out=a.jsonl", "regenerate.draft=/nowhere"], "regenerate.draft: /nowhere"),
        (["action=convert", "out=a.jsonl", "limit=3"], "limit=3"),
        (["action=regenerate", "out=a.jsonl", "launch.plan=true"], "launch.plan=true"),
        (["data=llava_instruct"], "data.sources.llava.path"),
        (["out=/proc/nowhere/page.html"], "/proc/nowhere/page.html"),
        (["data=messages", "data.path=FILE", "data.cache_dir=/proc/nowhere"], "another data.cache_dir"),
        (["action=regenerate", "out=a.jsonl", "regenerate.concurrency=4"], "without regenerate.server"),
        ([*SERVED, "regenerate.server=http://user:secret@host/v1"], "regenerate.key_variable"),
        ([*SERVED, "regenerate.key_variable=sk-secret"], "regenerate.key_variable: not the name"),
        ([*SERVED, "regenerate.draft=runs/x"], "regenerate.draft=runs/x"),
        (SERVED, "regenerate.server: the server: no connection"),
    ],
)
def test_invalid_arguments_are_one_line_and_exit_code_2(words, part, target_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text("{}\n")
    assert command(f"target.path={target_folder}", *words) == 2
    error = capsys.readouterr().err
    check_message(error, part)
    assert error.count("error:") == 1 and error.count("\n") == 1
    assert "secret" not in error and "127.0.0.1" not in error
    assert not list(tmp_path.glob("runs")) and not list(tmp_path.glob("a.jsonl*"))


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"server": {"a": 1}}, "regenerate.server: dict"),
        ({"server": "ftp://host/v1"}, "http or https"),
        ({"server": ["http://host/v1", "host:8000"]}, "URL 2"),
        ({"server": "http://host/v1?key=secret"}, "a query"),
        ({"server": "http://host:port/v1"}, "URL 1 is not valid"),
        ({"key_variable": "NO_SUCH_secret"}, "regenerate.key_variable: the environment has no"),
        ({"key": "sk-secret\r\nX-Header: 1"}, "regenerate.key_variable: OPENAI_API_KEY has a line break"),
    ],
)
def test_addresses_and_keys_that_cannot_be_used(settings: dict[str, Any], part: str) -> None:
    """The messages repeat neither."""
    environment = {"OPENAI_API_KEY": settings.pop("key", "")}
    with refused(part) as caught:
        check_server(RegenerateConfig(**settings), environment)
    text = str(caught.value).removesuffix("give for example http://host:8000/v1")
    assert "cret" not in text and "host/" not in text


@pytest.mark.slow
def test_regenerate_from_a_server(target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rows of the decoder, from the command line; once they are complete, the server is not needed."""
    words = [f"target.path={target_folder}", "data.num_examples=4", "data.sources.pocket.families=[caption]"]
    words += [f"data.cache_dir={tmp_path}", "action=regenerate", "regenerate.max_new_tokens=4", "regenerate.on_cut=drop"]
    target = sage.load_target(target_folder)

    def model(messages: list[Any], seed: int) -> TargetAnswer:
        out = sage.generate(target, None, target.prepare(messages), policy="autoregressive", max_new_tokens=4)
        return TargetAnswer(out.text, Outcome.answered if int(out.tokens[-1]) in target.eos_token_ids else Outcome.cut)

    assert command(*words, f"out={tmp_path}/a.jsonl", "launch.device=cpu") == 0
    with serving(target.processor, model, models=[{"id": target_folder.name}]) as server:
        own = [*words, f"out={tmp_path}/b.jsonl", f"regenerate.server={server.url}"]
        assert command(*own) == 0
    assert command(*own) == 0
    assert "4 conversations (0 now)" in capsys.readouterr().out
    a, b = ((tmp_path / name).read_text() for name in ("a.jsonl.skipped.jsonl", "b.jsonl.skipped.jsonl"))
    first, second = ([json.loads(line) for line in text.splitlines()] for text in (a, b))
    provenance = [rows[0]["provenance"] for rows in (first, second)]
    assert provenance[1]["served_model"] == target_folder.name
    differing = {key for key in provenance[0] | provenance[1] if provenance[0].get(key) != provenance[1].get(key)}
    assert differing == {"dtype", "policy", "served_model"}
    assert [{**row, "provenance": 0} for row in first] == [{**row, "provenance": 0} for row in second]
    assert command(*words, f"out={tmp_path}/b.jsonl", "launch.device=cpu") == 2
    check_message(capsys.readouterr().err, "other settings", "served_model")


def test_invalid_rows_are_found_before_the_target_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "What?"}]}) + "\n")
    config = compose("config", [f"data.path={tmp_path}/chats.jsonl", f"data.cache_dir={tmp_path}/cache"], Config)
    monkeypatch.setattr(build, "build_target", None)
    with refused("chats.jsonl: item 0", "'user'", error=BadItem):
        build.build_inputs(config, cast(Ranks, SimpleNamespace(world_size=1)))
