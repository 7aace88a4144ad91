"""Targets that are refused, with their reason, before any weight is loaded; and attention that is not implemented."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.data_helpers import save_target
from support.family_suite import END, text
from support.messages import check_message, refused
from support.processors import byte_tokenizer_of
from transformers import (
    AutoTokenizer,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaOnevisionConfig,
    MistralConfig,
    OlmoHybridConfig,
    Qwen2Config,
)

import sage
from checkpoints.export.target import TargetFacts
from sage.runtime.attention import tree_attention
from sage.targets.families import family_of
from sage.targets.loading import load_processor, meta_target


def test_windows() -> None:
    """The windows that configurations switch off are none."""
    used = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4}
    for config in (MistralConfig(**text(), sliding_window=8), Qwen2Config(**text(), **used)):
        assert family_of(config).window == 8
    for config in (MistralConfig(**text(), sliding_window=None), Qwen2Config(**text(), sliding_window=8)):
        assert family_of(config).window is None


REFUSED: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {  # configuration -> its message
    "linear attention": (OlmoHybridConfig, ("has layers of type linear_attention", "the text models qwen3_5_text, ")),
    "soft caps": (lambda: Gemma2Config(num_hidden_layers=2), ("attn_logit_softcapping=50.0: tree attention",)),
    "sinks": (lambda: GptOssConfig(num_hidden_layers=2), ("gpt_oss has attention sinks",)),
    "sizes": (
        lambda: Gemma4TextConfig(per_layer_config={1: {"intermediate_size": 8}}),
        ("gemma4_text has layers that differ in intermediate_size",),
    ),
    "directions": (lambda: Gemma3TextConfig(use_bidirectional_attention=True), ("use_bidirectional_attention=true",)),
    "text model": (
        lambda: LlavaOnevisionConfig(text_config={"model_type": "gemma", "num_hidden_layers": 2}),
        ("llava_onevision with a text model of model_type 'gemma'", "llama, mistral"),
    ),
    "vision tower": (
        lambda: LlavaConfig(vision_config={"model_type": "pixtral"}),
        ("llava with a vision tower of model_type 'pixtral'", "clip_vision_model, siglip_vision_model"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_configurations(name: str) -> None:
    make, parts = REFUSED[name]
    with refused("target: ", *parts):
        family_of(make())


def test_a_configuration_is_refused_before_weights_are_loaded(tmp_path: Path) -> None:
    OlmoHybridConfig().save_pretrained(tmp_path)
    for load in (sage.load_target, sage.targets.loading.load_processor):
        with refused("target: ", "olmo_hybrid has layers of type linear_attention"):
            load(str(tmp_path))


FAULTS: dict[str, tuple[Any, tuple[str, ...]]] = {  # change of a saved target's folder -> its message
    "token beyond the embedding": (lambda at: add_token(at), ("token '<|medicine|>'", "id 320", "320 embeddings (vocab_size)")),
    "text beyond the embedding": (
        lambda at: change(at, "config.json", vocab_size=300),
        ("id 300", "300 embeddings (vocab_size)"),
    ),
    "two BOS after a system": (lambda at: two_after_system(at), ("'<s>' twice",)),
    "two BOS": (lambda at: change(at, "tokenizer_config.json", bos_token="<s>"), ("begins a prompt with '<s>' twice",)),
    "no end token": (lambda at: change(at, "tokenizer_config.json", eos_token=None), ("no token ends", "eos_token_id is null")),
    "AWQ": (lambda at: change(at, "config.json", quantization_config=AWQ), ("AWQ quantized model", "that is not quantized")),
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


def change(folder: Path, name: str, **values: Any) -> None:
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | values))


def two_after_system(folder: Path) -> None:
    change(folder, "tokenizer_config.json", bos_token="<s>")
    template = "<s>{% for m in messages %}{{ '<s>' * (m.role == 'system') }}{{ m.content }}<e>{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)


def add_token(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens("<|medicine|>")
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("name", FAULTS)
def test_targets_whose_files_do_not_fit_together(name: str, tmp_path: Path) -> None:
    """Without the fault, the target loads."""
    tokenizer = byte_tokenizer_of({"<e>": END, "<s>": 2}, eos="<e>")
    tokenizer.chat_template = "{{ bos_token }}" * 2 + "{% for m in messages %}{{ m.content }}<e>{% endfor %}"
    model = LlamaForCausalLM(LlamaConfig(**text() | {"vocab_size": 320, "eos_token_id": None}))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    sage.load_target(tmp_path)
    make, parts = FAULTS[name]
    make(tmp_path)
    with refused("target: ", *parts):
        sage.load_target(tmp_path)


def test_a_rope_that_heads_cannot_follow() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    target = meta_target(LlamaConfig(**text(), rope_parameters=rope))
    with refused("target.rope_parameters.rope_type: 'dynamic'", "llama3", "draft=model"):
        sage.new_draft(target, "eagle")


class TestAttention:
    def attend(self, mask: Any = None, **arguments: Any) -> None:
        states = torch.zeros(1, 2, 3, 8)
        tree_attention(torch.nn.Identity(), states, states, states, mask, **arguments)

    def test_a_lost_mask(self) -> None:
        self.attend(is_masked=False)
        with pytest.raises(RuntimeError) as caught:
            self.attend(is_masked=True)
        check_message(str(caught.value), "lost the mask", "Family.tree_mask")

    def test_arguments_that_are_not_forwarded(self) -> None:
        with pytest.raises(RuntimeError, match="does not forward its keyword arguments"):
            self.attend()

    @pytest.mark.parametrize("name", ["softcap", "s_aux"])
    def test_attention_that_is_not_implemented(self, name: str) -> None:
        self.attend(is_masked=False, **{name: None})
        with pytest.raises(RuntimeError, match=f"{name} is not implemented"):
            self.attend(is_masked=False, **{name: 30.0})

    def test_a_window_without_a_mask(self) -> None:
        with pytest.raises(RuntimeError, match="a sliding window needs a mask"):
            self.attend(is_masked=False, sliding_window=8)


# -- code in downloaded folders -----------------------------------------------------------------------------------------


ROOT = Path(__file__).resolve().parents[2]
CODE = "from pathlib import Path\nPath({mark!r}).touch()\nfrom transformers import PreTrainedConfig as Config, {base} as Mine\n"


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """Returns a target folder whose config, tokenizer and image processor name remote code."""
    folder = save_target("qwen2_5_vl", tmp_path / "evil")
    (folder / "mine.py").write_text(CODE.format(mark=str(tmp_path / "ran"), base="PreTrainedTokenizerFast"))
    return folder


def name_code(folder: Path, file: str, keys: dict[str, str], **changes: str) -> None:
    path = folder / file
    content = json.loads(path.read_text()) | {"auto_map": keys} | changes
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("file", "keys", "changes"),
    [
        ("config.json", {"AutoConfig": "mine.Config", "AutoModel": "mine.Mine"}, {"model_type": "mine"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}, {"tokenizer_class": "Mine"}),
        ("preprocessor_config.json", {"AutoImageProcessor": "mine.Mine"}, {"image_processor_type": "Mine"}),
    ],
)
def test_code_of_a_target_is_not_run(evil, tmp_path, monkeypatch, file, keys, changes):
    """There is no interactive question either: it would block a batch job."""

    questions: list[object] = []
    monkeypatch.setattr("builtins.input", lambda *question: questions.append(question) or "y")
    name_code(evil, file, keys, **changes)
    for load in (sage.load_target, lambda folder: load_processor(str(folder)), TargetFacts.of_folder):
        try:
            load(evil)
        except ValueError as error:
            assert file != "config.json" or "cannot read its config.json" in str(error)
    assert not questions
    assert not (tmp_path / "ran").exists()


def test_pickles_are_opened_for_tensors_only() -> None:
    """torch.load only with weights_only, the pickle module only for its errors, numpy without objects, no remote code."""
    allowed = {"weights_only=True", "trust_remote_code=False", "pickle.UnpicklingError", "import pickle"}
    pattern = re.compile(
        r"weights_only=\w+|trust_remote_code=\w+|allow_pickle=\w+|import pickle|\bpickle\.\w+|joblib|torch\.load\([^)]*"
    )
    for package in ("sage", "train", "data_prep", "checkpoints"):
        for path in (ROOT / package).rglob("*.py"):
            for found in pattern.findall(path.read_text()):
                text = "weights_only=True" if found.startswith("torch.load(") and "weights_only=True" in found else found
                assert text in allowed, f"{path}: {found}"
