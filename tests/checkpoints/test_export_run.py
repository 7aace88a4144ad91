"""End to end: a run trains an EAGLE-3 draft, sage-export exports it, and the imported draft decodes identically."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.train_helpers import ROOT, command

import sage
from checkpoints.export import TargetFacts, check_folder
from checkpoints.export.__main__ import main
from data_prep.build import prompts
from data_prep.config import DataConfig
from sage.io.dtypes import dtype_name
from train.config.hydra_app import compose
from train.config.schema import Config
from train.job.rank import run_rank
from train.state.resume import rng_state, set_rng_state

TARGET = ROOT / "data_prep" / "pocket" / "targets" / "pocket_qwen2_5_vl"  # a trained target
DRAFT = ["draft=eagle3", "draft.draft_vocab_size=500", "objective.steps=2"]
TRAINING = ["train.max_steps=20", "optim.lr=8e-3", "data.num_examples=40", "decode.policies=[autoregressive,static]"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished run, validated by the decoder."""
    where = tmp_path_factory.mktemp("run")
    fixed = [f"data.cache_dir={where}/cache", "deepspeed=zero0", "launch.device=cpu"]
    before = rng_state(torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE"):
            patch.delenv(name, raising=False)
        patch.setenv("LOCAL_RANK", "0")
        config: Config = compose("config", [*command(TARGET, where / "run", *fixed, *DRAFT, *TRAINING)], Config)
        assert run_rank(config) == 0
    yield where / "run"
    set_rng_state(before, torch.device("cpu"))


def sage_export(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["sage-export", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code


def answers(target: sage.Target, draft: Any) -> list[tuple[list[int], list[int]]]:
    """Returns tokens and the accepted drafts of every round, on held-out prompts with images."""
    found = []
    for prompt in prompts(DataConfig(), "validation", 4):
        out = sage.generate(target, draft, target.prepare(prompt.messages), policy="static", max_new_tokens=16)
        found.append((out.tokens.tolist(), out.stats.accepted))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("format_", ["eagle3", "speculators"])
def test_exported_draft_decodes_identically(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format_: str) -> None:
    """In float32 as trained, in bfloat16 as the rounded draft: same tokens, same acceptance in every round."""
    target = sage.load_target(TARGET, dtype=torch.float32)
    trained = sage.load_draft(run / "draft_best", target)
    assert sum(sum(accepted) for _, accepted in answers(target, trained)) > 5
    for dtype in (torch.float32, torch.bfloat16):
        name = dtype_name(dtype)
        out, back = tmp_path / name, tmp_path / f"{name}_back"
        sage_export(monkeypatch, run, "--format", format_, "--out", out, "--dtype", name)
        assert not check_folder(out, TargetFacts.of_folder(TARGET)).errors
        sage_export(monkeypatch, "--check", out, "--target", TARGET)
        sage_export(monkeypatch, "--import", out, "--target", TARGET, "--out", back)
        assert answers(target, sage.load_draft(back, target)) == answers(target, trained.to(dtype).to(torch.float32))
    about = json.loads((out / "sage_export.json").read_text())
    assert about["steps_trained"] == 20
    assert about["validation"]["policies"]["static"]["match"] == 1
    assert "`train.max_steps`: 20" in (out / "README.md").read_text()
