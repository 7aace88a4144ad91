"""A resumed run continues with the data it was started with, and with the draft vocabulary of its draft."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.messages import refused
from support.train_helpers import configured, train_quickly

from sage.io.manifest import write_manifest
from train.config.schema import Config, ConfigError
from train.launch.ranks import process_group

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("alone")]

WORDS = ["the", "red", "cube", "is", "left", "of", "a", "small", "green", "ball"]
OTHERS = ["seven", "yellow", "cylinders", "stand", "behind", "two", "purple", "cones"]


def append_rows(path: Path, words: list[str], count: int) -> None:
    with path.open("a") as file:
        for number in range(count):
            answer = " ".join(words[number % len(words) :] + words[: number % len(words)])
            messages = [{"role": "user", "content": f"say {number}"}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"id": f"{words[0]}-{number}", "messages": messages}) + "\n")


def configure(home: Path, *overrides: str) -> Config:
    own = ["data=messages", f"data.path={home}/rows.jsonl", "data.num_examples=0", "data.holdout=0.1", "data.num_workers=0"]
    draft = ["draft=eagle3", "draft.feature_levels=[0,1,2]", "draft.draft_vocab_size=40"]
    return configured(home / "target_qwen2_5_vl", home / "run", *own, *draft, *overrides)


@pytest.fixture
def home(tmp_path: Path, target: Path) -> Path:
    """A run of two steps whose data has grown since."""
    (tmp_path / target.name).symlink_to(target)
    append_rows(tmp_path / "rows.jsonl", WORDS, 40)
    assert train_quickly(configure(tmp_path)) == 0
    append_rows(tmp_path / "rows.jsonl", OTHERS, 200)
    return tmp_path


def test_changed_data_is_refused_by_name_and_restored_data_accepted(home: Path) -> None:
    grown = (home / "rows.jsonl").read_text()
    with refused("data.path=", "rows.jsonl", error=ConfigError):
        train_quickly(configure(home, "run.resume=true", "train.max_steps=3"))
    assert not (home / "run" / "state" / "step_00000003").exists()
    (home / "rows.jsonl").write_text("".join(line + "\n" for line in grown.splitlines()[:40]))
    assert train_quickly(configure(home, "run.resume=true", "train.max_steps=3")) == 0


def test_a_state_without_data_fingerprint_keeps_its_draft_vocabulary(home: Path) -> None:
    from train.job.build import building

    state = home / "run" / "state" / "step_00000002"
    trainer = json.loads((state / "trainer.json").read_text())
    del trainer["data"]
    (state / "trainer.json").write_text(json.dumps(trainer))
    write_manifest(state, 2)
    config = configure(home, "run.resume=true", "train.max_steps=3")
    with process_group("cpu", 60) as ranks, building(config, ranks) as run:
        token_map = run.engine.draft.token_map
        rows = run.teacher.target.lm_head.weight[token_map]
        assert torch.equal(run.teacher.lm_head, rows) and torch.equal(run.engine.student.token_map, token_map)
        assert run.state.data
