"""Quantized targets: every method decodes as `generate`; what is refused in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.family_passes import hidden_states
from support.family_suite import END, chatml, text
from support.messages import refused
from support.models import MAKERS, greedy_text, make_inputs, random_draft
from support.processors import byte_tokenizer_of, make_processor
from support.train_helpers import configured, draft_weights, make_target, train_quickly
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

import sage
from checkpoints.export.exporter import ExportOptions, export
from sage.io import target_paths
from sage.runtime.modes import PassMode
from sage.targets import loading
from sage.targets.loading import meta_target
from sage.targets.weights import dense_weight, weight_bytes
from train.config.command_line import expand
from train.config.hydra_app import compose
from train.config.schema import Config

with suppress(ImportError):  # registers torch's linear layer, before a test replaces it by DeepSpeed's
    import torchao.quantization  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
SIZES = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 64, "num_key_value_heads": 4}  # for kernels of 32 rows
LEVELS = range(4)
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
    for name in [key for key in weights if key.endswith("proj.weight")]:
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
    "torchao": quantized_by_transformers(torchao),
    "torchao with tables": quantized_by_transformers(lambda: torchao(include_input_output_embeddings=True)),
    "bitsandbytes 8-bit": quantized_by_transformers(lambda: BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)),
    "bitsandbytes 4-bit": quantized_by_transformers(lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")),
    "compressed-tensors pack-quantized": compressed(8, "int"),
    "compressed-tensors float-quantized": compressed(8, "float"),
    "fp8": finegrained_fp8,
}
DEQUANTIZED = ("fp8",)  # by transformers on a CPU
CASES = [("llama", method) for method in WRITERS]
CASES += [(family, "compressed-tensors pack-quantized") for family in MAKERS]


@pytest.fixture(autouse=True)
def torchs_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """`deepspeed.zero.Init`, in other tests of the process, leaves a linear layer of its own that reads plain tensors only."""
    monkeypatch.setattr(torch.nn.functional, "linear", torch._C._nn.linear)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Folders by family and method, written once."""
    folders: dict[tuple[str, str], Path] = {}

    def folder(family: str, method: str) -> Path:
        if (family, method) not in folders:
            path = tmp_path_factory.mktemp("target")
            WRITERS[method](save_target(family, path), path)
            folders[family, method] = path
        return folders[family, method]

    return folder


@pytest.mark.parametrize(("family", "method"), CASES)
def test_decodes_as_generate(family: str, method: str, quantized: Callable[[str, str], Path]) -> None:
    """Before `generate` has called the whole model; features are its hidden states; passes are eager."""
    target = sage.load_target(quantized(family, method), dtype=torch.float32, passes="compiled")
    assert target.quantization == (None if method in DEQUANTIZED else method.replace(" with tables", ""))
    assert target.passes == ("compiled" if method in DEQUANTIZED else "eager")
    target.passes = PassMode.eager
    inputs = make_inputs(target) if family in MAKERS else {"input_ids": torch.arange(70, 82)[None]}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    draft = random_draft(target, "eagle3")
    found = [sage.generate(target, draft, inputs, policy, max_new_tokens=8).tokens.tolist() for policy in ("eagle2", "sage")]
    assert found == 2 * [greedy_text(target, inputs, 8)]
    states, levels = hidden_states(target, inputs), target.features(target.embed(inputs), list(LEVELS)).levels
    for level, state in zip(levels, states, strict=True):
        torch.testing.assert_close(level, state, atol=1e-6, rtol=0)


def test_tables_are_dequantized(quantized: Callable[[str, str], Path]) -> None:
    """A new EAGLE-3 draft starts from the rows of the quantized lm_head."""
    target = sage.load_target(quantized("llama", "torchao with tables"), dtype=torch.float32)
    rows = target.lm_head.weight.dequantize()
    draft = sage.new_draft(target, "eagle3", feature_levels=[1, 2, 3])
    torch.testing.assert_close(draft.lm_head.weight.data, rows, atol=1e-6, rtol=0)
    plain = torch.nn.Linear(4, 8, bias=False)
    assert dense_weight(plain, torch.float32) is plain.weight


@pytest.mark.parametrize("method", ["torchao", "bitsandbytes 8-bit", "bitsandbytes 4-bit", "fp8"])
def test_planned_bytes_are_those_of_the_loaded_target(method: str, quantized: Callable[[str, str], Path]) -> None:
    folder = quantized("llama", method)
    planned = weight_bytes(meta_target(AutoConfig.from_pretrained(folder)).model, 4)
    model = sage.load_target(folder, dtype=torch.float32).model
    assert planned == pytest.approx(sum(map(loaded_bytes, model.parameters())), rel=0.05)


def loaded_bytes(weight: Any) -> int:
    """Returns the bytes of a weight with its scales."""
    if hasattr(weight, "__tensor_flatten__") and type(weight).__name__ == "Int8Tensor":
        parts = [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]
    else:
        state = getattr(weight, "quant_state", None)
        parts = [
            weight.data,
            *filter(lambda part: part is not None, (getattr(weight, "SCB", None), getattr(state, "absmax", None))),
        ]
    return sum(part.nbytes for part in parts)


def test_outliers_of_a_pass_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    quantized_by_transformers(lambda: BitsAndBytesConfig(load_in_8bit=True))(save_target("llama", tmp_path), tmp_path)
    sage.load_target(tmp_path, dtype=torch.float32)
    assert "llm_int8_threshold=0" in caplog.text


FAULTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {  # change of config.json -> the message
    "not named": ({"quantization_config": None}, ("weight_scale_inv is of a quantization that config.json does not name",)),
    "GPU": ({"quantization_config": {"quant_method": "fbgemm_fp8"}}, ("requires a GPU", "that is not quantized")),
}


@pytest.mark.parametrize("name", FAULTS)
def test_is_refused(name: str, quantized: Callable[[str, str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(quantized("llama", "fp8"), folder)
    change, parts = FAULTS[name]
    set_config(folder, **change)
    with refused("target: ", *parts):
        sage.load_target(folder)


def test_zero_does_not_shard_it(quantized: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "is_deepspeed_zero3_enabled", lambda: True)
    with refused("deepspeed.shard_target: ", "does not shard quantized weights (fp8 in", "drop it"):
        sage.load_target(quantized("llama", "fp8"))


# -- adapters --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_target("llama", folder)
    return folder


def save_adapter(folder: Path, layers: int = 3, **options: Any) -> Path:
    """Saves a random LoRA adapter of attention and MLP for the tiny Llama, of another number of layers if given."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**text() | SIZES | {"num_hidden_layers": layers} | options))
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft.get_peft_model(model, config).save_pretrained(folder)
    return folder


def test_an_adapter_is_merged_to_the_bit(base: Path, tmp_path: Path) -> None:
    """A draft for the base is refused for the adapted target and the other way round, also exported."""
    peft = pytest.importorskip("peft")
    adapter = save_adapter(tmp_path / "adapter")
    adapted, plain = sage.load_target(base, adapter=str(adapter)), sage.load_target(base)
    expected = peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), adapter).merge_and_unload().state_dict()
    found = adapted.model.state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert not torch.equal(found["model.layers.0.mlp.down_proj.weight"], plain.model.model.layers[0].mlp.down_proj.weight)
    for made, other in ((adapted, plain), (plain, adapted)):
        draft = random_draft(made, "eagle3", feature_levels=[0, 1, 2])
        draft.save_pretrained(tmp_path / "draft")
        export(tmp_path / "draft", tmp_path / "out", "eagle3", ExportOptions(overwrite=True))
        for folder in (tmp_path / "draft", tmp_path / "out"):
            sage.load_draft(folder, made)
            with refused("draft: ", "was made for llama", "adapter "):
                sage.load_draft(folder, other)
        card = (tmp_path / "out" / "README.md").read_text()
        assert (f"--adapter {adapter}" in card) == (f"merge {adapter} with PEFT" in card) == (made is adapted)


def test_an_adapter_stays_beside_quantized_weights(quantized: Callable[[str, str], Path], tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path)
    load = partial(sage.load_target, quantized("llama", "torchao"), dtype=torch.float32)
    targets = [load(), load(adapter=str(adapter))]
    inputs = {"input_ids": torch.arange(70, 82)[None], "attention_mask": torch.ones(1, 12, dtype=torch.long)}
    features = [target.features(target.embed(inputs)).last for target in targets]
    assert targets[1].quantization == "torchao" and float((features[0] - features[1]).abs().max()) > 1e-2
    found = sage.generate(targets[1], random_draft(targets[1], "eagle3"), inputs, "sage", max_new_tokens=8).tokens.tolist()
    assert found == greedy_text(targets[1], inputs, 8)


OTHERS: dict[str, dict[str, Any]] = {"wider": {"intermediate_size": 96}, "deeper": {"layers": 4}, "shallower": {"layers": 2}}


@pytest.mark.parametrize("name", [*OTHERS, "prompt", "missing"])
def test_adapters_that_are_refused(name: str, base: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    if name in OTHERS:
        save_adapter(tmp_path, **OTHERS[name])
    elif name == "prompt":
        config = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
        peft.get_peft_model(LlamaForCausalLM.from_pretrained(base), config).save_pretrained(tmp_path)
    with refused(f"target.adapter: {tmp_path} ", "does not fit", "give an adapter trained for this target"):
        sage.load_target(base, adapter=str(tmp_path))


@pytest.mark.slow
def test_training_resumes_exactly(tmp_path: Path) -> None:
    """A draft of an int8 target with an adapter; the run's validation and a resumed run load both again."""
    peft = pytest.importorskip("peft")
    folder, adapter = make_target(tmp_path), tmp_path / "adapter"
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(AutoModelForImageTextToText.from_pretrained(folder), config).save_pretrained(adapter)
    WRITERS["torchao"](AutoModelForImageTextToText, folder)
    for run, steps, more in (("whole", 2, ()), ("half", 1, ()), ("half", 2, ("run.resume=true",))):
        words = (f"target.adapter={adapter}", f"train.max_steps={steps}", *more)
        assert train_quickly(configured(folder, tmp_path / run, *words)) == 0
    whole, half = (draft_weights(tmp_path / run) for run in ("whole", "half"))
    assert all(torch.equal(whole[name], half[name]) for name in whole)
    with refused("draft: ", "adapter "):
        sage.load_draft(tmp_path / "half", sage.load_target(folder))


# -- GGUF ------------------------------------------------------------------------------------------------------------------

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
    out = sage.generate(target, random_draft(target, "eagle3"), inputs, "sage", max_new_tokens=8)
    assert out.tokens.tolist() == greedy_text(target, inputs, 8)


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
