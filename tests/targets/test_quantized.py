"""Quantized targets: every method decodes as `generate`; what is refused in one line."""

import re
import shlex
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.family_suite import text
from support.messages import refused
from support.models import MAKERS, make_inputs, random_draft
from support.pass_helpers import slow_except
from support.quantized_targets import AT_LOAD, SIZES, WRITERS, at_load, check_decoding, resume, save_target, set_config
from support.train_helpers import configure, make_target
from transformers import AutoModelForImageTextToText, LlamaConfig, LlamaForCausalLM

import sage
from checkpoints.export.exporter import ExportOptions, export
from checkpoints.inspect import inspect_folder
from sage.drafts.draft import open_draft
from sage.runtime.modes import PassMode
from sage.targets import loading, weights
from sage.targets.weights import dense_weight, weight_bytes
from train.plan.memory import build_on_meta

with suppress(ImportError):  # registers torch's linear layer, before a test replaces it by DeepSpeed's
    import torchao.quantization  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
DEQUANTIZED = ("fine-grained",)  # by transformers on a CPU
SAME = [method for method in WRITERS if "torchao" in method or "4-bit" in method]  # layers as at load
CASES = [("llama", method) for method in (*AT_LOAD, *WRITERS)]
CASES += [(family, method) for family, method in zip(cycle(MAKERS), (*AT_LOAD, *WRITERS)) if method not in SAME]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Folders by family and method, written once."""
    folders: dict[tuple[str, str], Path] = {}

    def folder(family: str, method: str) -> Path:
        if (family, method) not in folders:
            path = tmp_path_factory.mktemp("target")
            WRITERS.get(method, lambda *_: None)(save_target(family, path), path)
            folders[family, method] = path
        return folders[family, method]

    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_target("llama", folder)
    return folder


@pytest.mark.parametrize(("family", "method"), slow_except([("llama", "int8")], CASES))
def test_decodes_and_exports(family: str, method: str, quantized: Callable[[str, str], Path], tmp_path: Path) -> None:
    """Before `generate` has called the whole model; features are its hidden states; passes are eager."""
    target = sage.load_target(quantized(family, method), dtype=torch.float32, passes="compiled", **at_load(method))
    name = None if method in DEQUANTIZED else AT_LOAD.get(method, method.replace(" with tables", ""))
    assert target.quantization == name and target.passes == ("eager" if name else "compiled")
    target.passes = PassMode.eager
    inputs = make_inputs(target) if family in MAKERS else {"input_ids": torch.arange(70, 82)[None]}
    draft = random_draft(target, "eagle3", feature_levels=[0, 1, 2])
    check_decoding(target, inputs, draft)
    draft.save_pretrained(tmp_path / "draft")
    export(tmp_path / "draft", tmp_path / "out", "eagle3", ExportOptions(allow_unserved=True))
    sage.load_draft(tmp_path / "out", target)
    named = f"quantized ({method} at load)" if method in AT_LOAD else f"quantized ({name})"
    assert (named in (tmp_path / "out" / "README.md").read_text()) == (name is not None)


def test_tables_are_dequantized(quantized: Callable[[str, str], Path]) -> None:
    """A new EAGLE-3 draft starts from the rows of the quantized lm_head."""
    target = sage.load_target(quantized("llama", "torchao Int8WeightOnly with tables"), dtype=torch.float32)
    rows = target.lm_head.weight.dequantize()
    draft = sage.new_draft(target, "eagle3", feature_levels=[1, 2, 3])
    torch.testing.assert_close(draft.lm_head.weight.data, rows, atol=1e-6, rtol=0)
    plain = torch.nn.Linear(4, 8, bias=False)
    assert dense_weight(plain, torch.float32) is plain.weight


@pytest.mark.parametrize("method", [*AT_LOAD, *WRITERS])
def test_planned_bytes_are_those_of_the_loaded_target(method: str, quantized: Callable[[str, str], Path]) -> None:
    folder = quantized("llama", method)
    words = [f"target.path={folder}", "target.dtype=fp32", "data=llava_instruct", *at_load(method, "target.quantize={}")]
    planned = weight_bytes(build_on_meta(configure(*words)).target.model, 4)
    model = sage.load_target(folder, dtype=torch.float32, **at_load(method)).model
    assert planned == pytest.approx(sum(map(loaded_bytes, model.parameters())), rel=0.05)


def loaded_bytes(weight: Any) -> int:
    """Returns the bytes of a weight with its scales."""
    if type(weight).__name__ in ("Int8Tensor", "Float8Tensor"):
        parts = [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]
    else:
        state = getattr(weight, "quant_state", None)
        scales = (getattr(weight, "SCB", None), getattr(state, "absmax", None))
        parts = [weight.data, *filter(lambda part: part is not None, scales)]
    return sum(part.nbytes for part in parts)


FAULTS: dict[str, tuple[str | None, tuple[str, ...]]] = {  # quant_method in config.json -> the message
    "not named": (None, ("weight_scale_inv is of a quantization that config.json does not name",)),
    "no kernel": ("fbgemm_fp8", ("requires a GPU", "that is not quantized")),
}
LACKING = {"torchao Int8WeightOnly": "torchao", "bitsandbytes 4-bit": "bnb_4bit", "bitsandbytes 8-bit": "bnb_8bit"}


@pytest.mark.parametrize("name", FAULTS)
def test_is_refused(name: str, quantized: Callable[[str, str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "target"
    method, parts = FAULTS[name]
    shutil.copytree(quantized("llama", "fine-grained"), folder)
    set_config(folder, quantization_config=method and {"quant_method": method})
    with refused("target: ", *parts):
        sage.load_target(folder)


@pytest.mark.parametrize("method", [method for method in WRITERS if "with tables" not in method])
def test_a_half_quantized_folder_is_refused(method: str, quantized: Callable[[str, str], Path], tmp_path: Path) -> None:
    """The scale of one layer is missing."""
    folder, layer = tmp_path / "target", "layers.1.mlp.down_proj"
    shutil.copytree(quantized("llama", method), folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors[next(name for name in tensors if re.search(rf"{layer}.*(scale|SCB|absmax)", name))]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with refused(f"target: {folder}: its weights ", "torchao" if "torchao" in method else layer, "copy it again"):
        sage.load_target(folder, dtype=torch.float32)


@pytest.mark.parametrize("method", LACKING)
def test_a_missing_library_is_named(method, quantized, monkeypatch):
    folder, library = quantized("llama", method), method.split()[0]
    monkeypatch.setattr(f"transformers.quantizers.quantizer_{LACKING[method]}.is_{library}_available", lambda: False)
    with refused("target: ", "pip install", library, "or give the model that is not quantized"):
        sage.load_target(folder)


AT_LOAD_FAULTS: dict[str, tuple[str, str, tuple[str, ...]]] = {  # folder, method -> the message
    "unknown": ("int8", "int4", ("'int4' is not allowed", "one of int8, nf4, fp8")),
    "twice": ("torchao Int8WeightOnly", "nf4", ("is quantized already (torchao Int8WeightOnly)", "drop it")),
    "library": ("int8", "fp8", ("needs torchao", "pip install 'sage-draft[quantized]'")),
}


@pytest.mark.parametrize("name", AT_LOAD_FAULTS)
def test_mistakes_at_load_are_refused(name, quantized, monkeypatch):
    written, method, parts = AT_LOAD_FAULTS[name]
    folder = quantized("llama", written)
    monkeypatch.setattr(weights, "find_spec", lambda _: None)
    with refused("target.quantize", *parts):
        sage.load_target(folder, quantize=method)


@pytest.mark.parametrize("method", AT_LOAD)
def test_a_draft_is_for_one_quantization(method: str, base: Path, tmp_path: Path) -> None:
    """Also exported; the card and the description of the folder name it."""
    plain, target = sage.load_target(base), sage.load_target(base, quantize=method)
    assert target.lm_head_weight.dtype == target.dtype == plain.dtype
    for made, other in ((plain, target), (target, plain)):
        random_draft(made, "eagle3", feature_levels=[0, 1, 2]).save_pretrained(tmp_path / "draft")
        export(tmp_path / "draft", tmp_path / "out", "eagle3", ExportOptions(overwrite=True))
        for folder in (tmp_path / "draft", tmp_path / "out"):
            sage.load_draft(folder, made)
            with refused("draft: ", "was made for llama", f"quantize {method}", "--quantize, target.quantize"):
                sage.load_draft(folder, other)
            trained_on = open_draft(folder, other, torch.float32)
            trained_on.assign(other)
            trained_on.check(other)
            assert (f"quantized to {method} at load" in inspect_folder(folder).facts["target"]) == (made is target)
        card = (tmp_path / "out" / "README.md").read_text()
        assert (f"--quantize {method}" in card) == (f"target.quantize={method}" in card) == (made is target)
    with refused("draft.num_layers: ", "draft.path=DIR"):
        sage.new_draft(target, "model", num_layers=1)


@pytest.mark.parametrize("given", [{}, {"quantize": "int8"}])
def test_zero_does_not_shard_it(given, base, quantized, monkeypatch):
    monkeypatch.setattr(loading, "is_deepspeed_zero3_enabled", lambda: True)
    with refused("deepspeed.shard_target: ", f"does not shard quantized weights ({given.get('quantize', 'fp8')} in", "drop it"):
        sage.load_target(base if given else quantized("llama", "fine-grained"), **given)


# -- adapters --------------------------------------------------------------------------------------------------------------


def save_adapter(folder: Path, layers: int = 3, **options: Any) -> Path:
    """Saves a random LoRA adapter of attention and MLP for the tiny Llama, of another number of layers if given."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**text() | SIZES | {"num_hidden_layers": layers} | options))
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft.get_peft_model(model, config).save_pretrained(folder)
    return folder


