"""Regeneration: the same file after any interruption and with any number of ranks."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.data_helpers import TwoTurnConversations, content, make_processor, make_target, one_by_one, rows
from support.messages import check_message, refused

import sage
from data_prep import dialog
from data_prep.build import build_dataset
from data_prep.chat import build_example
from data_prep.config import DataConfig, OnCut, RegenerateConfig
from data_prep.conversation import Conversation, Message
from data_prep.dialog import Outcome, TargetAnswer, own_answers
from data_prep.sources import SourceConfig
from data_prep.tools.actions import regenerate_data
from data_prep.tools.regenerate import part_path, regenerate, skipped_path
from sage.inputs.messages import text_of
from sage.runtime.modes import PassMode

PROVENANCE = {"target": "t", "draft": None, "data": "d"}


def echo(messages: list[Message], seed: int) -> TargetAnswer:
    """Answers with the texts of all messages; the first answer of c4 and the second of c5 never end."""
    texts = [text_of(message) for message in messages]
    endless = (texts[0] == "q4?" and len(messages) == 1) or (texts[0] == "q5?" and len(messages) == 3)
    return TargetAnswer(f"{'|'.join(texts)} {seed % 100}", Outcome.cut if endless else Outcome.answered)


def run(out: Path, answer: Any = echo, **options: Any) -> Any:
    given = {"provenance": PROVENANCE, "settings": RegenerateConfig(on_cut=OnCut.drop)} | options
    return regenerate(TwoTurnConversations(6), one_by_one(answer), out, **given)


@pytest.fixture
def complete(tmp_path: Path) -> dict[str, bytes]:
    """The files of an uninterrupted run of one rank."""
    found = run(tmp_path / "complete" / "out.jsonl")
    assert (found.done_before, found.done_now, found.total, found.is_merged) == (0, 6, 6, True)
    return content(tmp_path / "complete" / "out.jsonl")


def test_rows_contain_the_targets_answers_and_their_provenance(complete: dict[str, bytes], tmp_path: Path) -> None:
    found = rows(tmp_path / "complete" / "out.jsonl")
    assert [row["id"] for row in found] == ["c0", "c1", "c2", "c5"]
    source = SourceConfig(kind="messages", path=str(tmp_path / "complete" / "out.jsonl"))
    config = DataConfig(sources={"it": source}, holdout=0.0, cache_dir=str(tmp_path / "cache"))
    dataset = build_dataset(config, make_processor("qwen2_5_vl"))
    assert [dataset[i]["id"] for i in range(len(dataset))] == ["c0", "c1", "c2", "c5"]
    question, first, more, second = found[1]["messages"]
    assert first["content"][0]["text"].startswith("q1? ")
    assert second["content"][0]["text"].startswith("q1?|" + first["content"][0]["text"] + "|more ")
    assert found[1]["provenance"] == PROVENANCE
    assert len(found[3]["messages"]) == 2  # the second answer of c5 did not end
    assert question["content"][0]["image"].startswith("out_media/")
    assert len(list((tmp_path / "complete" / "out_media").iterdir())) == 2  # each image once
    skipped = rows(skipped_path(tmp_path / "complete" / "out.jsonl"))
    assert [row["id"] for row in skipped] == ["c3", "c4"]
    check_message(skipped[0]["reason"], "chats: item 3 (id c3):", "'user'")
    check_message(skipped[1]["reason"], "chats: item 4 (id c4):", "answer 1", "max_new_tokens")
    assert [row["outcome"] for row in (*found, *skipped)] == ["answered"] * 3 + ["cut short", "invalid", "cut short"]


def test_an_answer_that_is_cut_short_is_the_last_one_and_trained_on_without_an_end(tmp_path: Path) -> None:
    found = run(out := tmp_path / "out.jsonl", settings=RegenerateConfig())
    assert f"3 answered, 2 cut short, 1 invalid: {out}; 1 without a row" in found.as_text(out)
    kept = {row["id"]: [m | {"content": text_of(m)} for m in row["messages"]] for row in rows(out)}
    assert [len(kept[name]) for name in ("c2", "c4", "c5")] == [4, 2, 4]
    assert [["unfinished" in message for message in kept[name]] for name in ("c2", "c4")] == [[False] * 4, [False, True]]
    processor = make_processor("qwen2_5_vl")
    example = build_example(Conversation("c4", kept["c4"]), processor)
    supervised = example["input_ids"][example["loss_mask"]].tolist()
    assert processor.tokenizer.decode(supervised) == text_of(kept["c4"][1])
    kept["c4"][1].pop("unfinished")
    whole = build_example(Conversation("c4", kept["c4"]), processor)["input_ids"].tolist()
    assert whole == [*example["input_ids"].tolist(), processor.tokenizer.eos_token_id]
    with refused("message 1: unfinished, and others follow"):
        build_example(Conversation("c", [*kept["c4"][:1], kept["c4"][1] | {"unfinished": True}, *kept["c2"][:2]]), processor)


@pytest.mark.parametrize("stop", [0, 4, 7])
def test_interrupted_and_resumed_run_gives_the_same_file(complete: dict[str, bytes], tmp_path: Path, stop: int) -> None:
    out = tmp_path / "again" / "out.jsonl"
    calls = []

    def stops(messages: list[Message], seed: int) -> TargetAnswer:
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
    assert content(out) == complete
    assert not part.exists()


def test_ranks_in_any_order_give_the_same_file(complete: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "ranks" / "out.jsonl"
    assert not run(out, rank=1, world_size=2).is_merged
    assert not out.exists()
    assert run(out, rank=0, world_size=2).is_merged
    assert content(out) == complete
    other = tmp_path / "other" / "out.jsonl"
    run(other, rank=1, world_size=3)  # started with three ranks, finished by one
    found = run(other)
    assert (found.done_before, found.done_now, found.is_merged) == (2, 4, True)
    assert content(other) == complete


def test_finished_file_is_not_regenerated(complete: dict[str, bytes], tmp_path: Path) -> None:
    def never(messages: list[Message], seed: int) -> TargetAnswer:
        raise AssertionError("answered a second time")

    found = run(tmp_path / "complete" / "out.jsonl", never)
    assert (found.done_before, found.done_now, found.is_merged) == (6, 0, True)
    run(tmp_path / "complete" / "out.jsonl", never, provenance=PROVENANCE | {"draft": "a better one"})
    with refused("out.jsonl", "(target: t there, u here)"):
        run(tmp_path / "complete" / "out.jsonl", never, provenance=PROVENANCE | {"target": "u"})


@pytest.mark.parametrize(("num_answers", "mode"), [(299, PassMode.eager), (300, PassMode.compiled)])
def test_many_answers_run_compiled(num_answers: int, mode: PassMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until they are done, or fail: too many conversations for the memory are refused."""

    def decoded(*args: Any) -> Iterator[PassMode]:
        yield target.passes
        raise torch.OutOfMemoryError

    target = SimpleNamespace(passes=PassMode.eager, device=torch.device("cpu"), is_plain=True)
    monkeypatch.setattr(dialog, "_decoded", decoded)
    for batch_size, expected in ((16, refused("regenerate.batch_size", "halve")), (1, pytest.raises(torch.OutOfMemoryError))):
        answers: Any = own_answers(target, None, RegenerateConfig(batch_size=batch_size), 8, num_answers)(iter(()))
        assert target.passes is PassMode.eager and next(answers) is target.passes is mode
        with expected:
            next(answers)
        assert target.passes is PassMode.eager


