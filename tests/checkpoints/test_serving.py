"""The engines that can serve a draft, and the settings in the way: the line of a run, and the obstacles of an export."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from support.export_helpers import export_draft, make_draft, save_draft
from support.messages import check_message, refused
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


ONLY = "can be served by this decoder only; not by vLLM and SGLang: "
PLUGIN = "can be served by vLLM with our plugin (sage-export --format "
LINES: list[tuple[Any, ...]] = [  # family, kind of draft, its options, the choice of an export, parts of the line
    ("qwen2_5_vl", "eagle3", {"feature_levels": [1]}, "", (ONLY, "draft.feature_levels=[1]")),
    ("qwen2_5_vl", "eagle", {"input_norm": True, "compressor": POOL}, "", (ONLY, "draft.input_norm=true", "=pool ratio=4")),
    ("llava_onevision", "eagle3", {}, "eagle3", (f"{PLUGIN}eagle3", "not by SGLang: target=llava_onevision")),
    ("qwen2_5_vl", "eagle", {"input_norm": True}, "eagle --flavour plugin", (PLUGIN, "not by SGLang: draft.input_norm=true")),
]


@pytest.mark.parametrize("row", LINES, ids=lambda row: f"{row[1]}-{row[4][1]}")
def test_the_export_of_an_engine_or_the_settings_in_its_way_are_named(targets: dict[str, sage.Target], row: Any) -> None:
    family, kind, options, choice, parts = row
    check_message(line_of(targets[family], kind, **options), *parts)
    assert export_choice(make_draft(targets[family], kind, **options), targets[family].model.config) == choice


def facts_of(name: str) -> TargetFacts:
    """Facts about a published target, from its YAML."""
    target: Any = OmegaConf.load(config_dir() / "target" / f"{name}.yaml")
    return TargetFacts.of_config(AutoConfig.for_model(**OmegaConf.to_container(target.architecture)), target.path)


@pytest.mark.parametrize(
    ("name", "engines"),
    [
        ("qwen3_30b_a3b", ["vLLM", "SGLang"]),
        ("qwen3_vl_8b", ["vLLM"]),
        ("qwen3_vl_30b_a3b", []),
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
def test_a_text_target_is_served_by_the_engines_of_its_family(config, options, engines, tmp_path):
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
