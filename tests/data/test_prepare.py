"""Preparation: cached content, cache keys, concurrent processes; rows that are too long, reported before training."""

import json
import logging
import multiprocessing
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from support.data_helpers import make_image, make_noise, make_processor, share_turns
from support.messages import check_message, refused
from support.processors import random_image

from data_prep import workers
from data_prep.build import build_dataset, long_examples
from data_prep.chat import Fit, build_example, encode_example
from data_prep.config import Cache, DataConfig, OnBad, OnLong
from data_prep.dataset import index, lengths, prepare
from data_prep.dataset.dataset import measure_preparation
from data_prep.dataset.index import read_skipped
from data_prep.dataset.prepare import LEVEL, STILL, PixelTable
from data_prep.pocket import world
from data_prep.sources import KINDS, SourceConfig
from data_prep.tools import actions
from sage.inputs import media
from sage.io.files import json_digest
from sage.io.machine import source_digest


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Returns whether fields, types and bits are equal."""
    return first.keys() == second.keys() and all(
        torch.equal(value, second[key]) and value.dtype == second[key].dtype
        if isinstance(value, torch.Tensor)
        else value == second[key]
        for key, value in first.items()
    )


def pocket(folder: Path, **changes: Any) -> DataConfig:
    return DataConfig(num_examples=6, cache=Cache.examples, cache_dir=str(folder), **changes)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava_onevision"])
def test_cached_examples_equal_new_ones(family: str, tmp_path: Path) -> None:
    processor = make_processor(family)
    dataset = build_dataset(pocket(tmp_path), processor)
    lazy = build_dataset(replace(pocket(tmp_path), cache=Cache.rows), processor)
    assert len(dataset) == len(lazy) == 6
    for i in range(6):
        fresh = build_example(world.sample("train", i), processor)
        assert same(dataset[i], fresh)
        assert same(lazy[i], fresh)


@pytest.mark.slow
def test_cache_is_used_until_a_setting_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = make_processor("qwen2_5_vl")
    first = build_dataset(pocket(tmp_path), processor)

    def never(*args: Any) -> None:
        raise AssertionError("prepared a second time")

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "encode_example", never)
        assert build_dataset(pocket(tmp_path), processor).fingerprint == first.fingerprint
    made = {first.fingerprint}
    for change in ({"max_length": 400}, {"num_frames": 2}, {"num_examples": 7}):
        made.add(build_dataset(replace(pocket(tmp_path), **change), processor).fingerprint)
    processor.chat_template = processor.chat_template.replace("Be kind.", "Be brief.")
    made.add(build_dataset(pocket(tmp_path), processor).fingerprint)
    processor.image_processor.image_mean = [0.4, 0.4, 0.4]
    made.add(build_dataset(pocket(tmp_path), processor).fingerprint)
    monkeypatch.setattr(index, "EXAMPLE_VERSION", index.EXAMPLE_VERSION + 1)
    made.add(build_dataset(pocket(tmp_path), processor).fingerprint)
    assert len(made) == 7


@pytest.mark.parametrize(
    ("family", "digest"),
    [("qwen2_5_vl", "7967b06f31eed2ad7d48fa3c919c28ec"), ("llava_onevision", "3956dde1c0f9247439e8b206290d51b6")],
)
def test_cached_examples_have_the_version_of_the_code(family: str, digest: str) -> None:
    """Whoever changes a digest increases the version, or cached examples differ from new ones. 3: added tokens."""
    processor = make_processor(family)
    examples = [build_example(world.sample("train", number), processor) for number in range(4)]
    assert index.EXAMPLE_VERSION == 3
    assert json_digest([[one["input_ids"].tolist(), one["loss_mask"].tolist()] for one in examples]) == digest


def test_an_edited_reader_of_the_user_reads_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any file of its package counts. The code of this project's own readers has a version instead."""
    (tmp_path / "poems" / "inner").mkdir(parents=True)
    (tmp_path / "poems" / "__init__.py").write_text("from data_prep.pocket.world import *\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(KINDS, "pocket", replace(KINDS["pocket"], module="poems"))
    made = []
    for text in ("", "", "# edited\n"):
        (tmp_path / "poems" / "inner" / "rhyme.py").write_text(text)
        source_digest.cache_clear()  # as in a new process
        made.append(build_dataset(pocket(tmp_path), make_processor("qwen2_5_vl")).fingerprint)
    assert made[0] == made[1] != made[2]
    assert source_digest("poems", "json") == source_digest("json", "poems", "poems.inner.rhyme")
    with refused("no_such_module: no module of this name"):
        source_digest("no_such_module")


def test_cache_keeps_the_most_recently_used(tmp_path: Path) -> None:
    processor = make_processor("qwen2_5_vl")
    folder = tmp_path / "examples"

    def use(num_examples: int) -> Any:
        for path in folder.glob("*/") if folder.is_dir() else ():  # a minute passes: time stamps of file systems are coarse
            stamp = path.stat().st_mtime - 60
            os.utime(path, (stamp, stamp))
        return build_dataset(replace(pocket(tmp_path), num_examples=num_examples, cache_keep=2), processor)

    made = [use(1), use(2)]
    use(1)
    made.append(use(3))
    kept = {path.name for path in folder.iterdir() if path.is_dir()}
    assert kept == {made[0].fingerprint, made[2].fingerprint}
    assert len(made[1][1]["input_ids"]) > 0  # open files stay readable


def _prepare(folder: Path, done: Any) -> None:
    torch.set_num_threads(1)
    calls = []

    def counted(*args: Any) -> Any:
        calls.append(1)
        time.sleep(0.02)
        return encode_example(*args)

    prepare.encode_example = counted  # type: ignore[assignment]
    dataset = build_dataset(pocket(folder), make_processor("qwen2_5_vl"))
    done.put((len(dataset), len(calls)))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_several_processes_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    done = context.Queue()
    ranks = [context.Process(target=_prepare, args=(tmp_path, done)) for _ in range(3)]
    for rank in ranks:
        rank.start()
    assert sorted(done.get(timeout=60) for _ in ranks) == [(6, 0), (6, 0), (6, 6)]
    for rank in ranks:
        rank.join()
    assert len([path for path in (tmp_path / "examples").iterdir() if path.is_dir()]) == 1
    assert not list(tmp_path.rglob("*.part"))


def test_interrupted_preparation_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = make_processor("qwen2_5_vl")
    calls = []

    def stops(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return build_example(*args)

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "encode_example", stops)
        with pytest.raises(KeyboardInterrupt):
            build_dataset(pocket(tmp_path), processor)
    assert not [path for path in (tmp_path / "examples").iterdir() if path.is_dir()]
    assert len(build_dataset(pocket(tmp_path), processor)) == 6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # pinned to one core, torch warns
def test_worker_processes_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = make_processor("qwen2_5_vl")
    alone = build_dataset(pocket(tmp_path / "alone"), processor)
    monkeypatch.setattr(workers, "MIN_PARALLEL", 1)
    monkeypatch.setattr(workers, "num_cores", lambda: 2)
    together = build_dataset(pocket(tmp_path / "together"), processor)
    assert all(same(alone[i], together[i]) for i in range(6))
    rows = build_dataset(replace(pocket(tmp_path / "rows"), cache=Cache.rows), processor)
    assert rows.lengths.tolist() == alone.lengths.tolist()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava_onevision"])
def test_encoded_pixels_are_exact_or_not_used(family: str) -> None:
    processor = make_processor(family)
    table = PixelTable.measure(processor)
    noise = make_noise(40, 24)
    pixels = processor.encode([("a", True)], [])  # no image, no pixels
    assert "pixel_values" not in pixels
    found = processor.family.encode_images(processor.image_processor, [noise])
    values = found["pixel_values"].numpy()
    kind, stored = table.pack(values)
    assert kind == (STILL if family == "qwen2_5_vl" else LEVEL)
    assert stored.dtype == np.uint8
    assert np.array_equal(table.unpack(kind, stored), values)
    video = processor.family.encode_videos(processor.image_processor, [[make_image(), make_image(colour="blue")]], [2.0])
    kind, stored = table.pack(video["pixel_values_videos"].numpy())
    assert kind == LEVEL
    assert np.array_equal(table.unpack(kind, stored), video["pixel_values_videos"].numpy())
    values.reshape(-1)[0] += 1e-4
    kind, stored = table.pack(values)
    assert kind == ""
    assert np.array_equal(table.unpack(kind, stored), values)


PROCESSOR = make_processor("qwen2_5_vl")
# 40, 239 and 116 tokens
SHORT, ONE_LONG, TWO_TURNS = share_turns("a", "b"), share_turns("a", "b" * 200), share_turns("a", "b", "c", "d" * 60)


def rows(folder: Path, *conversations: Any, **changes: Any) -> DataConfig:
    content = [{"id": str(i), "conversations": found} for i, found in enumerate(conversations)]
    (folder / "rows.json").write_text(json.dumps(content))
    source = SourceConfig(kind="sharegpt", path=str(folder / "rows.json"))
    return DataConfig(sources={"it": source}, holdout=0.0, cache_dir=str(folder / "cache"), **changes)


@pytest.mark.parametrize("cache", list(Cache))
def test_long_examples_are_counted_apart_from_invalid_ones(cache, tmp_path, caplog):
    listing = tmp_path / "bad.jsonl"
    limits = {"max_length": 100, "cache": cache, "on_bad": OnBad.skip, "bad_list": str(listing)}
    config = rows(tmp_path, SHORT, SHORT[:1], TWO_TURNS, ONE_LONG, **limits)
    with caplog.at_level(logging.INFO):
        dataset = build_dataset(config, PROCESSOR)
        found = long_examples(config, dataset)
    assert found is not None
    assert found.counts == {Fit.kept: 1, Fit.shortened: 1, Fit.dropped: 1}
    parts = ("2 of 3 examples", "data.max_length=100", "1 shortened and 1 dropped, 33% of all", "data.max_length=239 keeps")
    check_message(found.line(), *parts)
    check_message(found.refusal(0.2), "drops 33% of 3 examples", "data.max_length=239 keeps", "data.on_long=drop trains")
    assert not found.refusal(0.4) and not replace(found, on_long=OnLong.drop).refusal(0.2)
    assert "skipped 1 invalid items" in caplog.text
    if cache is Cache.examples:
        assert [(row["index"], row["kind"]) for row in read_skipped(listing)] == [("1", "invalid"), ("3", "too long")]
    statistics, _ = actions.check_data(config, PROCESSOR, "train", 0)
    check_message(statistics.as_text(), "1 invalid items skipped", "2 of 3 examples are too long")
    assert statistics.as_json()["long"] == {"kept": 1, "shortened": 1, "dropped": 1}
    fits = long_examples(replace(config, max_length=239), build_dataset(replace(config, max_length=239), PROCESSOR))
    assert fits is not None and fits.counts == {Fit.kept: 3}
    assert "the longest of 3 examples has 239 tokens (data.max_length=239)" in fits.line()


@pytest.mark.parametrize("cache", list(Cache))
def test_all_examples_too_long_is_an_error_before_training(cache: Cache, tmp_path: Path) -> None:
    config = rows(tmp_path, SHORT, ONE_LONG, max_length=30, cache=cache)
    parts = ("data.max_length: 30", "all of 2 examples", "data.on_long=turn", "at least 40", "data.max_length=239 keeps")
    with refused(*parts):
        long_examples(config, build_dataset(config, PROCESSOR))
    with refused(*parts):
        actions.check_data(config, PROCESSOR, "train", 0)


def test_lengths_are_measured_once_for_every_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = rows(tmp_path, *[SHORT] * 6, *[ONE_LONG] * 6, max_length=100)
    assert long_examples(config, build_dataset(config, PROCESSOR)) is not None
    assert measure_preparation(build_dataset(config, PROCESSOR)) is None  # texts
    monkeypatch.setattr(lengths, "segments", None)
    for max_length in (None, 20_000, 200):
        again = long_examples(config, build_dataset(replace(config, max_length=max_length), PROCESSOR))
        assert again is not None and again.num_measured == again.total == 12


def media_rows(folder: Path) -> list[dict[str, Any]]:
    """Rows with images of several sizes, one of them rotated by EXIF and one shared, and videos as a folder and as a GIF."""
    frames = [random_image(20, 12, i) for i in range(5)]
    (folder / "frames").mkdir()
    for i, frame in enumerate(frames):
        frame.save(folder / "frames" / f"{i}.png")
    frames[0].save(folder / "clip.gif", save_all=True, append_images=frames[1:], duration=250)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    for name, size, more in (("a.png", (16, 40), {}), ("b.jpg", (90, 31), {}), ("c.jpg", (64, 20), {"exif": exif})):
        random_image(*size).save(folder / name, **more)
    turns, clip = share_turns("<image>a", "b", "c", "d" * 60), share_turns("<video>a", "b" * 30)
    names = ["a.png", "b.jpg", "c.jpg", "b.jpg"]
    two = share_turns("<image><image>a", "b" * 9)
    return [
        *({"image": name, "conversations": turns} for name in names),
        {"image": names[:2], "conversations": two},
        *({"video": name, "conversations": clip} for name in ("frames", "clip.gif")),
        {"conversations": share_turns("text", "alone <|im_end|>", "é", "🙂")},
    ]


@pytest.mark.parametrize(
    ("max_length", "on_long"), [(None, OnLong.turn), (90, OnLong.turn), (90, OnLong.drop), (75, OnLong.cut)]
)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava_onevision"])
def test_lengths_are_those_of_the_built_examples(family, max_length, on_long, tmp_path, monkeypatch):
    """Dropped examples have the length of the next, which takes their place; no pixel of an image is decoded."""
    (tmp_path / "rows.json").write_text(json.dumps(media_rows(tmp_path)))
    source = SourceConfig(kind="llava_json", path=str(tmp_path / "rows.json"))
    limits = {"max_length": max_length, "on_long": on_long, "num_frames": 4}
    config = DataConfig(sources={"it": source}, holdout=0.0, cache_dir=str(tmp_path / "cache"), **limits)  # type: ignore[arg-type]
    processor = make_processor(family)
    if family == "qwen2_5_vl":
        processor.image_processor.size = {"shortest_edge": 64, "longest_edge": 1024}
    dataset = build_dataset(config, processor)
    with monkeypatch.context() as patch:
        patch.setattr(media, "_normalized", None)
        found = dataset.lengths.tolist()
    assert found == [len(dataset[position]["input_ids"]) for position in range(len(dataset))]
    assert len(set(found)) > 2 and max(found) <= (max_length or 1000)
    preparation = measure_preparation(dataset)
    assert preparation is not None and preparation.images == 8 / 8 and preparation.image_s > 0
    check_message(preparation.line(2), "preparing an image takes", "2 workers prepare", "images/s (data.num_workers)")
