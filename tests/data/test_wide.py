"""Widened targets: the same texts and drafts with more weights, and mistakes."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.messages import check_message, refused
from support.models import text_sizes
from support.train_helpers import make_target
from transformers import LlamaConfig, LlamaForCausalLM

import sage
from benchmarks import wide
from data_prep.pocket import world
from data_prep.pocket.architecture import FAMILIES, INNER
from sage.io.files import read_json


def widen_twice_as_far(folder: Path, out: Path) -> Path:
    wide.widen(folder, read_json(folder / "config.json"), 2 * INNER, out)
    return out


def texts(folder: Path, draft: Path) -> list[list[int]]:
    """Returns the tokens of a sampled answer decoded with the draft, and of a greedy one without."""
    target = sage.load_target(folder, dtype=torch.float32)
    inputs = target.prepare(world.sample("test", 0, ["caption"]).messages[:1])
    options: dict[str, Any] = {"max_new_tokens": 12, "seed": 3}
    sampled = sage.generate(target, sage.load_draft(draft, target), inputs, "sage", temperature=1.0, **options)
    return [sampled.tokens.tolist(), sage.generate(target, None, inputs, "autoregressive", **options).tokens.tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_texts_and_drafts_stay_valid(family: str, tmp_path: Path) -> None:
    folder, draft = make_target(tmp_path, family), tmp_path / "draft"
    sage.new_draft(sage.load_target(folder, dtype=torch.float32), "eagle", seed=0).network.save_pretrained(draft)
    out = widen_twice_as_far(folder, tmp_path / "wide")
    assert texts(out, draft) == texts(folder, draft)
    tensors = load_file(out / "model.safetensors")
    for name in [name for name in tensors if name.endswith("mlp.down_proj.weight")]:
        tensors[name][:, INNER:] = 1.0
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    assert texts(out, draft) != texts(folder, draft)


def test_a_llama_keeps_its_function(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**text_sizes())).save_pretrained(tmp_path / "llama")
    size = wide.widen_to(str(tmp_path / "llama"), 1.0, tmp_path / "wide")
    models = [LlamaForCausalLM.from_pretrained(tmp_path / name) for name in ("llama", "wide")]
    assert size > 48 and models[1].model.layers[0].mlp.gate_proj.weight.shape[0] == size
    first, second = (model(torch.arange(9)[None]).logits for model in models)
    torch.testing.assert_close(first, second)


def test_command_and_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def command(target: object, megabytes: float, out: Path) -> None:
        words = ["wide", "--target", str(target), "--megabytes", str(megabytes), "--out", str(out)]
        with patch("sys.argv", words):
            wide.main()

    out, source = tmp_path / "out", make_target(tmp_path)
    for megabytes in (0.1, 1e5, float("nan")):
        with refused(f"--megabytes: {megabytes:g}", "allowed for"):
            command(source, megabytes, out)
    with refused("--target", "no folder with a config.json", "pocket_llava_onevision"):
        command("qwen2_5_vl_7b", 62, out)
    with refused("--out", "exists"):
        command(source, 8, source)
    assert not out.exists()
    command(source, 8, out)
    check_message(capsys.readouterr().out, "MLP of 1536")
