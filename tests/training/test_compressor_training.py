"""Training drafts with a visual compressor: every mode, decoding with the saved draft, two ranks, one without an image."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compressor_helpers import COMPRESSORS
from support.data_helpers import make_noise
from support.fork_server import ForkServer
from support.train_helpers import command, configured, draft_weights, sage_train, train_quickly

import sage
from checkpoints.run_folder import read_metrics
from data_prep.build import prompts
from train.config.schema import Config

EAGLE3 = ["draft=eagle3", "draft.feature_levels=[0,1,2]", "objective.steps=3"]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("alone")]


def options(mode: str) -> list[str]:
    """The command line of a compressor."""
    given = COMPRESSORS[mode]
    return [f"draft/compressor={mode}", *(f"draft.compressor.{key}={value}" for key, value in given.items() if key != "kind")]


def configure(folder: Path, run: Path, *overrides: str) -> Config:
    return configured(folder / "target_qwen2_5_vl", run, f"data.cache_dir={folder}/cache", *overrides)


def test_the_saved_draft_decodes_and_resuming_is_exact(folder: Path, tmp_path: Path) -> None:
    """From command line to decoder; a resumed run is the uninterrupted one, draws included."""
    words = [*options("select"), *EAGLE3]
    run = configure(folder, tmp_path / "run", *words)
    assert train_quickly(run) == 0
    target = sage.load_target(folder / "target_qwen2_5_vl", dtype=torch.float32)
    trained: Any = sage.load_draft(tmp_path / "run" / "draft", target)
    assert trained.config.compressor == COMPRESSORS["select"]
    [question] = prompts(run.data, num_prompts=1)
    inputs = target.prepare(question.messages)
    plain = sage.generate(target, None, inputs, policy="autoregressive", max_new_tokens=6)
    out = sage.generate(target, trained, inputs, max_new_tokens=6)
    assert torch.equal(out.tokens, plain.tokens) and out.stats.draft_context < out.stats.prompt_tokens
    assert train_quickly(configure(folder, tmp_path / "half", *words, "train.max_steps=1")) == 0
    state = tmp_path / "half" / "config.yaml"
    state.write_text(state.read_text().replace("max_steps: 1", "max_steps: 2"))
    assert train_quickly(configure(folder, tmp_path / "half", *words, "run.resume=true")) == 0
    torch.testing.assert_close(draft_weights(tmp_path / "run"), draft_weights(tmp_path / "half"), rtol=0, atol=0)


def test_two_ranks_under_zero_3_of_which_one_has_no_image(folder: Path, tmp_path: Path, commands: ForkServer) -> None:
    """Both gather and reduce the compressor's weights in every step, so neither waits for the other."""
    make_noise(deviation=50).save(tmp_path / "noise.png")
    image = {"type": "image", "image": "noise.png"}
    rows = [
        {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "grey, as far as one can see"}]}
        for content in ([image, {"type": "text", "text": "what is this?"}], [{"type": "text", "text": "what is grey?"}])
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["data=messages", f"data.path={tmp_path}/chats.jsonl", f"data.media_root={tmp_path}", "data.holdout=0"]
    arguments = [text for text in command(folder / "target_qwen2_5_vl", tmp_path / "run") if not text.startswith("data")]
    batch = ["train.micro_batch_size=1", "train.global_batch_size=2", "train.max_steps=3", "objective.feature_weight=0"]
    where = ["launch.ranks=2", "launch.device=cpu", "deepspeed=zero3", f"data.cache_dir={tmp_path}/cache"]
    done = sage_train(
        commands, *arguments, *data, "data/validation=pocket", "data.num_workers=0", *batch, *where, *options("select"),
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    steps = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert len(steps) == 3 and all(math.isfinite(line["loss"]) for line in steps)
    target = sage.load_target(folder / "target_qwen2_5_vl", dtype=torch.float32)
    assert sage.load_draft(tmp_path / "run" / "draft", target).config.compressor == COMPRESSORS["select"]  # type: ignore[union-attr]
