"""Every YAML file composes and passes the checks; choices, presets and defaults are as documented."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from transformers import LlamaConfig

from data_prep.real import target_folder
from sage.drafts.registry import KINDS as DRAFT_KINDS
from sage.io.files import config_dir
from train.config.checks import check, check_batch
from train.config.hydra_app import compose
from train.config.resolvers import run_name
from train.config.schema import (
    Config,
    Schedule,
)
from train.engine.engine import deepspeed_config, make_optimizer
from train.job.schedule import learning_rate
from train.monitor.sinks import check_tracking
from train.plan.meta import build_on_meta
from train.validation.validate import build_policies

GROUPS = (
    "target",
    "draft/compressor",
    "data",
    "deepspeed",
    "objective",
    "optim",
    "train",
    "decode",
    "tracking",
    "launch",
    "experiment",
)
NEEDS = {  # keys that a choice requires
    "target=by_path": ["target.path=Qwen/Qwen2.5-VL-7B-Instruct"],
    "draft=model": ["draft.num_layers=2"],
    "data=llava_instruct": ["data.path=/data/llava.json"],
    "objective=eagle": ["draft=eagle"],  # a loss on features, which eagle3 does not predict
    "objective=distill": ["draft=eagle"],
    "experiment=specvlm": ["data.path=/data/llava.json"],
}
FILES = [f"{group}={path.stem}" for group in GROUPS for path in sorted((config_dir() / group).glob("*.yaml"))]
CHOICES = [*FILES, *(f"draft={kind}" for kind in DRAFT_KINDS)]
PROMPT_FILES = sorted((config_dir() / "data" / "validation").glob("*.yaml"))
SWEEP_FILES = sorted((config_dir() / "sweep").glob("*.yaml"))
TARGETS = {choice: OmegaConf.load(config_dir() / f"{choice.replace('=', '/')}.yaml") for choice in FILES if "target=" in choice}
ARCHITECTURES: dict[str, str] = {}  # name -> its first target
for choice, content in TARGETS.items():
    ARCHITECTURES.setdefault(OmegaConf.select(content, "architecture.model_type") or choice, choice)
COMPOSED = [choice for choice in CHOICES if choice not in TARGETS or choice in ARCHITECTURES.values()]
PLANNED = {choice for choice, content in TARGETS.items() if "architecture" in content}  # built by test_plan.py
built: set[object] = set()


@pytest.fixture(scope="module", autouse=True)
def real_target() -> None:
    """The configuration of the target that `python -m data_prep.real` builds in the user's cache folder."""
    LlamaConfig(vocab_size=9000, hidden_size=32, num_hidden_layers=8).save_pretrained(target_folder())


