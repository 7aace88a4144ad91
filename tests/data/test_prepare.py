"""Preparation: cached content, cache keys, skipped items, concurrent processes."""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.data_helpers import make_image, make_noise, make_processor
from support.messages import refused

from data_prep import workers
from data_prep.build import build_dataset
from data_prep.chat import build_example, encode_example
from data_prep.config import Cache, DataConfig, OnBad, OnLong
from data_prep.dataset import prepare
from data_prep.dataset.example_store import LEVEL, STILL, PixelTable
from data_prep.pocket import world
from data_prep.sources import KINDS, SourceConfig
from sage.io.files import json_digest
from sage.io.source import source_digest


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
        begin = time.perf_counter()
        again = build_dataset(pocket(tmp_path), processor)
        assert time.perf_counter() - begin < 0.5
        assert again.fingerprint == first.fingerprint
    made = {first.fingerprint}
    for change in ({"max_length": 400}, {"num_frames": 2}, {"num_examples": 7}):
        made.add(build_dataset(replace(pocket(tmp_path), **change), processor).fingerprint)
    processor.chat_template = processor.chat_template.replace("Be kind.", "Be brief.")
    made.add(build_dataset(pocket(tmp_path), processor).fingerprint)
    processor.image_processor.image_mean = [0.4, 0.4, 0.4]
    made.add(build_dataset(pocket(tmp_path), processor).fingerprint)
    monkeypatch.setattr(prepare, "VERSION", prepare.VERSION + 1)
    made.add(build_dataset(pocket(tmp_path), processor).fingerprint)
    assert len(made) == 7


@pytest.mark.parametrize(
    ("family", "digest"),
    [("qwen2_5_vl", "ec2172d39133bbca694ca146ae0c505e"), ("llava_onevision", "7dafcd65c64e863ef9fa11d228dfc417")],
)
def test_cached_examples_have_the_version_of_the_code(family: str, digest: str) -> None:
    """Whoever changes a digest increases `prepare.VERSION`, or cached examples differ from new ones. 3: added tokens."""
    processor = make_processor(family)
    examples = [build_example(world.sample("train", number), processor) for number in range(4)]
    assert prepare.VERSION == 3
    assert json_digest([[one["input_ids"].tolist(), one["loss_mask"].tolist()] for one in examples]) == digest


def test_an_edited_reader_of_the_user_reads_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of this project's own readers has a version instead."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(KINDS, "pocket", replace(KINDS["pocket"], module="poems"))
    found = []
    for text in ("", "", "# edited\n"):
        (tmp_path / "poems.py").write_text(f"from data_prep.sources.pocket import *\n{text}")
        source_digest.cache_clear()  # as in a new process
        found.append(build_dataset(pocket(tmp_path), make_processor("qwen2_5_vl")).fingerprint)
    assert found[0] == found[1] != found[2]


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
def test_worker_processes_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = make_processor("qwen2_5_vl")
    alone = build_dataset(pocket(tmp_path / "alone"), processor)
    monkeypatch.setattr(workers, "MIN_PARALLEL", 1)
    monkeypatch.setattr(workers, "num_processes", lambda: 2)
    together = build_dataset(pocket(tmp_path / "together"), processor)
    assert all(same(alone[i], together[i]) for i in range(6))
    rows = build_dataset(replace(pocket(tmp_path / "rows"), cache=Cache.rows), processor)
    assert rows.lengths.tolist() == alone.lengths.tolist()


def test_no_valid_item_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("{}\n{}")
    sources = {"it": SourceConfig(kind="sharegpt", path=str(path))}
    config = DataConfig(sources=sources, on_bad=OnBad.skip, cache_dir=str(tmp_path / "cache"))
    with refused("data.sources", "train", "rows.jsonl", "2 x no column 'messages'", "(first: item 0)"):
        build_dataset(config, make_processor("qwen2_5_vl"))
    config = replace(pocket(tmp_path), max_length=20, on_long=OnLong.drop)
    with refused("data.max_length: 20", "6", "data.max_length"):
        build_dataset(config, make_processor("qwen2_5_vl"))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava_onevision"])
def test_encoded_pixels_are_exact_or_not_used(family: str) -> None:
    processor = make_processor(family)
    table = PixelTable.measure(processor)
    noise = make_noise(40, 24)
    pixels = processor.encode([("a", True)], [])  # no image, no pixels
    assert "pixel_values" not in pixels
    found, _ = processor.family.encode_images(processor.image_processor, [noise])
    values = found["pixel_values"].numpy()
    kind, stored = table.pack(values)
    assert kind == (STILL if family == "qwen2_5_vl" else LEVEL)
    assert stored.dtype == np.uint8
    assert np.array_equal(table.unpack(kind, stored), values)
    video, _ = processor.family.encode_videos(processor.image_processor, [[make_image(), make_image(colour="blue")]], [2.0])
    kind, stored = table.pack(video["pixel_values_videos"].numpy())
    assert kind == LEVEL
    assert np.array_equal(table.unpack(kind, stored), video["pixel_values_videos"].numpy())
    values.reshape(-1)[0] += 1e-4
    kind, stored = table.pack(values)
    assert kind == ""
    assert np.array_equal(table.unpack(kind, stored), values)
