"""GGUF files as targets."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.family_suite import END, chatml, text
from support.messages import refused
from support.models import random_draft
from support.quantized_targets import SIZES, check_decoding, resume, save_target
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import sage
from checkpoints.export.exporter import export
from sage.io import target_paths
from train.config.command_line import expand
from train.config.hydra_app import compose
from train.config.schema import Config

NAMES = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate"}
NAMES |= {"up_proj": "ffn_up", "down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
NAMES |= {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}


def write_gguf(file: Path, architecture: str = "llama", template: str | None = chatml()) -> None:
    """Writes the tiny Llama with matrices in blocks of 8 bits, as llama.cpp's converter does but for the order of rope."""
    gguf = pytest.importorskip("gguf")
    save_target("llama", file.parent / "source")
    config, tokens = LlamaConfig(**text() | SIZES), AutoTokenizer.from_pretrained(file.parent / "source").get_vocab()
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(
        [*sorted(tokens, key=tokens.__getitem__), "ab", "<|endoftext|>", "cd", *(f"<more{i}>" for i in range(len(tokens), 327))]
    )
    writer.add_token_merges(["a b", "c d"])  # transformers 5.17 reads a list of one as its text
    writer.add_eos_token_id(END)
    writer.add_bos_token_id(2)
    if template:
        writer.add_chat_template(template)
    for name, weight in load_file(file.parent / "source" / "model.safetensors").items():
        *layer, part = name.removeprefix("model.").removesuffix(".weight").split(".")
        short = f"blk.{layer[1]}.{NAMES[part]}.weight" if layer else f"{NAMES[part]}.weight"
        kind = gguf.GGMLQuantizationType.Q8_0 if weight.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(short, gguf.quants.quantize(weight.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_a_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Also its folder; a run is given the folder to which it is dequantized, with tokenizer and template of the file."""
    monkeypatch.setattr(target_paths, "user_cache_dir", lambda: tmp_path / "cache")
    write_gguf(tmp_path / "tiny.gguf")
    target = sage.load_target(tmp_path / "tiny.gguf")
    assert "dequantized in" in caplog.text and "lacks generation_config.json" in caplog.text and "template" not in caplog.text
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.bfloat16).state_dict()
    found = target.model.state_dict()
    assert target.dtype == torch.bfloat16 and all(torch.equal(found[name], expected[name]) for name in expected)
    assert sage.load_target(tmp_path).name == target.name
    words = [f"target.path={tmp_path}/tiny.gguf"]
    assert expand(words) == ["target=by_path", *words]
    assert compose("config", words, Config).target.path == target.name
    target = sage.load_target(tmp_path, dtype=torch.float32)
    inputs = target.prepare([{"role": "user", "content": "hi"}])
    draft = random_draft(target, "eagle3", feature_levels=[0, 1, 2])
    check_decoding(target, inputs, draft)
    draft.save_pretrained(tmp_path / "draft")
    export(tmp_path / "draft", tmp_path / "out", "eagle3")
    sage.load_draft(tmp_path / "out", target)


@pytest.mark.slow
def test_training_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_paths, "user_cache_dir", lambda: tmp_path / "user")
    write_gguf(tmp_path / "tiny.gguf")
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"}]
    (tmp_path / "chats.jsonl").write_text(12 * (json.dumps({"messages": turns}) + "\n"))
    data = ["data=messages", f"data.path={tmp_path}/chats.jsonl", "data.num_examples=0", "data.holdout=0.2"]
    resume(tmp_path / "tiny.gguf", tmp_path, *data, "data.num_workers=0")


def test_gguf_files_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(target_paths, "user_cache_dir", lambda: tmp_path / "cache")
    write_gguf(tmp_path / "tiny.gguf", template=None)
    sage.load_target(tmp_path / "tiny.gguf")
    assert "a chat template, so put" in caplog.text
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\x03" + bytes(99))
    write_gguf(tmp_path / "other.gguf", "starlight")
    with refused("train.max_step:"):  # before the file is read
        compose("config", [f"target.path={tmp_path}/broken.gguf", "train.max_step=1"], Config)
    for name in ("other", "broken"):
        with refused(f"target: {tmp_path}/{name}.gguf cannot be read (", "or the model's Hugging Face folder"):
            sage.load_target(tmp_path / f"{name}.gguf")
    monkeypatch.setattr(target_paths, "find_spec", lambda name: None)
    with refused(f"target: {tmp_path}/other.gguf needs the package gguf", "pip install"):
        sage.load_target(tmp_path / "other.gguf")
