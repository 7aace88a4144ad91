"""Every YAML file composes and passes the checks; choices, presets and defaults are as documented."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from support.train_helpers import python

from data_prep.config import validate as validate_data
from sage.bench.runners import AUTOREGRESSIVE, BASELINES
from sage.drafts.registry import KINDS as DRAFT_KINDS
from sage.io.files import config_dir
from sage.planning.options import defaults
from sage.trees import POLICIES, policy_class
from train.config.checks import check, check_batch
from train.config.hydra_app import compose
from train.config.schema import (
    Baseline,
    Config,
    PolicyName,
    Precision,
    Schedule,
    ValidateConfig,
)
from train.distill.chunked_loss import weighted_terms
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


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_composes_validates_and_builds(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device, where a 72B target takes no more memory than a pocket target; a plan needs no data."""
    monkeypatch.setenv("WANDB_MODE", "offline")  # tests have no login
    config = compose("config", ["launch.plan=true", choice, *NEEDS.get(choice, [])], Config)
    check(config)
    build_without_weights(config)


def build_without_weights(config: Config) -> None:
    """Builds the objects of a run that need neither weights nor data."""
    pair = build_on_meta(config)
    assert pair.trained_parameters > 0
    optimizer = make_optimizer(pair.draft.network, config, torch.device("meta"))
    assert optimizer.param_groups[0]["betas"] == (config.optim.beta1, config.optim.beta2)
    assert deepspeed_config(config, 1, check_batch(config, 1))["zero_optimization"]["stage"] == config.deepspeed.stage
    assert weighted_terms(config.objective)
    assert learning_rate(config.optim, 0, 100) > 0
    assert build_policies(config.decode)
    check_tracking(config)


def test_every_yaml_is_a_known_choice() -> None:
    """Every file is composed by a test."""
    tested = {config_dir() / f"{choice.replace('=', '/')}.yaml" for choice in FILES} | set(SWEEP_FILES)
    roots = {config_dir() / name for name in ("config.yaml", "validate.yaml", "prepare.yaml")}
    assert set(config_dir().rglob("*.yaml")) == tested | roots | set(PROMPT_FILES)


@pytest.mark.parametrize("path", PROMPT_FILES, ids=lambda path: path.stem)
def test_prompt_set_composes(path: Path) -> None:
    config = compose("config", [f"data/validation={path.stem}"], Config)
    assert config.data.validation.keys() == {path.stem}
    validate_data(config.data)


def test_validate_config_composes() -> None:
    config = compose("validate", ["checkpoint=runs/x", "decode.policies=[sage]"], ValidateConfig)
    assert config.checkpoint == "runs/x" and config.decode.policies == ["sage"]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.slow
def test_a_policy_composes_with_its_defaults_and_every_option(name: str) -> None:
    assert compose("config", [f"decode/policy=[{name}]"], Config).decode.options == {name: {}}
    options = {option: value for option, value in defaults(policy_class(name)).items() if option != "paths"}
    given = [f"decode.options.{name}.{option}={'null' if value is None else value}" for option, value in options.items()]
    decode = compose("config", [f"decode/policy=[{name}]", *given], Config).decode
    assert decode.options == {name: options} and decode.policies == [name]
    build_policies(decode)


def test_the_schema_knows_every_policy_and_baseline() -> None:
    assert set(PolicyName) == set(POLICIES)
    assert set(Baseline) == set(BASELINES) - {AUTOREGRESSIVE}  # which is always measured


def test_measured_policies_are_the_composed_ones_unless_overridden() -> None:
    assert compose("config", ["decode/policy=[sage,chain]"], Config).decode.policies == ["sage", "chain"]
    config = compose("config", ["decode.policies=[static]", "decode.options.sage.max_depth=12"], Config)
    assert config.decode.policies == ["static"] and config.decode.options["sage"]["max_depth"] == 12


def test_precision_follows_the_target() -> None:
    assert compose("config", ["target=qwen2_5_vl_7b"], Config).train.precision is Precision.bf16
    assert compose("config", [], Config).train.precision is Precision.fp32


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


def test_a_searched_sweep_maximises_the_score() -> None:
    optuna = OmegaConf.load(config_dir() / "sweep" / "optuna.yaml").hydra
    assert (optuna.mode, optuna.sweeper.direction, optuna.sweeper.max_failure_rate) == ("MULTIRUN", "maximize", 1.0)


def test_run_name_is_made_of_the_choices() -> None:
    assert compose("config", [], Config).run.dir == "runs/pocket_qwen2_5_vl-eagle3-pocket"
    assert compose("config", ["experiment=demo"], Config).run.dir == "runs/demo"


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["draft=eagle"], "pocket_qwen2_5_vl-eagle-pocket"),
        (["objective=lk"], "pocket_qwen2_5_vl-eagle3-pocket-lk"),
        (["draft=model", "objective=distill"], "pocket_qwen2_5_vl-model-pocket-distill"),
        (["data=messages", "data.path='/data/my rows, two.v2.jsonl'"], "pocket_qwen2_5_vl-eagle3-my_rows_two"),
        (["data=hub", "data.path=HuggingFaceM4/ChartQA"], "pocket_qwen2_5_vl-eagle3-ChartQA"),
        (["data=messages", f"data.path={'x' * 300}.jsonl"], f"pocket_qwen2_5_vl-eagle3-{'x' * 40}"),
        (["data=folder", "data.path=.."], "pocket_qwen2_5_vl-eagle3-data"),
        (["target=qwen2_5_vl_7b", "data=llava_instruct"], "qwen2_5_vl_7b-eagle3-llava_instruct"),
    ],
)
@pytest.mark.slow
def test_the_run_folder_tells_runs_apart_by_data_and_objective(overrides: list[str], name: str) -> None:
    config = compose("config", overrides, Config)
    assert (config.run.name, config.run.dir) == (name, f"runs/{name}")
    assert compose("config", [*overrides[:1], "run.dir=elsewhere"], Config).run.dir == "elsewhere"


@pytest.mark.slow
@pytest.mark.parametrize(("module", "script"), {"": "sage-train", ".validate": "sage-validate", ".data": "sage-data"}.items())
def test_commands_run_as_modules(tmp_path: Path, module: str, script: str) -> None:
    done = python("-m", f"train.cli{module}", "--help", cwd=tmp_path)
    assert done.returncode == 0 and script in done.stdout, done.stderr


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


def test_learning_rate_of_an_own_target_follows_its_width(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"hidden_size": 1792}}')
    assert compose("config", [f"target.path={tmp_path}"], Config).optim.lr == 1.6e-4


def test_kinds_of_draft_by_default() -> None:
    kinds = [compose("config", words, Config).draft.kind for words in ([], ["experiment=demo"], ["experiment=specvlm"])]
    assert kinds == ["eagle3", "eagle", "eagle"]
