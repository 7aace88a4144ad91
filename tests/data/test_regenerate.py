"""The target answers its own prompts: any interruption and any number of ranks give the same file."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.data_helpers import make_processor, make_target, picture, says, user

import sage
from data_prep.build import build_dataset
from data_prep.chat import build_example
from data_prep.config import DataConfig, RegenerateConfig, SourceConfig
from data_prep.conversation import Conversation, Message, text_of
from data_prep.tools.cli import regenerate_data
from data_prep.tools.regenerate import Answer, part_path, regenerate, skipped_path, with_open_media

PROVENANCE = {"target": "t", "draft": None, "data": "d"}
SETTINGS = RegenerateConfig(max_new_tokens=8)


class Talks:
    """Conversations with a drawn picture and two turns; number 3 is broken."""

    def __len__(self) -> int:
        return 6

    def conversation(self, number: int) -> Conversation:
        asked = user(picture(8, ("red", "blue")[number % 2]), f"q{number}?")
        messages = [asked, says("old"), user("more"), says("older")]
        return Conversation(f"c{number}", messages[: 3 if number == 3 else 4], "talks", meta={"index": number})


def echo(messages: list[Message], seed: int) -> Answer:
    """Says how much it has heard; never ends the first answer of c4 and the second of c5."""
    heard = [text_of(message) for message in messages]
    endless = (heard[0] == "q4?" and len(messages) == 1) or (heard[0] == "q5?" and len(messages) == 3)
    return Answer(f"{'|'.join(heard)} {seed % 100}", not endless)


def run(out: Path, answer: Any = echo, **options: Any) -> Any:
    return regenerate(Talks(), answer, out, options.pop("provenance", PROVENANCE), SETTINGS, **options)


def content(out: Path) -> dict[str, bytes]:
    return {path.name.removeprefix(out.name): path.read_bytes() for path in (out, skipped_path(out)) if path.exists()}


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def whole(tmp_path: Path) -> dict[str, bytes]:
    """What an uninterrupted run of one rank writes."""
    found = run(tmp_path / "whole" / "out.jsonl")
    assert (found.done_before, found.done_now, found.total, found.is_merged) == (0, 6, 6, True)
    return content(tmp_path / "whole" / "out.jsonl")


def test_rows_hold_the_targets_answers_and_where_they_come_from(whole: dict[str, bytes], tmp_path: Path) -> None:
    found = rows(tmp_path / "whole" / "out.jsonl")
    assert [row["id"] for row in found] == ["c0", "c1", "c2", "c5"]
    asked, first, more, second = found[1]["messages"]
    assert first["content"][0]["text"].startswith("q1? ")
    assert second["content"][0]["text"].startswith("q1?|" + first["content"][0]["text"] + "|more ")
    assert found[1]["provenance"] == {
        **PROVENANCE, "policy": "sage", "max_new_tokens": 8, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0
    }  # fmt: skip
    assert len(found[3]["messages"]) == 2  # the second answer of c5 did not end
    assert asked["content"][0]["image"].startswith("out_media/")
    assert len(list((tmp_path / "whole" / "out_media").iterdir())) == 2  # each picture once
    reasons = [row["reason"] for row in rows(skipped_path(tmp_path / "whole" / "out.jsonl"))]
    assert "talks: item 3 (id c3): ends with 'user'" in reasons[0]
    assert "no answer ended within max_new_tokens" in reasons[1]


def test_rows_can_be_trained_on(whole: dict[str, bytes], tmp_path: Path) -> None:
    source = SourceConfig(kind="messages", path=str(tmp_path / "whole" / "out.jsonl"))
    config = DataConfig(sources={"it": source}, holdout=0.0, cache_dir=str(tmp_path / "cache"))
    dataset = build_dataset(config, make_target("qwen2_5_vl").processor)
    assert [dataset[i]["id"] for i in range(len(dataset))] == ["c0", "c1", "c2", "c5"]


@pytest.mark.parametrize("stop", [0, 1, 4, 7])
def test_interrupted_and_resumed_gives_the_same_file(whole: dict[str, bytes], tmp_path: Path, stop: int) -> None:
    out = tmp_path / "again" / "out.jsonl"
    calls = []

    def stops(messages: list[Message], seed: int) -> Answer:
        calls.append(1)
        if len(calls) > stop:
            raise KeyboardInterrupt
        return echo(messages, seed)

    with pytest.raises(KeyboardInterrupt):
        run(out, stops)
    assert not out.exists()
    part = part_path(out, 0, 1)
    if part.exists():
        part.write_bytes(part.read_bytes() + b'{"position": 5, "cut')  # killed in the middle of a line
    before = part.read_bytes().count(b"\n") if part.exists() else 0
    found = run(out)
    assert found.done_before == before
    assert content(out) == whole
    assert not part.exists()


def _work(out: Path) -> None:
    def slow(messages: list[Message], seed: int) -> Answer:
        time.sleep(0.1)
        return echo(messages, seed)

    run(out, slow)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_killed_process_and_resumed(whole: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "killed" / "out.jsonl"
    process = multiprocessing.get_context("fork").Process(target=_work, args=(out,))
    process.start()
    deadline = time.monotonic() + 30
    while not part_path(out, 0, 1).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not out.exists()
    assert run(out).done_before >= 1
    assert content(out) == whole


def test_ranks_in_any_order_give_the_same_file(whole: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "ranks" / "out.jsonl"
    assert not run(out, rank=1, world_size=2).is_merged
    assert not out.exists()
    assert run(out, rank=0, world_size=2).is_merged
    assert content(out) == whole
    other = tmp_path / "other" / "out.jsonl"
    run(other, rank=1, world_size=3)  # started with three ranks, finished by one
    found = run(other)
    assert (found.done_before, found.done_now, found.is_merged) == (2, 4, True)
    assert content(other) == whole


def test_finished_file_is_not_made_again(whole: dict[str, bytes], tmp_path: Path) -> None:
    def never(messages: list[Message], seed: int) -> Answer:
        raise AssertionError("answered a second time")

    found = run(tmp_path / "whole" / "out.jsonl", never)
    assert (found.done_before, found.done_now, found.is_merged) == (6, 0, True)
    run(tmp_path / "whole" / "out.jsonl", never, provenance=PROVENANCE | {"draft": "a better one"})
    with pytest.raises(ValueError, match=r"out.jsonl: contains rows with other settings \(target: t there, u here\)"):
        run(tmp_path / "whole" / "out.jsonl", never, provenance=PROVENANCE | {"target": "u"})


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava_onevision"])
def test_the_target_is_shown_the_clip_that_training_shows(family: str) -> None:
    frames = [picture(16, colour) for colour in ("red", "green", "blue", "yellow", "black", "white", "gray", "pink")]
    clip = {"type": "video", "video": frames, "start": 1.0, "end": 3.0}
    asked: list[Message] = [{"role": "user", "content": [clip, {"type": "text", "text": "What?"}]}]
    processor = make_processor(family)
    shown = processor.prepare(with_open_media(asked, 2))
    example = build_example(Conversation("c", [*asked, says("a")]), processor, num_frames=2)
    for key in set(processor.family.pixel_keys) & shown.keys():
        assert torch.equal(example[key], shown[key]), key


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava_onevision"])
def test_real_target_answers_as_the_decoder_does(family: str, tmp_path: Path) -> None:
    target = make_target(family)
    target.eos_token_ids = list(range(0, len(target.processor.tokenizer), 2))  # a random target ends soon this way
    config = DataConfig(num_examples=3, cache_dir=str(tmp_path), num_frames=2)
    settings = RegenerateConfig(max_new_tokens=40)
    out = tmp_path / "own.jsonl"
    assert regenerate_data(config, target, None, settings, "train", out).is_merged
    greedy = rows(out)
    dataset = build_dataset(config, target.processor)
    assert len(greedy) + len(rows(skipped_path(out))) == 3
    for row in greedy:
        asked = dataset.conversation(row["position"]).messages[:1]
        answer = sage.generate(target, None, target.prepare(asked), policy="autoregressive", max_new_tokens=40)
        assert row["messages"][1]["content"][0]["text"] == answer.text
    draft = sage.new_draft(target, "eagle")
    faster = tmp_path / "faster.jsonl"
    draft.save_pretrained(tmp_path / "draft")
    regenerate_data(config, target, draft, replace(settings, draft=str(tmp_path / "draft")), "train", faster)
    assert [row["messages"][1] for row in rows(faster)] == [row["messages"][1] for row in greedy]
    assert rows(faster)[0]["provenance"]["draft"].startswith("draft:")
    sampled = tmp_path / "sampled.jsonl"
    regenerate_data(config, target, None, replace(settings, temperature=1.0), "train", sampled)
    assert [row["messages"][1] for row in rows(sampled)] != [row["messages"][1] for row in greedy]
