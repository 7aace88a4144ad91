"""The time of a plan: operations by part, gathering, padding of the data, validations; formulas in docs/plan.md."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from support.plans import big, configure

from train.config.schema import ShardOver
from train.config.sharding import sharding_ranks, validation_line
from train.plan.balance import balance_of
from train.plan.estimate import estimate
from train.plan.meta import build_on_meta
from train.plan.search import plan
from train.plan.text import render


def test_muon_adds_its_matrices_to_the_update() -> None:
    """An EAGLE head for 7B, of hidden size 3584: q, o; k, v; fc; the MLP. 8 ranks of a node."""
    sides = [3584, 3584, 512, 512, 7168, *[18944] * 3]
    numbers = [(min(3584, side), max(3584, side)) for side in sides]
    received = 2 * 4 * sum(m * n for m, n in numbers) * 7 / 8 / 100e9
    flops = sum(5 * (4 * m**2 * n + 2 * m**3) for m, n in numbers)
    adamw, muon = (big("qwen2_5_vl_7b", "draft=eagle", "launch.gpus=8", f"optim={name}") for name in ("adamw", "muon"))
    added = muon.update_s - adamw.update_s
    assert added == pytest.approx(received + flops / 8 / muon.flops_per_s, rel=1e-6)


@dataclass(frozen=True, kw_only=True)
class Documented:
    """A documented plan with an EAGLE-3 draft in bf16, ZeRO 2, and the formulas of docs/plan.md, from published sizes."""

    words: str
    R: int
    b: int
    D: int
    L: int
    i: int
    heads: int
    kv: int
    vision_mlp: int
    U: int
    g: int
    B, T, v, m, K, C, F, W, V, DEPTH, VISION = 128, 4096, 0.5, 4, 7, 4096, 700e12, 2.7e12, 152064, 32, 1280

    @property
    def nodes(self) -> int:
        return -(-self.R // 8)

    @property
    def accumulation(self) -> float:
        return self.B / self.b / self.R

    @property
    def parameters(self) -> dict[str, int]:
        """Of the vision tower, a text layer, the draft without and with its lm_head, and of all together."""
        D, wide, values, mlp = self.D, self.VISION, 3 * 2 * 14 * 14, self.vision_mlp
        merged = 4 * wide
        layer = 4 * wide**2 + 4 * wide + 2 * wide + 3 * wide * mlp + 2 * mlp + wide
        vision = values * wide + self.DEPTH * layer + wide + merged**2 + merged + merged * D + D
        q, k = 128 * self.heads, 128 * self.kv
        text = D * (q + 2 * k) + q + 2 * k + q * D + 3 * D * self.i + 2 * D
        draft = 3 * D * D + 2 * D * (q + 2 * k) + q * D + 3 * D * self.i + 4 * D
        return {"vision": vision, "layer": text, "text": self.L * text + D, "draft": draft, "all": draft + self.U * D}

    def step(self) -> dict[str, tuple[float, float, float]]:
        """Operations, bytes and seconds of each part."""
        D, tokens, P, v, K = self.D, self.B * self.T, self.parameters, self.v, self.K
        h, rows, logits = 128 * (self.heads + self.kv), tokens * (1 + 6 * 0.5), tokens * v
        fused, single = 20 * D + 4 * h + 6 * self.i, 72 * D + 12 * D + 20 * h + 10 * self.i
        layer = single if self.nodes > 1 else fused  # layers of a sharded target are not compiled
        chunks = -(-self.b * self.T * v * K // self.C)
        found = {
            "vision": (
                2 * P["vision"] * tokens * v * self.m,
                (20 * self.VISION + 4 * 2 * self.VISION + 6 * self.vision_mlp) * self.DEPTH * tokens * v * self.m,
            ),
            "text": (
                (2 * P["text"] + 2 * self.T * D * self.L) * tokens,
                layer * self.L * tokens,
            ),
            "draft": (2 * P["draft"] * rows * 3, fused * rows * 3),
            "objective": (
                2 * self.U * D * logits * (1 + 3 * K),
                self.U * logits * (46 + 68 * K) + 8 * self.U * D * self.B / self.b * chunks,
            ),
        }
        return {part: (flop, moved, (flop / self.F + moved / self.W) / self.R) for part, (flop, moved) in found.items()}

    def waiting(self) -> tuple[float, float]:
        """Seconds of a step for gathering and for the update."""
        P, A, text_s = self.parameters, self.accumulation, self.step()["text"][2]
        size, n = self.L * P["layer"] * 2, -(-self.g // 8)
        t = max(size * (self.g - 1) / self.g / 100e9, size * (n - 1) / n / 50e9)
        gathering = A * (t / self.L + (self.L - 1) / self.L * max(0, t - text_s / A)) if self.nodes > 1 else 0.0
        X, nodes = P["all"] * (4 * A + 2), self.nodes
        sent = max(X * (self.R - 1) / self.R / 100e9, X * (nodes - 1) / nodes / 50e9)
        return gathering, sent + 28 * P["all"] / self.W / self.R

    def memory(self) -> dict[str, float]:
        D, P, U, K, M = self.D, self.parameters, self.U, self.K, self.b * self.T
        h, layers = 128 * (self.heads + self.kv), self.L * P["layer"]
        target = P["vision"] + P["text"] + 2 * self.V * D
        whole = {"target weights": target * 2}
        shares = {
            "target, not sharded": (target - layers) * 2,
            f"target layers, 1/{self.g}": layers * 2 / self.g,
            "target layers gathered": 2 * layers * 2 / self.L,
        }
        vision = M * self.v * self.m * 2 * (1176 + 3 * (self.VISION + self.vision_mlp))
        draft = self.b * 2 * (3 * self.T * D + self.T * K * (7 * D + 4 * self.i + 3 * h))
        activations = M * 2 * D * 5 + max(3 * M * 2 * (D + self.i), vision, draft)
        rows = min(self.C, K * M * self.v)
        objective = U * rows * (1 + 1 / K) * 2 + 24 * min(2**24, U * rows) + 15 * M * self.v * D * 2 + 6 * U * D
        return {
            **(shares if self.nodes > 1 else whole),
            "draft weights": P["all"] * 2,
            "draft gradients": 4 * P["all"] / self.R,
            "optimizer, masters": 12 * P["all"] / self.R,
            "gradient buckets": 2 * 5e8 + 4 * min(5e8, P["all"]),
            "activations": activations,
            "objective": objective,
            "fragmentation": (activations + objective) / 10,
            "CUDA context, NCCL": 1.5e9,
        }


EIGHT = Documented(
    words="experiment=eagle3 launch.gpus=8 data.num_examples=665000",
    R=8, b=4, D=3584, L=28, i=18944, heads=28, kv=4, vision_mlp=3420, U=32000, g=8,
)  # fmt: skip
THIRTY_TWO = Documented(
    words="target=qwen2_5_vl_72b data=llava_instruct launch.gpus=32 deepspeed.shard_target=true train.micro_batch_size=2",
    R=32, b=2, D=8192, L=80, i=29568, heads=64, kv=8, vision_mlp=3456, U=152064, g=8,
)  # fmt: skip


@pytest.mark.parametrize("documented", [EIGHT, THIRTY_TWO], ids=["7b", "72b"])
def test_every_figure_of_the_documented_plans_follows_from_the_formulas(documented: Documented) -> None:
    """And a step takes at most 1.5 times its floor, the operations of matrix products."""
    found = plan(configure("draft=eagle3", *documented.words.split()))
    step, (gathering, update) = documented.step(), documented.waiting()
    assert found.memory == pytest.approx(documented.memory(), rel=1e-9)
    assert {part: (found.flops[part], found.traffic[part], found.part_s(part)) for part in step} == {
        part: pytest.approx(figures, rel=1e-9) for part, figures in step.items()
    }
    assert (found.gather_s, found.update_s) == pytest.approx((gathering, update))
    total = sum(seconds for *_, seconds in step.values()) + gathering + update
    floor = sum(flop for flop, *_ in step.values()) / documented.F / documented.R
    assert found.step_s == pytest.approx(total) and total <= 1.5 * floor
    lines = [*documented.memory().items(), ("total", sum(documented.memory().values()))]
    text = re.sub(" +", " ", render(found))
    for name, amount in lines:
        assert f" {name} {amount / 1e9:.2f} GB" in text
    for part, (flop, moved, seconds) in step.items():
        time = f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"
        assert f" {part} {flop / 1e12:,.0f} TFLOP, {moved / 1e9:,.0f} GB: {time} ({seconds / total:.0%})\n" in text
    assert f" update {1e3 * update:.1f} ms " in text
    assert (f" gathering {1e3 * gathering:.1f} ms " in text) == (gathering > 0)
    assert f" time at most {total:.1f} s, {total / floor:.2f} times the floor\n" in text
    assert f" floor {floor:.1f} s at 700 TFLOP/s" in text
    assert f" speed {documented.B * documented.T / total / documented.R:,.0f} tokens/s per GPU\n" in text


def test_validations_follow_from_the_formulas() -> None:
    """Those of docs/plan.md, with the sizes of Qwen2.5-VL-7B; the draft has no lm_head of its own."""
    found = big("qwen2_5_vl_7b", "launch.gpus=8", "data.max_length=2048", "objective.steps=2", "decode.baselines=[hf_generate]")
    tokens, hidden, vocabulary = 128 * 2048, 3584, 152064
    text = EIGHT.parameters["text"]
    assert found.models.text_parameters == text and found.models.read_parameters == text + vocabulary * hidden
    assert found.flops["draft"] == 2 * found.models.draft_parameters * tokens * 1.5 * 3
    assert found.flops["objective"] == 2 * vocabulary * hidden * tokens * 0.5 * (1 + 2 * 2)
    read_s, forward_s = found.models.read_parameters * 2 / 2.7e12, (found.part_s("vision") + found.part_s("text")) * 8 / 128

    def answers_s(passes: int) -> float:
        drafted = 4 * passes / 3 * 1.3 * read_s
        return 6 * forward_s + passes * (read_s + max(read_s, 28 * 60 * 6e-6)) + drafted

    assert found.validation_s == pytest.approx(4 * answers_s(255) + answers_s(31))  # 32 prompts on 8 ranks, and the warm-up


@pytest.mark.parametrize(
    ("layer_gb", "per_node", "over", "expected"),
    [
        (140, 8, "auto", 8),
        (170, 8, "auto", 32),
        (170, 8, "node", 8),
        (140, 8, "world", 32),
        (1, 1, "auto", 32),
        (1, 5, "auto", 32),
    ],
)
def test_a_target_is_sharded_over_the_ranks_of_a_node_where_its_part_fits(
    layer_gb: float, per_node: int, over: str, expected: int
) -> None:
    config = configure("deepspeed.shard_target=true", f"deepspeed.shard_over={over}")
    assert sharding_ranks(config, layer_gb * 1e9, 32, per_node) == expected


def test_layers_sharded_within_nodes_are_not_sent_over_the_network() -> None:
    config = configure("target=qwen2_5_vl_72b", "deepspeed.shard_target=true", "train.micro_batch_size=2")
    models = build_on_meta(config)
    config.deepspeed.shard_over = ShardOver.node
    node = estimate(config, models, 32)
    config.deepspeed.shard_over = ShardOver.world
    world = estimate(config, models, 32)
    layers = models.layers_parameters * 2
    assert node.memory["target layers, 1/8"] == layers / 8 and world.memory["target layers, 1/32"] == layers / 32
    for found, t in ((node, layers * 7 / 8 / 100e9), (world, layers * 3 / 4 / 50e9)):
        rest = max(0, t - found.part_s("text") / 2)
        assert found.gather_s == pytest.approx(2 * (t / 80 + rest * 79 / 80))


def test_validations_that_take_more_than_a_tenth_of_a_run_are_warned_about() -> None:
    words = ["launch.gpus=8", "deepspeed.shard_target=true", "train.max_steps=400", "train.validate_every=150"]
    words += ["decode.num_prompts=32", "decode.policies=[autoregressive,static,sage]"]
    found = big("qwen2_5_vl_72b", *words)
    assert found.num_validations == 3 and found.validation_share is not None and found.validation_share > 0.1
    smaller = found.smaller_validation()
    assert smaller is not None and f"warning: more than a tenth; {' '.join(smaller[0])} takes" in render(found)
    again = big("qwen2_5_vl_72b", *words, *smaller[0])
    assert again.validation_share is not None and again.validation_share <= 0.1 and again.smaller_validation() is None
    assert again.validation_s == pytest.approx(smaller[1])


def test_a_plan_of_seconds_on_a_machine_without_a_gpu() -> None:
    found = big("pocket_qwen2_5_vl", "data=pocket", "train.max_steps=20", "decode.num_prompts=4")
    text = render(found)
    assert found.validation_share is not None and found.validation_share > 0.1 and "warning" not in text
    assert "GFLOP, " in text and " 0 TFLOP" not in text
    assert text.splitlines()[1].startswith("this machine has no GPU") == (not torch.cuda.is_available())


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
