"""Plans: published sizes, memory that matches a real engine's, the change that makes a run fit, nothing loaded or written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.compressor_helpers import COMPRESSORS
from support.models import make_qwen
from support.train_helpers import make_target

import sage
from sage.drafts.compressor.spans import Marks
from train.cli.train import train
from train.config.checks import check
from train.config.hydra_app import compose
from train.config.schema import Config, ConfigError
from train.plan.memory import Plan, draft_memory, estimate, find_change, plan
from train.plan.meta import build_on_meta, target_architecture
from train.plan.text import render

# Parameters in billions as the hub's safetensors say.
PUBLISHED = {
    "qwen2_5_vl_3b": 3.755,
    "qwen2_5_vl_7b": 8.292,
    "qwen2_5_vl_32b": 33.453,
    "qwen2_5_vl_72b": 73.411,
    "llava_onevision_0_5b": 0.894,
    "llava_onevision_7b": 8.03,
    "llava_onevision_72b": 73.2,
}


def configure(*overrides: str) -> Config:
    config: Config = compose("config", ["launch.plan=true", "data.path=/no/data", *overrides], Config)
    return config


def big(target: str, *overrides: str) -> Plan:
    return plan(configure(f"target={target}", "data=llava_instruct", *overrides))


@pytest.mark.parametrize(("target", "published"), PUBLISHED.items(), ids=PUBLISHED.keys())
def test_presets_have_their_published_sizes(target: str, published: float) -> None:
    pair = build_on_meta(configure(f"target={target}"))
    assert pair.target_parameters / 1e9 == pytest.approx(published, rel=0.01)
    assert 0 < pair.vision_parameters < 0.1 * max(pair.target_parameters, 10e9)
    assert all(p.is_meta for p in [*pair.target.model.parameters(), *pair.draft.parameters()])
    assert pair.draft.config.hidden_size == pair.target.hidden_size


def test_negative_control_another_width_is_another_size() -> None:
    architecture = target_architecture("Qwen/Qwen2.5-VL-3B-Instruct")
    architecture.text_config.intermediate_size *= 2
    from train.plan.meta import count, meta_target

    assert count(meta_target(architecture).model) / 1e9 != pytest.approx(PUBLISHED["qwen2_5_vl_3b"], rel=0.1)


@pytest.mark.parametrize(
    "draft", ["draft=eagle", "draft=eagle3 draft.draft_vocab_size=32000", "draft=model draft.num_layers=2"]
)
def test_every_kind_of_draft_is_counted(draft: str) -> None:
    made = build_on_meta(configure("target=qwen2_5_vl_7b", *draft.split()))
    assert 0 < made.trained_parameters <= made.draft_parameters < made.target_parameters
    if "model" in draft:
        assert made.trained_parameters < made.draft_parameters  # the pictures' tower stays as it is


@pytest.mark.slow
def test_a_planned_draft_is_the_one_that_is_built(tmp_path: Path) -> None:
    folder = make_target(tmp_path)
    planned = build_on_meta(configure(f"target.path={folder}"))
    draft = sage.new_draft(sage.load_target(folder), "eagle", seed=0)
    assert planned.draft_parameters == sum(p.numel() for p in draft.parameters())
    draft.save_pretrained(tmp_path / "draft")
    again = build_on_meta(configure(f"target.path={folder}", f"draft.path={tmp_path / 'draft'}"))
    assert again.draft_parameters == planned.draft_parameters
    (tmp_path / "draft" / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"draft: .*draft: cannot read its config\.json"):
        build_on_meta(configure(f"target.path={folder}", f"draft.path={tmp_path / 'draft'}"))
    (tmp_path / "draft" / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ConfigError, match="draft.path=.*config.json"):
        build_on_meta(configure(f"target.path={folder}", f"draft.path={tmp_path / 'draft'}"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (0, "bf16"), (1, "bf16"), (2, "fp32"), (2, "bf16"), (3, "bf16")])
def test_planned_weights_and_optimizer_are_the_engines(stage: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank, so nothing is divided: weights in the training precision, masters and both moments in float32."""
    from train.distill.build import new_student
    from train.engine.engine import Engine
    from train.launch.ranks import process_group

    monkeypatch.setenv("LOCAL_RANK", "0")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    config = configure(f"deepspeed=zero{stage}", f"train.precision={dtype}", f"target.dtype={dtype}", "launch.device=cpu")
    student = new_student(sage.new_draft(make_qwen(), "eagle", seed=0), config)
    parameters = sum(p.numel() for p in student.parameters())
    with process_group("cpu", 60) as ranks:
        engine = Engine(student, config, ranks, 1)
        try:
            optimizer = base_optimizer(engine._optimizer)
            weights = sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in engine.draft.parameters())
            moments = [v for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v) and v.dim()]
            own = {p.data_ptr() for p in engine.draft.parameters()}
            masters = [p for group in optimizer.param_groups for p in group["params"] if p.data_ptr() not in own]
            held = sum(v.numel() * v.element_size() for v in [*moments, *masters])
        finally:
            engine.close()
    planned = draft_memory(config, parameters, parameters, 1)
    assert planned["draft weights"] == weights
    if moments:  # allocated with the first step where DeepSpeed does not do it at the start
        assert planned["AdamW, masters"] == pytest.approx(held, rel=0.01)  # flat buffers are padded