@pytest.mark.slow
def test_answers_do_not_depend_on_draft_and_batch_but_on_the_temperature(tmp_path: Path) -> None:
    target = make_target("qwen2_5_vl")
    target.lm_head.weight.data[:64] = 0  # special tokens are never generated, as by a trained target
    target.eos_token_ids = list(range(64, len(target.processor.tokenizer), 2))  # a random target then ends soon
    config = DataConfig(num_examples=3, cache_dir=str(tmp_path), num_frames=2)
    settings = RegenerateConfig(max_new_tokens=40, batch_size=1)
    out = tmp_path / "own.jsonl"
    assert regenerate_data(config, target, None, settings, "train", out).is_merged
    greedy = rows(out)  # whose answers are the target's: tests/targets/test_text.py
    assert greedy and len(greedy) + len(rows(skipped_path(out))) == 3
    draft = sage.new_draft(target, "eagle")
    with_draft = tmp_path / "with_draft.jsonl"
    draft.save_pretrained(tmp_path / "draft")
    regenerate_data(config, target, draft, replace(settings, draft=str(tmp_path / "draft")), "train", with_draft)
    assert [row["messages"][1] for row in rows(with_draft)] == [row["messages"][1] for row in greedy]
    assert rows(with_draft)[0]["provenance"]["draft"].startswith("draft:")
    sampled = tmp_path / "sampled.jsonl"
    regenerate_data(config, target, None, replace(settings, temperature=1.0), "train", sampled)
    assert [row["messages"][1] for row in rows(sampled)] != [row["messages"][1] for row in greedy]
    together = tmp_path / "together.jsonl"
    regenerate_data(config, target, draft, replace(settings, temperature=1.0, batch_size=2), "train", together)
    assert [row["messages"][1] for row in rows(together)] == [row["messages"][1] for row in rows(sampled)]