def test_an_adapter_is_merged_to_the_bit(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert (f"--adapter {adapter}" in card) == ("vllm serve merged" in card) == (made is adapted)
        assert (f"--lora-modules adapted={adapter}" in card) == (made is adapted)
        export(tmp_path / "draft", tmp_path / "speculators", "speculators", ExportOptions(overwrite=True))
        assert ('"merged"' in (tmp_path / "speculators" / "config.json").read_text()) == (made is adapted)
        if made is adapted:  # the command of the card
            monkeypatch.chdir(tmp_path)
            exec(shlex.split(next(line for line in card.splitlines() if line.startswith("python -c ")))[2], {})
            merged = sage.load_target(tmp_path / "merged").model.state_dict()
            assert all(torch.equal(found[name], merged[name]) for name in found)


def test_an_adapter_stays_beside_quantized_weights(quantized: Callable[[str, str], Path], tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path)
    load = partial(sage.load_target, quantized("llama", "torchao Int8WeightOnly"), dtype=torch.float32)
    targets = [load(), load(adapter=str(adapter))]
    inputs = {"input_ids": torch.arange(70, 82)[None], "attention_mask": torch.ones(1, 12, dtype=torch.long)}
    features = [target.features(target.embed(inputs)).last for target in targets]
    assert targets[1].quantization == "torchao Int8WeightOnly" and float((features[0] - features[1]).abs().max()) > 1e-2
    check_decoding(targets[1], inputs, random_draft(targets[1], "eagle3"))


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


RESUMED = [("llava_onevision", "int8"), ("qwen2_5_vl", "nf4"), ("llava_onevision", "fp8")]
RESUMED += [(("qwen2_5_vl", "llava_onevision")[i % 2], method) for i, method in enumerate(WRITERS) if method not in SAME]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "method"), RESUMED)
def test_training_resumes(family: str, method: str, tmp_path: Path) -> None:
    folder = make_target(tmp_path, family)
    WRITERS.get(method, lambda *_: None)(AutoModelForImageTextToText, folder)
    zero = ["deepspeed=zero3"] if method == "fp8" else []  # whose linear layer reads plain tensors only
    resume(folder, tmp_path, *at_load(method, "target.quantize={}"), *zero)


@pytest.mark.slow
def test_training_resumes_exactly(tmp_path: Path) -> None:
    """A draft of an int8 target goes on with an adapter; the run's validation and a resumed run load both again."""
    peft = pytest.importorskip("peft")
    folder, adapter = make_target(tmp_path), tmp_path / "adapter"
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(AutoModelForImageTextToText.from_pretrained(folder), config).save_pretrained(adapter)
    WRITERS["torchao Int8WeightOnly"](AutoModelForImageTextToText, folder)
    sage.new_draft(sage.load_target(folder, dtype=torch.float32), "eagle", seed=0).save_pretrained(tmp_path / "draft")
    resume(folder, tmp_path, f"target.adapter={adapter}", f"draft.path={tmp_path / 'draft'}")
    with refused("draft: ", "adapter "):
        sage.load_draft(tmp_path / "half", sage.load_target(folder))
