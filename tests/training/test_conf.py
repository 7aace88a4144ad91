"""Every YAML file composes and passes the checks; choices, presets and defaults are as documented, each number has a range."""

import dataclasses
import math
import re
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from data_prep.real import target_folder
from sage.drafts.registry import KINDS as DRAFT_KINDS
from sage.io.files import config_dir
from sage.io.ranges import field_types, plain_type
from train.config.checks import check, check_ranges
from train.config.derived import check_batch
from train.config.hydra_app import compose
from train.config.schema import Config, ConfigError, Precision
from train.config.store import run_name
from train.engine.engine import deepspeed_config, make_optimizer
from train.job.schedule import learning_rate
from train.monitor.sinks import check_tracking
from train.plan.memory import build_on_meta
from train.validation.validate import build_policies


def choices(group: str) -> list[str]:
    """`group=NAME` for every file of a group."""
    return [f"{group}={path.stem}" for path in sorted((config_dir() / group).glob("*.yaml"))]


NEEDS = {  # keys that a choice requires
    "target=by_path": ["target.path=Qwen/Qwen2.5-VL-7B-Instruct"],
    "draft=model": ["draft.num_layers=2"],
    "data=llava_instruct": ["data.path=/data/llava.json"],
    "objective=distill": ["draft=eagle"],  # a loss on features, which eagle3 does not predict
    "experiment=specvlm": ["data.path=/data/llava.json"],
}
# Those with an architecture are composed and built by test_plan.py.
TARGETS = [
    choice
    for choice in choices("target")
    if "\narchitecture:" not in (config_dir() / f"{choice.replace('=', '/')}.yaml").read_text()
]
KINDS = [f"draft={kind}" for kind in DRAFT_KINDS]  # with the objective of the same name
OBJECTIVES = [choice for choice in choices("objective") if choice.replace("objective", "draft") not in KINDS]
GROUPS = ("data", "deepspeed", "optim", "tracking", "train", "decode", "launch")
COLUMNS = [choices("draft/compressor") + KINDS + OBJECTIVES, TARGETS, *map(choices, GROUPS)]
ROWS = [[choice for choice in row if choice] for row in zip_longest(*COLUMNS)]  # a choice of every group at a time
ROWS += [[choice] for choice in choices("experiment")]


@pytest.fixture(scope="module", autouse=True)
def real_target() -> None:
    """The configuration of the target that `python -m data_prep.real` builds in the user's cache folder."""
    LlamaConfig(vocab_size=9000, hidden_size=32, num_hidden_layers=8).save_pretrained(target_folder())


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_every_choice_composes_validates_and_builds(row: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device; a plan needs no data."""
    monkeypatch.setenv("WANDB_MODE", "offline")  # tests have no login
    needed = [key for choice in row for key in NEEDS.get(choice, [])]
    config = compose("config", ["launch.plan=true", *row, *needed], Config)
    check(config)
    stage = deepspeed_config(config, 1, check_batch(config, 1))["zero_optimization"]["stage"]
    assert stage == max(config.deepspeed.stage, config.train.precision is Precision.bf16)
    assert config.objective.ce_weight + config.objective.tv_weight + config.objective.lk_weight > 0
    assert learning_rate(config.optim, 0, 100) > 0
    check_tracking(config)
    pair = build_on_meta(config)
    assert pair.trained_parameters > 0
    optimizer = make_optimizer(pair.draft.network, config, torch.device("meta"))
    assert optimizer.param_groups[0]["betas"] == (config.optim.beta1, config.optim.beta2)
    assert build_policies(config.decode)


@pytest.mark.parametrize(
    ("draft", "path", "data", "objective", "name"),
    [
        ("eagle", None, "pocket", "eagle", "T-eagle-pocket"),
        ("eagle3", "/data/my rows, two.v2.jsonl", "messages", "eagle3", "T-eagle3-my_rows_two"),
        ("eagle3", f"{'x' * 300}.jsonl", "messages", "", f"T-eagle3-{'x' * 40}"),
        ("eagle3", "..", "folder", "", "T-eagle3-data"),
    ],
)
def test_the_name_tells_runs_apart_by_data_and_objective(draft, path, data, objective, name):
    assert run_name("T", draft, path, data, objective) == name


@pytest.mark.parametrize(
    ("words", "lr", "batch", "max_length", "micro_batch"),
    [
        (["target=pocket_qwen2_5_vl"], 8e-3, 16, None, None),
        (["target=qwen2_5_vl_7b"], 8e-5, 128, 18_432, 1),  # a photo of 4000 x 3000: 15,301 tokens
        (["target=llava_onevision_0_5b"], None, None, 8_192, 2),  # 1920 x 1080: 7,269 tokens
        (["target=qwen2_5_vl_7b", "data.max_length=4096", "optim=adamw_cosine", "optim.lr=1e-3"], 1e-3, 128, 4_096, 4),
        (["target.path=Own/Model"], 8e-5, 128, 4_096, 4),  # a hub id: its width and its images are unknown
    ],
)
def test_training_defaults_suit_the_target_and_its_images(words, lr, batch, max_length, micro_batch):
    config = compose("config", ["data=messages", *words], Config)
    found = (config.optim.lr, config.train.global_batch_size, config.data.max_length, config.train.micro_batch_size)
    for value, expected in zip(found, (lr, batch, max_length, micro_batch), strict=True):
        assert expected in (None, value)


def numeric_keys(settings: Any, key: str = "") -> Iterator[tuple[Any, str, str]]:
    """Yields the owner, name and key of every number of a configuration."""
    for field in dataclasses.fields(settings):
        value, name = getattr(settings, field.name), f"{key}{field.name}"
        for label, part in value.items() if isinstance(value, dict) else [("", value)]:
            if dataclasses.is_dataclass(part):
                yield from numeric_keys(part, f"{name}.{label}." if label else f"{name}.")
        if plain_type(field_types(type(settings))[field.name]) in (int, float):
            yield settings, field.name, name


def test_every_number_of_a_composed_configuration_is_checked() -> None:
    config = compose("config", ["draft/compressor=select"], Config)
    found = list(numeric_keys(config))
    assert len(found) > 60
    for owner, name, key in found:
        before = getattr(owner, name)
        setattr(owner, name, math.nan)
        with pytest.raises(ConfigError, match=f"^{re.escape(key)}=nan: not allowed; give a"):
            check_ranges(config)
        setattr(owner, name, before)
    check_ranges(config)
