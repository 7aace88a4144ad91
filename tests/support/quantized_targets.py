"""Tiny targets quantized by every method that runs on a CPU, and what all of them have to show."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.family_passes import hidden_states
from support.family_suite import END, chatml, text
from support.models import MAKERS, greedy_text
from support.processors import byte_tokenizer_of, make_processor
from support.train_helpers import configured, draft_weights, train_quickly
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import sage

SIZES = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 64, "num_key_value_heads": 4}  # for kernels of 32 rows
VISION = ("visual", "vision_tower", "multi_modal_projector")


def save_target(family: str, folder: Path) -> Any:
    """Saves a tiny target with its processor; returns its class."""
    if family in MAKERS:
        target = MAKERS[family]()
        make_processor(target).save_pretrained(folder)
    else:
        torch.manual_seed(0)
        target = sage.Target(LlamaForCausalLM(LlamaConfig(**text() | SIZES)))
        target.lm_head.weight.data[:64] = 0
        tokenizer = byte_tokenizer_of({"<|im_end|>": END, "<|im_start|>": 2}, eos="<|im_end|>")
        tokenizer.chat_template = chatml()
        tokenizer.save_pretrained(folder)
    target.model.save_pretrained(folder)
    return AutoModelForImageTextToText if family in MAKERS else AutoModelForCausalLM


def quantized_by_transformers(config: Callable[[], Any]) -> Callable[[Any, Path], None]:
    def write(auto: Any, folder: Path) -> None:
        pytest.importorskip("bitsandbytes")
        auto.from_pretrained(folder, quantization_config=config(), dtype=torch.float32).save_pretrained(folder)

    return write


def torchao(**options: Any) -> Any:
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig(), **options)


def compressed(num_bits: int, kind: str) -> Callable[[Any, Path], None]:
    """Returns the writer of a compressed-tensors folder, without lm_head and vision, named as checkpoints name them."""

    def write(auto: Any, folder: Path) -> None:
        pytest.importorskip("compressed_tensors")
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import (
            QuantizationArgs,
            QuantizationConfig,
            QuantizationScheme,
            apply_quantization_config,
        )

        model = auto.from_pretrained(folder, dtype=torch.float32)
        weights = QuantizationArgs(num_bits=num_bits, type=kind, strategy="channel")
        dynamic = QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True) if kind == "float" else None
        scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=dynamic)
        ignored = [rf"re:.*{name}.*" for name in ("lm_head", *VISION)]
        apply_quantization_config(model, QuantizationConfig(config_groups={"all": scheme}, ignore=ignored))
        for module in model.modules():
            if hasattr(module, "quantization_scheme"):
                largest = module.weight.data.abs().amax(-1, keepdim=True)
                module.weight_scale.data.copy_(largest / (448 if kind == "float" else 2 ** (num_bits - 1) - 1))
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        model.save_pretrained(folder)
        compressor.update_config(folder)

    return write


def finegrained_fp8(auto: Any, folder: Path) -> None:
    """Writes blocks of 16 x 16 with a scale each, as DeepSeek and Qwen publish them with 128."""
    weights = load_file(folder / "model.safetensors")
    for name in [key for key in weights if key.endswith("proj.weight") and "layers." in key and "vision" not in key]:
        rows, columns = weights[name].shape
        blocks = weights[name].reshape(rows // 16, 16, columns // 16, 16)
        scale = blocks.abs().amax((1, 3)) / 448
        weights[name] = (blocks / scale[:, None, :, None]).reshape(rows, columns).to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = scale
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    set_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]})


def set_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


WRITERS: dict[str, Callable[[Any, Path], None]] = {
    "torchao Int8WeightOnly": quantized_by_transformers(torchao),
    "torchao Int8WeightOnly with tables": quantized_by_transformers(lambda: torchao(include_input_output_embeddings=True)),
    "bitsandbytes 8-bit": quantized_by_transformers(lambda: BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)),
    "bitsandbytes 4-bit": quantized_by_transformers(lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")),
    "compressed-tensors pack-quantized": compressed(8, "int"),
    "compressed-tensors float-quantized": compressed(8, "float"),
    "fine-grained": finegrained_fp8,
}
AT_LOAD = {"int8": "torchao Int8WeightOnly", "fp8": "torchao Float8WeightOnly", "nf4": "bitsandbytes 4-bit"}


def at_load(method: str, word: str = "") -> Any:
    """Returns the arguments of `load_target`, or the `word` of a command line in a list; without any for other methods."""
    if word:
        return [word.format(method)] if method in AT_LOAD else []
    return {"quantize": method} if method in AT_LOAD else {}


def check_decoding(target: sage.Target, inputs: dict[str, Any], draft: Any) -> None:
    """Every policy yields the text of `generate` of the same model, and features are its hidden states."""
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    found = {policy: sage.generate(target, draft, inputs, policy, max_new_tokens=8).tokens.tolist() for policy in sage.POLICIES}
    assert found == dict.fromkeys(sage.POLICIES, greedy_text(target, inputs, 8))
    levels = target.features(target.embed(inputs), list(range(target.num_layers + 1))).levels
    for level, state in zip(levels, hidden_states(target, inputs), strict=True):
        torch.testing.assert_close(level, state, atol=1e-6, rtol=0)


def resume(folder: Path, where: Path, *words: str) -> None:
    """Trains two steps in one run, and one after the other in another, and compares."""
    for run, steps, more in (("whole", 2, ()), ("half", 1, ()), ("half", 2, ("run.resume=true",))):
        assert train_quickly(configured(folder, where / run, f"train.max_steps={steps}", *words, *more)) == 0
    whole, half = (draft_weights(where / run) for run in ("whole", "half"))
    assert all(torch.equal(whole[name], half[name]) for name in whole)
