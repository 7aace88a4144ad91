"""Own answers: their share in the first steps, and training on answers that the target generates first."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.data_helpers import make_target as tiny_target
from support.data_helpers import one_by_one
from support.messages import check_message, refused
from support.train_helpers import configured, train_quickly

from data_prep import dialog
from data_prep.chat import encode_example
from data_prep.conversation import Message
from data_prep.dialog import Dialog, TargetAnswer
from data_prep.own_answers import measure_own
from data_prep.pocket import world
from train.distill.own_answers import MAX_STEPS, OwnAnswers
from train.distill.teacher import Teacher
from train.launch.supervisor import RankFailed

pytestmark = pytest.mark.usefixtures("alone")
SHORT = ("data.sources.pocket.families=[caption]", "train.max_steps=3", "train.log_every=1")
ANSWERED = (*SHORT, "data.answers=target")


def test_share_counts_the_most_likely_tokens() -> None:
    """By source; equal to argmax over the logits of the model itself, in a run and for `sage-data`."""
    target = tiny_target("qwen2_5_vl")
    examples = [encode_example(world.sample("train", i, ["caption"]), target.processor) for i in range(2)]
    expected = {}
    for label, example in zip(("a", "b"), examples, strict=True):
        inputs = {
            key: value for key, value in target.processor.collate([dict(example)]).items() if key not in ("id", "loss_mask")
        }
        best = target.model(**inputs).logits[0, :-1].argmax(-1)
        mask = example["loss_mask"][1:]
        expected[label] = (int((best == example["input_ids"][1:])[mask].sum()), int(mask.sum()))
    assert measure_own(target, zip(("a", "b"), examples, strict=True)).counts == expected

    batch = target.processor.collate([{k: v for k, v in example.items() if k != "id"} for example in examples])
    batch["sources"] = ["a", "b"]
    measured = OwnAnswers(target, ["a", "b"], total_steps=100)
    measured.add(batch, Teacher(target)(batch))
    alone = type("One", (), {"sum": staticmethod(lambda values: values)})()
    assert measured.end_step(alone, 1, 10.0) is None  # too few tokens
    found = measured.end_step(alone, MAX_STEPS, 10.0)
    assert found is not None and found.counts == expected
    assert measured.end_step(alone, MAX_STEPS + 1, 1e6) is None and MAX_STEPS < 10


class Model:
    """Stands for the target's decoding (`dialog._decoded`); is interrupted before answer number `stop`."""

    def __init__(self, stop: int | None = None, text: str = "It is a red circle.") -> None:
        self.stop, self.text, self.num_answers = stop, text, 0

    def __call__(self, *args: Any) -> Iterator[Dialog]:
        return one_by_one(self.answer)(args[-1])

    def answer(self, messages: list[Message], seed: int) -> TargetAnswer:
        if self.num_answers == self.stop:
            raise KeyboardInterrupt
        self.num_answers += 1
        return TargetAnswer(self.text)


@pytest.mark.slow
def test_target_answers_first_goes_on_after_an_interruption_and_is_kept(target, tmp_path, monkeypatch, caplog):
    words = (*ANSWERED, "data.cache=examples")
    for stop, error in ((0, KeyboardInterrupt), (5, RankFailed)):
        monkeypatch.setattr(dialog, "_decoded", Model(stop))
        with pytest.raises(error) as stopped:
            train_quickly(configured(target, tmp_path / "run", *words))
    assert stopped.value.exit_code == 3
    check_message(str(stopped.value).replace(Path(str(tmp_path)).name, "X"), "same command continues", "answers")
    assert not (tmp_path / "run" / "config.yaml").exists()
    (part,) = (tmp_path / "cache" / "answers").glob("*/pocket.jsonl.part*")
    num_kept = sum(json.loads(line)["kept"] for line in part.read_text().splitlines())
    rest = Model()
    monkeypatch.setattr(dialog, "_decoded", rest)
    train_quickly(configured(target, tmp_path / "run", *words))
    (file,) = (tmp_path / "cache" / "answers").glob("*/pocket.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 12 and 0 < num_kept <= 5
    assert rest.num_answers == sum(row["kept"] for row in rows) - num_kept
    assert {row["messages"][-1]["content"][0]["text"] for row in rows} == {"It is a red circle."}
    kept = Model(stop=0)
    monkeypatch.setattr(dialog, "_decoded", kept)
    with caplog.at_level(logging.INFO):
        train_quickly(configured(target, tmp_path / "again", *words))
    assert "kept in" in caplog.text and not [r for r in caplog.records if "data.answers=target" in r.message]
    other = configured(target, tmp_path / "other", *words, "regenerate.max_new_tokens=9")
    with pytest.raises(KeyboardInterrupt):  # other settings, other answers
        train_quickly(other)


def test_answers_that_all_fail_are_an_error(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialog, "_decoded", Model(text=" "))
    with refused("data.answers: target", "pocket", "regenerate.max_new_tokens"):
        train_quickly(configured(target, tmp_path / "run", *ANSWERED))
