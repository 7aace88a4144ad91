"""Streams: the order of their items, resuming, the replacement of invalid items."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.data_helpers import ids_by_step, make_processor, save_images, take
from support.messages import refused

from data_prep.batching.loader import StepLoader
from data_prep.build import build_dataset
from data_prep.config import DataConfig
from data_prep.conversation import BadItem, Conversation
from data_prep.dataset.stream import StreamDataset
from data_prep.sources import SourceConfig
from data_prep.sources.base import Stream


class TextStream(Stream):
    """Generated text conversations; those numbered in `bad` are invalid."""

    def __init__(self, name: str, size: int, bad: tuple[int, ...] = ()) -> None:
        self.name, self.size, self.bad = name, size, bad
        self.started: list[int] = []

    def iterate(self, start: int) -> Iterator[Conversation | BadItem]:
        self.started.append(start)
        for i in range(start, self.size):
            if i in self.bad:
                yield BadItem(self.name, i, "invalid")
            else:
                messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": str(i)}]
                yield Conversation(f"{self.name}{i}", messages, self.name, meta={"index": i})

    def fingerprint(self) -> str:
        return self.name


def stream(folder: Path, *streams: Stream, weights: tuple[float, ...] = (), **changes: Any) -> StreamDataset:
    sources = {s.name: SourceConfig(weight=w) for s, w in zip(streams, weights or [None] * len(streams), strict=True)}
    config = DataConfig(sources=sources, holdout=0.0, shuffle_block=8, **changes)
    return StreamDataset(config, list(streams), make_processor("qwen2_5_vl"), folder / "skipped.jsonl")


def stream_loader(dataset: StreamDataset, micro: int = 2, rank: int = 0, world_size: int = 1, start: int = 0) -> StepLoader:
    return StepLoader(dataset, dataset.processor.collate, 4, micro, rank, world_size, 5, start)


def test_stream_resumes_at_any_step_with_any_ranks(tmp_path: Path) -> None:
    def new_stream() -> StreamDataset:
        return stream(tmp_path, TextStream("a", 13), TextStream("b", 7), weights=(2.0, 1.0))

    expected = take(stream_loader(new_stream(), 4), 9)
    assert stream_loader(new_stream()).steps_per_epoch is None
    for start in range(9):
        assert take(stream_loader(new_stream(), 4, start=start), 9 - start) == expected[start:]
    ranks = [take(stream_loader(new_stream(), 2, rank, 2), 9) for rank in range(2)]
    assert [[ranks[0][s][0] + ranks[1][s][0]] for s in range(9)] == expected


def test_stream_restarts_at_its_end(tmp_path: Path) -> None:
    names = [name for step in take(stream_loader(stream(tmp_path, TextStream("a", 6)), 4), 6) for name in step[0]]
    assert np.bincount([int(name[1:]) for name in names]).tolist() == [4] * 6
    with refused("a: not one item"):
        take(stream_loader(stream(tmp_path, TextStream("a", 0))), 1)


def test_resumed_stream_skips_to_its_position(tmp_path: Path) -> None:
    source = TextStream("a", 100)
    take(stream_loader(stream(tmp_path, source), start=10), 1)
    assert source.started == [40]  # ten steps of four: the block that begins at position 40


def test_invalid_stream_items_are_replaced_and_listed(tmp_path: Path) -> None:
    dataset = stream(tmp_path, TextStream("a", 16, bad=(2, 3, 11)), on_bad="skip")
    steps = take(stream_loader(dataset, 4), 4)
    assert ids_by_step(steps)[0]
    assert {name for step in ids_by_step(steps) for name in step} == {f"a{i}" for i in range(16) if i not in (2, 3, 11)}
    assert all(len(step[0]) == 4 for step in steps)
    assert len((tmp_path / "skipped.jsonl").read_text().splitlines()) == 3
    with refused("a: item 2:", error=BadItem):
        take(stream_loader(stream(tmp_path, TextStream("a", 16, bad=(2,)))), 2)


@pytest.mark.parametrize("weight", [None, 1.0])
def test_streaming_a_table(tmp_path: Path, weight: float | None) -> None:
    import datasets

    save_images(tmp_path, "a.png")
    rows = {"question": [f"q{i}" for i in range(10)], "answer": [f"a{i}" for i in range(10)], "image": ["a.png"] * 10}
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "t.parquet")
    source = SourceConfig(kind="hub", path=str(tmp_path / "t.parquet"), streaming=True, num_examples=8, weight=weight)
    config = DataConfig(
        sources={"it": source}, media_root=str(tmp_path), shuffle_block=4, holdout=0.0, cache_dir=str(tmp_path / "c")
    )
    processor = make_processor("qwen2_5_vl")
    dataset = build_dataset(config, processor)
    expected = take(StepLoader(dataset, processor.collate, 4, 4), 4)
    assert ids_by_step(expected[:2])[0] | ids_by_step(expected[:2])[1] == {str(i) for i in range(8)}
    assert take(StepLoader(dataset, processor.collate, 4, 4, start_step=1), 3) == expected[1:]