def base_optimizer(wrapped: Any) -> Any:
    """The AdamW inside of DeepSpeed's wrappers."""
    while not isinstance(wrapped, torch.optim.Optimizer):
        wrapped = wrapped.optimizer
    return wrapped


def test_sharding_divides_what_the_stage_says() -> None:
    one, eight = ({s: draft_memory(configure(f"deepspeed=zero{s}"), 1000, 1000, r) for s in range(4)} for r in (1, 8))
    for stage in range(4):
        for part, first in (("AdamW, masters", 1), ("draft gradients", 2), ("draft weights", 3)):
            assert eight[stage][part] == one[stage][part] / (8 if stage >= first else 1), (stage, part)
    offloaded = draft_memory(configure("deepspeed.offload_optimizer=cpu"), 1000, 1000, 1)
    assert offloaded["AdamW, masters"] == 0.0


@pytest.mark.parametrize(
    ("kind", "steps", "mode"),
    [
        ("eagle", 1, None),
        ("eagle3", 1, None),
        ("eagle3", 3, None),
        *(("eagle", 1, mode) for mode in COMPRESSORS),
        ("eagle3", 2, "pool"),
    ],
)
def test_draft_activations_are_what_autograd_keeps(kind: str, steps: int, mode: str | None) -> None:
    """An estimate: within a quarter of the bytes that autograd holds on to, parameters not counted."""
    from train.plan.memory import draft_activations

    target = make_qwen()
    options: dict[str, Any] = {"feature_levels": [0, 1, 2]} if kind == "eagle3" else {}
    compressor = None if mode is None else COMPRESSORS[mode]
    draft = sage.new_draft(target, kind, seed=0, compressor=compressor, **options).train().requires_grad_(True)
    batch, length, visual, hidden = 2, 64, 32, target.hidden_size
    embeds, features = torch.randn(batch, length, hidden), torch.randn(batch, length, hidden)
    token = torch.arange(length + 1).expand(batch, -1)
    marks = Marks.of((token >= 8) & (token <= 8 + visual), token < 0, token > 50)
    own = {p.untyped_storage().data_ptr() for p in draft.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(value: torch.Tensor) -> torch.Tensor:
        if value.untyped_storage().data_ptr() not in own:
            kept[value.untyped_storage().data_ptr()] = value
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        fused = draft.fuse(sage.targets.Features(features, (features,) * len(draft.levels)))
        short = draft.shorten(embeds, fused, torch.arange(length).expand(3, batch, length), marks)
        outputs = draft.unroll(short.embeds_next, short.features, short.position_ids, steps, short.weight)
    assert len(outputs) == steps
    held = sum(value.untyped_storage().nbytes() for value in kept.values())
    config = configure(f"draft={kind}", f"objective.steps={steps}")
    made = Plan(config=config, ranks=1, accumulation=1, pair=type("Pair", (), {"target": target, "draft": draft})())
    assert draft_activations(made, batch, length, visual) == pytest.approx(held, rel=0.25)


@pytest.mark.parametrize("mode", COMPRESSORS)
def test_a_compressor_counts_the_rows_it_makes(mode: str) -> None:
    draft = sage.new_draft(make_qwen(), "eagle", seed=0, compressor=COMPRESSORS[mode])
    size = draft.config.hidden_size
    for length in (1, 5, 12):
        token = torch.arange(length + 4)[None]
        marks = Marks.of((token >= 1) & (token <= 1 + length), token < 0, token == length + 3)
        pairs = torch.randn(1, length + 3, size)
        short = draft.shorten(pairs, pairs, torch.arange(length + 3).expand(3, 1, -1), marks)
        rows = short.features.shape[1] - 3
        assert 0 <= rows <= draft.compressor.count(length), length
        assert rows == draft.compressor.count(length) or mode == "select"  # whose gate chooses among them


def test_a_7b_target_fits_on_eight_gpus_and_the_page_says_so() -> None:
    made = big("qwen2_5_vl_7b", "launch.gpus=8")
    text = render(made)
    assert made.fits and made.change is None
    assert "8.29 B   (676.6 M vision, 7.62 B text)" in text and "target weights, whole    16.58 GB" in text
    assert "128 sequences = 8 rank(s) x 4 x 4 accumulated" in text and "fits: " in text.splitlines()[-1]
    assert sum(made.memory.values()) == made.total < 80e9


def test_a_72b_target_is_told_to_spread_and_then_fits() -> None:
    made = big("qwen2_5_vl_72b", "launch.gpus=8")
    assert not made.fits and made.change == ["deepspeed.shard_target=true"]
    assert "it fits with deepspeed.shard_target=true" in render(made).splitlines()[-1]
    spread = big("qwen2_5_vl_72b", "launch.gpus=8", "deepspeed.shard_target=true")
    assert spread.fits and spread.gather_s > 0 and "gathering the sharded target" in render(spread)


@pytest.mark.parametrize("memory", [24, 30, 40, 60])
def test_the_change_that_is_named_makes_it_fit(memory: int) -> None:
    from train.plan.memory import _fits_with

    made = big("qwen2_5_vl_7b", f"launch.gpu_memory_gb={memory}", "train.micro_batch_size=32", "launch.gpus=2")
    assert not made.fits and made.change and _fits_with(made, made.change)


SMALLER = ["draft=model", "draft.num_layers=2", "train.global_batch_size=64"]


@pytest.mark.parametrize(
    ("target", "overrides", "never"),
    [
        ("qwen2_5_vl_7b", [*SMALLER, "launch.gpus=2"], {"deepspeed=zero3", "deepspeed.shard_target=true"}),
        ("qwen2_5_vl_7b", [*SMALLER, "draft.train_part=all", "deepspeed=zero0", "launch.gpus=2"], {"deepspeed=zero1"}),
        ("qwen2_5_vl_72b", ["launch.gpus=8", "train.validate_on=all"], {"deepspeed.shard_target=true"}),
    ],
)
@pytest.mark.parametrize("memory", [30, 40, 60, 80])
def test_no_change_is_named_that_would_be_refused(target: str, overrides: list[str], never: set[str], memory: int) -> None:
    made = big(target, *overrides, f"launch.gpu_memory_gb={memory}")
    assert not never & set(made.change or [])
    if made.change is not None:
        accepted = big(target, *overrides, f"launch.gpu_memory_gb={memory}", *made.change)
        check(accepted.config)
        assert accepted.fits


def test_what_may_not_be_combined_does_not_hide_what_helps() -> None:
    """All changes together are refused for this draft; a smaller micro-batch alone is enough."""
    made = big("qwen2_5_vl_7b", *SMALLER, "launch.gpus=2", "train.micro_batch_size=32", "launch.gpu_memory_gb=60")
    assert not made.fits and made.change is not None


def test_where_nothing_helps_that_is_said() -> None:
    made = big("qwen2_5_vl_72b", "launch.gpu_memory_gb=8")
    assert made.change is None and "no change of batch" in render(made).splitlines()[-1]


def test_more_of_anything_needs_more() -> None:
    config = configure("target=qwen2_5_vl_7b", "data=llava_instruct")
    pair = build_on_meta(config)
    base = estimate(config, pair, 1)
    for override in ("train.micro_batch_size=8", "data.max_length=8192", "objective.chunk_tokens=4096", "objective.steps=3"):
        more = configure("target=qwen2_5_vl_7b", "data=llava_instruct", override)
        assert estimate(more, pair, 1).total > base.total, override
    assert estimate(config, pair, 4).step_s == pytest.approx(base.step_s / 4)
    assert find_change(base) is not None  # a base that fits needs none, but asked it names the mildest


def test_steps_and_time_of_a_run_are_known_where_the_configuration_says() -> None:
    assert plan(configure("train.max_steps=7", "train.epochs=null")).steps == 7
    assert plan(configure("data.num_examples=1000", "train.epochs=2")).steps == 16
    assert big("qwen2_5_vl_7b").steps is None and "by the size of the data" in render(big("qwen2_5_vl_7b"))


def test_a_plan_writes_nothing_and_needs_no_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("seed: 1")
    assert train(configure("run.dir=run", "target=llava_onevision_7b", "data=llava_instruct")) == 0
    assert capsys.readouterr().out.startswith("plan: eagle draft for llava_onevision_7b on 1 GPU(s), ZeRO 2")
    assert [path.name for path in tmp_path.rglob("*")] == ["run", "config.yaml"]


def test_an_unknown_hub_id_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="target.path=nobody/nothing: cannot read its config.json"):
        target_architecture("nobody/nothing")


def test_heads_that_the_targets_key_and_value_heads_do_not_divide_are_no_plan() -> None:
    with pytest.raises(ValueError, match="draft.num_attention_heads=3: allowed: a multiple of draft.num_key_value_heads=4"):
        big("qwen2_5_vl_7b", "draft.num_attention_heads=3")
