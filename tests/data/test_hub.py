"""Data sets of the hub, and streams."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants
from support.data_helpers import (
    ids_by_step,
    make_processor,
    make_target,
    png,
    save_onevision,
    share_turns,
    take,
    train_step,
)
from support.messages import refused

import sage
from checkpoints.export.target import TargetFacts
from data_prep.build import build_dataset
from data_prep.config import DataConfig
from data_prep.conversation import BadItem, Conversation
from data_prep.dataset.dataset import StreamDataset
from data_prep.loader import StepLoader
from data_prep.sources import SourceConfig
from data_prep.sources.base import Source
from data_prep.sources.hub import load_table, table_rows
from sage.io import hub as model_hub
from sage.io.hub import HubUnreachable

README = """---
configs:
- config_name: ai2d
  data_files: [{split: train, path: ai2d/train-*}, {split: test, path: ai2d/test-*}]
- config_name: geo
  data_files: geo/train-*
---
"""


@pytest.fixture(params=["README.md", "folders alone"])
def repository(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Two configurations of LLaVA-OneVision-Data's columns, each with six training rows in two shards and two test rows."""
    folder = tmp_path / "LLaVA-OneVision-Data"
    for config, colour in (("ai2d", "red"), ("geo", "blue")):
        for name, ids in (("train-00000-of-00002", "abc"), ("train-00001-of-00002", "def"), ("test-00000-of-00001", "yz")):
            row = {"image": {"bytes": png(colour), "path": None}, "data_source": config}
            row["conversations"] = share_turns("<image>\nWhat?", f"It is {colour}.")
            columns = {key: [value] * len(ids) for key, value in row.items()}
            save_onevision(folder / config / f"{name}.parquet", id=[f"{config}-{i}" for i in ids], **columns)
    if request.param == "README.md":
        (folder / "README.md").write_text(README)
    return folder


@pytest.mark.parametrize("streaming", [False, True])
def test_configurations_and_splits_are_separate(repository: Path, tmp_path: Path, streaming: bool) -> None:
    """In particular, no test row is in the training data."""
    for config, split, expected in (("ai2d", "train", "abcdef"), ("geo", "train", "abcdef"), ("ai2d", "test", "yz")):
        table = load_table(str(repository), config, split, str(tmp_path / "cache"), streaming)
        assert [row["id"] for row in table] == [f"{config}-{i}" for i in expected]
    if not streaming:
        names, cache = ("ai2d", "ai2d", "geo"), str(tmp_path / "cache")
        first, again, other = (table_rows(str(repository), name, "train", cache).digest for name in names)
        assert first == again != other
    for config, split in (("nope", "train"), ("ai2d", "dev")):
        with refused("LLaVA-OneVision-Data", f"subset {config!r}", f"split {split!r}"):
            load_table(str(repository), config, split, str(tmp_path / "cache"), streaming)


def test_stream_and_table_give_the_same_examples(repository: Path, tmp_path: Path) -> None:
    """One pass of the stream is the table, and the stream can be trained on."""
    target = make_target("qwen2_5_vl")
    source = SourceConfig(kind="llava_onevision", path=str(repository), subset="ai2d")
    config = DataConfig(sources={"it": source}, holdout=0.0, cache_dir=str(tmp_path / "cache"), shuffle_block=3)
    table = build_dataset(config, target.processor)
    source.streaming = True
    stream = build_dataset(config, target.processor)
    for i, found in enumerate(stream.one_pass("train")):
        assert found.messages == table.conversation(i).messages
        assert str(stream[[found]]) == str(table[i])
    assert i == 5
    loader = iter(StepLoader(stream, target.processor.collate, 4, 4))
    for _ in range(2):  # eight examples of six: the stream restarts
        (batch,) = next(loader)
        assert 0 < train_step(target, batch) < 20
    loader.close()  # type: ignore[attr-defined]


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The URLs that were requested; no server is reached."""
    urls: list[str] = []

    def head(url: str, timeout: float) -> None:
        urls.append(url)
        raise OSError("connection refused")

    monkeypatch.setattr(model_hub, "get_session", lambda: SimpleNamespace(head=head))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return urls


def test_missing_repository_is_requested_once_and_never_offline(requests, tmp_path, monkeypatch):
    name, options = "owner/missing", {"error": HubUnreachable}
    with refused(f"target: {name}", constants.ENDPOINT, "HF_HOME", "HF_HUB_OFFLINE=1", **options):
        sage.load_target(name)
    assert len(requests) == 1
    with refused(f"data.path: {name}", constants.ENDPOINT, "HF_HOME", **options):
        load_table(name, "", "train", str(tmp_path), streaming=False)
    assert len(requests) == 2
    with refused(f"--target: {name}", constants.ENDPOINT, "HF_HOME", **options):
        TargetFacts.of_folder(name)
    assert len(requests) == 3
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with refused(f"target: {name}", "HF_HUB_OFFLINE", **options):
        sage.load_target(name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(model_hub, "try_to_load_from_cache", lambda name, file: f"/cache/{file}")
    model_hub.require_hub(name, "target")
    assert len(requests) == 3


class TextStream(Source):
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


def stream(folder: Path, *streams: Source, weights: tuple[float, ...] = (), **changes: Any) -> StreamDataset:
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
    source = TextStream("a", 100)
    take(stream_loader(stream(tmp_path, source), start=10), 1)
    assert source.started == [40]  # ten steps of four: the block that begins at position 40
    ranks = [take(stream_loader(new_stream(), 2, rank, 2), 9) for rank in range(2)]
    assert [[ranks[0][s][0] + ranks[1][s][0]] for s in range(9)] == expected


def test_stream_restarts_at_its_end(tmp_path: Path) -> None:
    names = [name for step in take(stream_loader(stream(tmp_path, TextStream("a", 6)), 4), 6) for name in step[0]]
    assert np.bincount([int(name[1:]) for name in names]).tolist() == [4] * 6
    with refused("a: not one item"):
        take(stream_loader(stream(tmp_path, TextStream("a", 0))), 1)


def test_invalid_stream_items_are_replaced_and_listed(tmp_path: Path) -> None:
    dataset = stream(tmp_path, TextStream("a", 16, bad=(2, 3, 11)), on_bad="skip")
    steps = take(stream_loader(dataset, 4), 4)
    assert ids_by_step(steps)[0]
    assert {name for step in ids_by_step(steps) for name in step} == {f"a{i}" for i in range(16) if i not in (2, 3, 11)}
    assert all(len(step[0]) == 4 for step in steps)
    assert len((tmp_path / "skipped.jsonl").read_text().splitlines()) == 3
    with refused("a: item 2:", error=BadItem):
        take(stream_loader(stream(tmp_path, TextStream("a", 16, bad=(2,)))), 2)
