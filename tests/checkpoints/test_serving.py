"""The engines that can serve a draft, and the settings in the way: the line of a run, and the obstacles of an export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from support.export_helpers import export_draft, make_draft, save_draft
from support.messages import refused
from support.models import text_sizes
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MistralConfig

import sage
from checkpoints.export.exporter import serve_commands
from checkpoints.export.formats import find_format
from checkpoints.export.serving import export_choice, serving_line
from checkpoints.export.target import TargetFacts
from sage.io.files import config_dir

POOL = {"kind": "pool", "ratio": 4}


def line_of(target: sage.Target, kind: str = "eagle3", **options: Any) -> str:
    return serving_line(make_draft(target, kind, **options), target.model.config)


@pytest.mark.parametrize(("inputs", "fed"), [("embed", "token"), ("token", "embed")])
def test_the_engine_with_other_image_inputs_is_named(targets: dict[str, sage.Target], inputs: str, fed: str) -> None:
    line = line_of(targets["qwen2_5_vl"], image_inputs=inputs)
    assert f"lower acceptance at image positions than with draft.image_inputs={fed}" in line
    assert f"draft.image_inputs={inputs}" not in line


@pytest.mark.parametrize(
    ("kind", "options", "settings"),
    [
        ("eagle3", {"compressor": POOL}, ["draft.compressor=pool ratio=4", "draft/compressor=none"]),
        ("eagle3", {"feature_levels": [1]}, ["draft.feature_levels=[1]"]),
        ("eagle", {"input_norm": True, "compressor": POOL}, ["draft.input_norm=true", "draft.compressor=pool ratio=4"]),
    ],
)
def test_settings_in_the_way_are_named(
    targets: dict[str, sage.Target], kind: str, options: dict[str, Any], settings: list[str]
) -> None:
    line = line_of(targets["qwen2_5_vl"], kind, **options)
    assert line.startswith("can be served by this decoder only; not by vLLM and SGLang: ")
    for setting in settings:
        assert setting in line
    target = targets["qwen2_5_vl"]
    assert export_choice(make_draft(target, kind, **options), target.model.config) == ""


def test_a_target_family_that_no_engine_serves(unserved: sage.Target) -> None:
    assert "only; not by vLLM and SGLang: target=llava_onevision" in line_of(unserved)


@pytest.mark.parametrize(
    ("family", "kind", "options", "choice", "obstacle"),
    [
        ("llava_onevision", "eagle3", {}, "eagle3", "target=llava_onevision"),
        ("qwen2_5_vl", "eagle", {"input_norm": True}, "eagle --flavour plugin", "draft.input_norm=true"),
    ],
)
def test_what_vllm_serves_with_our_plugin(
    targets: dict[str, sage.Target], family: str, kind: str, options: dict[str, Any], choice: str, obstacle: str
) -> None:
    target = targets[family]
    line = line_of(target, kind, **options)
    assert line.startswith(f"can be served by vLLM with our plugin (sage-export --format {choice}")
    assert f"not by SGLang: {obstacle}" in line
    assert export_choice(make_draft(target, kind, **options), target.model.config) == choice


def facts_of(name: str) -> TargetFacts:
    """Facts about a published target, from its YAML."""
    target: Any = OmegaConf.load(config_dir() / "target" / f"{name}.yaml")
    return TargetFacts.of_config(AutoConfig.for_model(**OmegaConf.to_container(target.architecture)), target.path)


@pytest.mark.parametrize(
    ("name", "engines"),
    [
        ("llama3_1_8b", ["vLLM", "SGLang"]),
        ("qwen3_30b_a3b", ["vLLM", "SGLang"]),
        ("mistral_7b", ["vLLM"]),
        ("qwen3_vl_8b", ["vLLM"]),
        ("qwen3_vl_30b_a3b", []),
        ("qwen3_5_9b", []),
        ("llava_onevision_7b", ["vLLM"]),
        ("gemma3_4b", []),
    ],
)
def test_only_engines_that_serve_a_family_are_offered(name: str, engines: list[str]) -> None:
    facts = facts_of(name)
    commands = serve_commands(find_format("eagle3"), facts, "draft")
    assert list(commands) == engines
    assert list(serve_commands(find_format("eagle", "sglang"), facts, "draft")) == [one for one in engines if one == "SGLang"]
    assert not engines or facts.name in commands["vLLM"]


def test_an_export_names_all_obstacles_at_once(unserved: sage.Target, tmp_path: Path, sage_export: Any) -> None:
    draft = save_draft(tmp_path / "draft", unserved, "eagle", input_norm=True, compressor=POOL)
    out = tmp_path / "out"
    code, _, shown = sage_export(draft, "--format", "eagle", "--out", out)
    assert code == 2 and not out.exists()
    lines = [line for line in shown.splitlines() if line.startswith("error: ")]
    assert [line.split(":")[1].strip() for line in lines] == ["--flavour", "target", "draft.input_norm", "draft.compressor"]


TEXT_TARGETS = [(MistralConfig, {"sliding_window": None}, ["vLLM"]), (LlamaConfig, {}, ["vLLM", "SGLang"])]


@pytest.mark.parametrize(("config", "options", "engines"), TEXT_TARGETS, ids=["mistral", "llama"])
def test_a_text_target_is_served_by_the_engines_of_its_family(
    config: Any, options: dict[str, Any], engines: list[str], tmp_path: Path
) -> None:
    """It has no image positions that an engine could feed differently."""
    target = sage.Target(AutoModelForCausalLM.from_config(config(**text_sizes(), **options)))
    target.model.save_pretrained(tmp_path / "target")
    target.name = str(tmp_path / "target")
    line = line_of(target)
    assert line.split(", this decoder")[0] == "can be served by " + ", ".join(
        f"{engine} (sage-export --format eagle3)" for engine in engines
    )
    assert ("not by SGLang: target=mistral" in line) == (engines == ["vLLM"])
    result = export_draft(save_draft(tmp_path / "draft", target), tmp_path / "out", allow_unserved=False)
    card = (result.folder / "README.md").read_text()
    assert "At image positions" not in card and "text-generation" in card
    assert ("sglang.launch_server" in card) == ("SGLang" in engines) and f"vllm serve {target.name}" in card
    draft = save_draft(tmp_path / "eagle", target, "eagle")
    if engines == ["vLLM"]:
        with refused("target: SGLang", "not known to serve", "mistral", "--allow-unserved"):
            export_draft(draft, tmp_path / "refused", "eagle", flavour="sglang", allow_unserved=False)
