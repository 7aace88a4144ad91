"""Rows that are too long: distinguished from invalid rows and reported, with the value that keeps them, before training."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import ExifTags, Image
from support.data_helpers import make_processor, save_images, share_turns
from support.messages import check_message, refused
from support.processors import random_image

from data_prep.build import build_dataset, long_examples
from data_prep.chat import Fit, Lengths, build_example
from data_prep.config import Cache, DataConfig, OnBad, OnLong
from data_prep.conversation import BadItem, TooLong
from data_prep.dataset import measure
from data_prep.dataset.preparation import measure_preparation
from data_prep.dataset.skip_log import read_skipped
from data_prep.sources import SourceConfig
from data_prep.tools import cli
from sage.inputs import media

PROCESSOR = make_processor("qwen2_5_vl")
# 40, 239 and 116 tokens
SHORT, ONE_LONG, TWO_TURNS = share_turns("a", "b"), share_turns("a", "b" * 200), share_turns("a", "b", "c", "d" * 60)


def rows(folder: Path, *conversations: Any, **changes: Any) -> DataConfig:
    content = [{"id": str(i), "conversations": found} for i, found in enumerate(conversations)]
    (folder / "rows.json").write_text(json.dumps(content))
    source = SourceConfig(kind="sharegpt", path=str(folder / "rows.json"))
    return DataConfig(sources={"it": source}, holdout=0.0, cache_dir=str(folder / "cache"), **changes)


def test_what_becomes_of_an_example_is_predicted(tmp_path: Path) -> None:
    dataset = build_dataset(rows(tmp_path, SHORT, TWO_TURNS, ONE_LONG), PROCESSOR)
    for on_long in OnLong:
        for max_length in (None, 36, 39, 40, 100, 1000):
            check_prediction(dataset, on_long, max_length)


def check_prediction(dataset: Any, on_long: OnLong, max_length: int | None) -> None:
    for position, row in enumerate(dataset.full_lengths().tolist()):
        conversation = dataset.conversation(position)
        complete = build_example(conversation, PROCESSOR)
        assert row[0] == len(complete["input_ids"])
        try:
            length = len(build_example(conversation, PROCESSOR, max_length, on_long)["input_ids"])
            fit = Fit.kept if length == row[0] else Fit.shortened
        except TooLong:
            fit = Fit.dropped
        assert Lengths(*row).fit(max_length, on_long) is fit


@pytest.mark.parametrize("cache", list(Cache))
def test_long_examples_are_counted_apart_from_invalid_ones(
    cache: Cache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listing = tmp_path / "bad.jsonl"
    limits = {"max_length": 100, "cache": cache, "on_bad": OnBad.skip, "bad_list": str(listing)}
    config = rows(tmp_path, SHORT, SHORT[:1], TWO_TURNS, ONE_LONG, **limits)
    with caplog.at_level(logging.INFO):
        dataset = build_dataset(config, PROCESSOR)
        found = long_examples(config, dataset)
    assert found is not None
    assert found.counts == {Fit.kept: 1, Fit.shortened: 1, Fit.dropped: 1}
    check_message(
        found.line(),
        "2 of 3 examples",
        "data.max_length=100",
        "1 shortened and 1 dropped, 33% of all",
        "data.max_length=239 keeps",
    )
    check_message(found.refusal(0.2), "drops 33% of 3 examples", "data.max_length=239 keeps", "data.on_long=drop trains")
    assert not found.refusal(0.4) and not replace(found, on_long=OnLong.drop).refusal(0.2)
    assert "skipped 1 invalid items" in caplog.text
    if cache is Cache.examples:
        assert [(row["index"], row["kind"]) for row in read_skipped(listing)] == [("1", "invalid"), ("3", "too long")]
    statistics, _ = cli.check_data(config, PROCESSOR, "train", 0)
    check_message(statistics.as_text(), "1 invalid items skipped", "2 of 3 examples are too long")
    assert statistics.as_json()["long"] == {"kept": 1, "shortened": 1, "dropped": 1}
    fits = long_examples(replace(config, max_length=239), build_dataset(replace(config, max_length=239), PROCESSOR))
    assert fits is not None and fits.counts == {Fit.kept: 3}
    assert "the longest of 3 examples has 239 tokens (data.max_length=239)" in fits.line()


@pytest.mark.parametrize("cache", list(Cache))
def test_all_examples_too_long_is_an_error_before_training(cache: Cache, tmp_path: Path) -> None:
    config = rows(tmp_path, SHORT, ONE_LONG, max_length=30, cache=cache)
    with refused("data.max_length: 30", "all of 2 examples", "data.on_long=turn", "at least 40", "data.max_length=239"):
        long_examples(config, build_dataset(config, PROCESSOR))
    if cache is Cache.rows:
        with refused("data.max_length: 30", "data.max_length=239 keeps"):
            cli.check_data(config, PROCESSOR, "train", 0)


def test_lengths_are_measured_once_for_every_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = rows(tmp_path, *[SHORT] * 6, *[ONE_LONG] * 6, max_length=100)
    assert long_examples(config, build_dataset(config, PROCESSOR)) is not None
    assert measure_preparation(build_dataset(config, PROCESSOR)) is None  # texts
    monkeypatch.setattr(measure, "segments", None)
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


@pytest.mark.parametrize(("max_length", "on_long"), [(None, OnLong.turn), (90, OnLong.turn), (75, OnLong.cut)])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava_onevision"])
def test_lengths_are_those_of_the_built_examples(
    family: str, max_length: int | None, on_long: OnLong, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert preparation is not None and preparation.images == 8 / 8 and 0 < preparation.image_s < 1
    check_message(preparation.line(2), "preparing an image takes", "2 workers prepare", "images/s (data.num_workers)")


def test_corrupt_image_is_found_before_training(tmp_path: Path) -> None:
    save_images(tmp_path, "a.png")
    (tmp_path / "b.png").write_bytes(b"no image")
    turns = share_turns("<image>a", "b")
    (tmp_path / "rows.json").write_text(json.dumps([{"image": name, "conversations": turns} for name in ("a.png", "b.png")]))
    source = SourceConfig(kind="llava_json", path=str(tmp_path / "rows.json"))
    config = DataConfig(sources={"it": source}, holdout=0.0, cache_dir=str(tmp_path / "cache"))
    with refused("rows.json: item 1", "b.png", "data.on_bad=skip", error=BadItem):
        long_examples(config, build_dataset(config, PROCESSOR))
    skipping = replace(config, on_bad=OnBad.skip)
    found = long_examples(skipping, build_dataset(skipping, PROCESSOR))
    assert found is not None and found.num_measured == 1
