"""A sweep from one line: two runs of two ranks each, prompts divided among the ranks, one comparison at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.fork_server import ForkServer
from support.train_helpers import command, sage_train

import sage
from data_prep.build import prompts as held_out_prompts
from train.config.hydra_app import compose
from train.config.schema import Config
from train.validation.prompts import PromptSet
from train.validation.validate import ReportInfo, validate

COUNTS = ("tokens_per_target_pass", "mean_accepted_draft", "match", "total", "accepted_histogram")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sweep_of_two_ranks_each_ends_in_one_comparison(
    tmp_path: Path, target: Path, commands: ForkServer, alone: None
) -> None:
    ranks = ["launch.ranks=2", "launch.device=cpu", "train.micro_batch_size=1"]
    arguments = command(target, tmp_path / "sweep", "train.max_steps=2", *ranks)
    own = ["decode.policies=[autoregressive,static]", "decode.num_prompts=3", "train.validate_on=all", "launch.device=cpu"]
    done = sage_train(
        commands, "-m", *arguments, *own, "optim.lr=1e-3,4e-3", "data.cache_dir=cache", cwd=tmp_path, timeout_s=580
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    runs = sorted(path.parent for path in (tmp_path / "sweep").glob("*/draft_best"))
    assert [run.name for run in runs] == ["optim.lr_0.001", "optim.lr_0.004"]
    assert len({(run / "draft" / "model.safetensors").read_bytes() for run in runs}) == 2
    compared = json.loads((tmp_path / "sweep" / "compare.json").read_text())
    assert compared["changed"] == ["optim.lr"]
    assert [run["steps"] for run in compared["runs"]] == [2] * 2 and (tmp_path / "sweep" / "compare.png").is_file()
    assert all(run["policies"]["static"]["total"] == 3 for run in compared["runs"])
    assert done.stdout.endswith(f"comparison: {tmp_path / 'sweep' / 'compare.md'}\n")
    check_merged_report(runs[0], target, tmp_path)


def check_merged_report(run: Path, target_folder: Path, tmp_path: Path) -> None:
    """What two ranks measured together is, count for count, what one process measures alone."""
    merged = json.loads((run / "validation" / "step_00000002" / "report.json").read_text())
    same = ["decode.policies=[autoregressive,static]", "decode.num_prompts=3"]
    config: Config = compose("config", [*command(target_folder, run), *same], Config)
    target = sage.load_target(target_folder)
    prompts = held_out_prompts(config.data, "validation", 3)
    draft, info = sage.load_draft(run / "draft", target), ReportInfo(run_dir=tmp_path / "alone", step=2)
    alone: Any = validate(config.decode, target, draft, PromptSet(target, config.decode, prompts), info)
    assert merged["prompts"] == alone["prompts"] == 3
    for name in ("autoregressive", "static"):
        for count in COUNTS:
            assert merged["policies"][name][count] == alone["policies"][name][count], (name, count)