@pytest.mark.parametrize("choice", COMPOSED)
def test_every_choice_composes_validates_and_builds(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device, where a 72B target takes no more memory than a pocket target; a plan needs no data.

    What has been built for another choice, or by test_plan.py, is not built again.
    """
    monkeypatch.setenv("WANDB_MODE", "offline")  # tests have no login
    config = compose("config", ["launch.plan=true", choice, *NEEDS.get(choice, [])], Config)
    check(config)
    assert deepspeed_config(config, 1, check_batch(config, 1))["zero_optimization"]["stage"] == config.deepspeed.stage
    assert config.objective.ce_weight + config.objective.tv_weight + config.objective.lk_weight > 0
    assert learning_rate(config.optim, 0, 100) > 0
    check_tracking(config)
    kind = repr((config.target.name, config.draft, config.optim.kind, config.decode.policies, config.decode.options))
    if kind not in built and choice not in PLANNED:
        built.add(kind)
        build_without_weights(config)


def build_without_weights(config: Config) -> None:
    """Builds the objects of a run that need neither weights nor data."""
    pair = build_on_meta(config)
    assert pair.trained_parameters > 0
    optimizer = make_optimizer(pair.draft.network, config, torch.device("meta"))
    assert optimizer.param_groups[0]["betas"] == (config.optim.beta1, config.optim.beta2)
    assert build_policies(config.decode)


def test_every_yaml_is_a_known_choice() -> None:
    """Every file is composed by a test."""
    tested = {config_dir() / f"{choice.replace('=', '/')}.yaml" for choice in FILES} | set(SWEEP_FILES)
    roots = {config_dir() / name for name in ("config.yaml", "validate.yaml", "prepare.yaml")}
    assert set(config_dir().rglob("*.yaml")) == tested | roots | set(PROMPT_FILES)


@pytest.mark.parametrize(
    ("words", "max_length", "micro_batch_size"),
    [
        (["target=qwen2_5_vl_7b"], 18_432, 1),  # a photo of 4000 x 3000: 15,301 tokens
        (["target=llava_onevision_0_5b"], 8_192, 2),  # 1920 x 1080: 7,269 tokens
        (["target=llava_1_5_7b"], 4_096, 4),
        (["target=qwen2_5_vl_7b", "data.max_length=4096"], 4_096, 4),
        (["target.path=FOLDER"], 18_432, 1),
        (["target.path=Own/Model"], 4_096, 4),
    ],
)
def test_the_longest_example_follows_from_the_images_of_the_family(
    words: list[str], max_length: int, micro_batch_size: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    config = compose("config", ["data=messages", *(word.replace("FOLDER", str(tmp_path)) for word in words)], Config)
    assert (config.data.max_length, config.train.micro_batch_size) == (max_length, micro_batch_size)


def test_the_specvlm_preset_is_its_recipe() -> None:
    """arXiv 2509.11815: online epochs over the LLaVA-1.5 mix, batch 128, constant 8e-5, 0.1 CE + 1.0 SmoothL1."""
    config = compose("config", ["experiment=specvlm"], Config)
    optim, objective = config.optim, config.objective
    assert (optim.lr, optim.beta1, optim.beta2, optim.weight_decay, optim.warmup_steps) == (8e-5, 0.9, 0.95, 0.0, 0)
    assert (optim.schedule, config.train.global_batch_size, config.train.epochs) == (Schedule.constant, 128, 5)
    assert (objective.ce_weight, objective.feature_weight, objective.steps) == (0.1, 1.0, 1)
    assert config.data.sources["llava"].kind == "llava_json" and config.target.name == "qwen2_5_vl_7b"


def test_the_eagle3_preset_is_its_recipe() -> None:
    """arXiv 2503.01840: no feature loss, seven unrolled steps weighted 0.8^i, a reduced vocabulary."""
    config = compose("config", ["experiment=eagle3"], Config)
    assert (config.objective.ce_weight, config.objective.feature_weight) == (1.0, 0.0)
    assert (config.objective.steps, config.objective.step_decay, config.draft.draft_vocab_size) == (7, 0.8, 32000)


@pytest.mark.parametrize(
    ("draft", "path", "data", "objective", "name"),
    [
        ("eagle", None, "pocket", "eagle", "T-eagle-pocket"),
        ("eagle3", None, "pocket", "lk", "T-eagle3-pocket-lk"),
        ("eagle3", "/data/my rows, two.v2.jsonl", "messages", "eagle3", "T-eagle3-my_rows_two"),
        ("eagle3", "HuggingFaceM4/ChartQA", "hub", "eagle3", "T-eagle3-ChartQA"),
        ("eagle3", f"{'x' * 300}.jsonl", "messages", "", f"T-eagle3-{'x' * 40}"),
        ("eagle3", "..", "folder", "", "T-eagle3-data"),
    ],
)
def test_the_name_tells_runs_apart_by_data_and_objective(
    draft: str, path: str | None, data: str, objective: str, name: str
) -> None:
    assert run_name("T", draft, path, data, objective) == name


@pytest.mark.parametrize(
    ("overrides", "lr", "batch"),
    [
        (["target=pocket_qwen2_5_vl"], 8e-3, 16),
        (["target=qwen2_5_vl_7b"], 8e-5, 128),
        (["target=qwen2_5_vl_7b", "optim=adamw_cosine", "optim.lr=1e-3"], 1e-3, 128),
        (["target.path=Own/Model"], 8e-5, 128),  # a hub id: its width is unknown
        (["experiment=demo"], 8e-3, 16),
        (["experiment=specvlm", "target=qwen2_5_vl_72b"], 8e-5, 128),
    ],
)
def test_training_defaults_suit_the_target(overrides: list[str], lr: float, batch: int) -> None:
    config = compose("config", overrides, Config)
    assert (config.optim.lr, config.train.global_batch_size) == (lr, batch)
