"""The time of a plan: operations by part, gathering, padding of the data, validations; formulas in docs/plan.md."""

import re
from pathlib import Path

import numpy as np
import pytest
from support.train_helpers import big, configure

from train.config.derived import sharding_ranks, validation_line
from train.plan.data import balance_of
from train.plan.estimate import LaunchPlan, plan
from train.plan.memory import build_on_meta
from train.plan.text import render

ROOT = Path(__file__).parents[2]
PLAN = r"<!-- plan: (.*?) -->\n```text\n(.*?)\n```"


def documented_plans() -> dict[str, str]:
    """Returns the plans of docs/training.md and plans.md, by the words that print them."""
    pages = [ROOT / "docs" / "training.md", Path(__file__).with_name("plans.md")]
    return {words: text for page in pages for words, text in re.findall(PLAN, page.read_text(), re.DOTALL)}


@pytest.mark.parametrize("words", documented_plans())
def test_a_documented_plan_is_what_is_printed(words: str) -> None:
    """Every figure; those of 7B and 72B were derived by hand from the formulas in docs/plan.md and published sizes."""
    assert len(documented_plans()) == 3
    found = plan(configure("draft=eagle3", *words.split()))
    assert render(found) == documented_plans()[words]
    assert found.floor_s < found.step_s <= 1.5 * found.floor_s
    assert found.step_s == pytest.approx(sum(found.parts_s.values()) + found.gather_s + found.update_s)


@pytest.mark.parametrize(
    ("layer_gb", "per_node", "over", "expected"),
    [
        (140, 8, "auto", 8),
        (170, 8, "auto", 32),
        (170, 8, "node", 8),
        (1, 1, "auto", 32),
    ],
)
def test_a_target_is_sharded_over_the_ranks_of_a_node_where_its_part_fits(layer_gb, per_node, over, expected):
    config = configure("deepspeed.shard_target=true", f"deepspeed.shard_over={over}")
    assert sharding_ranks(config, layer_gb * 1e9, 32, per_node) == expected


def test_layers_sharded_within_nodes_are_not_sent_over_the_network() -> None:
    words = ("target=qwen2_5_vl_72b", "deepspeed.shard_target=true", "train.micro_batch_size=2")
    configs = [configure(*words, f"deepspeed.shard_over={over}") for over in ("node", "world")]
    models = build_on_meta(configs[0])
    node, world = (LaunchPlan(config=config, models=models, ranks=32) for config in configs)
    layers = models.layers_parameters * 2
    assert node.memory["target layers, 1/8"] == layers / 8 and world.memory["target layers, 1/32"] == layers / 32
    assert world.gather_s > 1.5 * node.gather_s, "most of them cross the network"


def test_validations_that_take_more_than_a_tenth_of_a_run_are_warned_about() -> None:
    words = ["launch.gpus=8", "deepspeed.shard_target=true", "train.max_steps=400", "train.validate_every=150"]
    words += ["decode.num_prompts=32", "decode.policies=[autoregressive,static,sage]"]
    found = big("qwen2_5_vl_72b", *words)
    assert found.num_validations == 3 and found.validation_share is not None and found.validation_share > 0.1
    smaller = found.smaller_validation()
    assert smaller is not None and f"warning: more than a tenth; {' '.join(smaller[0])} takes" in render(found)
    limit_s = int(found.validation_s)  # ranks wait while rank 0 validates
    found.config.launch.timeout_s = limit_s + 1
    assert "launch.timeout_s" not in render(found)
    found.config.launch.timeout_s = limit_s - 1
    assert f"one validation longer than launch.timeout_s={limit_s - 1}; give {2 * limit_s + 2}" in render(found)
    again = big("qwen2_5_vl_72b", *words, *smaller[0])
    assert again.validation_share is not None and again.validation_share <= 0.1 and again.smaller_validation() is None
    assert again.validation_s == pytest.approx(smaller[1])


def test_a_sharded_target_is_validated_briefly_unless_more_is_asked_for() -> None:
    whole, sharded = configure(), configure("deepspeed.shard_target=true")
    assert len(whole.decode.policies) == 5 and whole.decode.num_prompts == 32 and validation_line(whole) == ""
    decode = sharded.decode
    assert (decode.policies, decode.baselines, decode.num_prompts, decode.max_new_tokens) == (["sage"], [], 4, 64)
    assert "sage on 4 prompt(s) of at most 64 tokens" in validation_line(sharded)
    asked = {"policies": "[chain]", "baselines": "[hf_generate]", "num_prompts": "9", "max_new_tokens": "100"}
    for key, value in asked.items():
        decode = configure("deepspeed.shard_target=true", f"decode.{key}={value}").decode
        assert ",".join(getattr(decode, key) if value.startswith("[") else [str(getattr(decode, key))]) == value.strip("[]")
        assert (decode.num_prompts == 4) == (key != "num_prompts")


def test_padding_and_balance_of_the_data() -> None:
    """Steps of 4 sequences on 2 ranks: equal lengths pad nothing, grouped ones less, a sharded target waits more."""
    config = configure("train.global_batch_size=4", "train.micro_batch_size=1", "data.max_length=50", "data.cache=rows")
    even = balance_of(np.array([80]), config, 2)
    assert (even.mean_tokens, even.real_share, even.efficiency) == (50, 1, 1)
    lengths = np.array([10, 20, 40])
    grouped = balance_of(lengths, config, 2)
    config.train.length_window = 1
    one = balance_of(lengths, config, 2)
    config.deepspeed.shard_target = True
    sharded = balance_of(lengths, config, 2)
    assert one.real_share == sharded.real_share == 1 and one.mean_tokens == grouped.mean_tokens
    assert sharded.efficiency <= one.efficiency < grouped.efficiency < 1
    config.train.micro_batch_tokens = 80
    budget = balance_of(lengths, config, 2)
    assert budget.real_share < 1 and budget.efficiency > 0.5
    config.train.micro_batch_tokens = None
    config.train.micro_batch_size, config.train.length_window = 2, 1
    assert balance_of(lengths, config, 2).real_share < 1
