"""Plans: published sizes, memory compared with a real engine, the change that makes a run fit; no file is read or written."""

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.compressor_helpers import COMPRESSORS
from support.models import EAGLE_3_1, make_qwen
from support.train_helpers import big, configure

import sage
from data_prep.config import DataConfig
from data_prep.dataset.dataset import Preparation
from sage.drafts.spans import PairMasks
from train.cli.train import train
from train.config.checks import check
from train.config.hydra_app import compose
from train.config.schema import Config, Offload
from train.engine.optimizers import matrices_of
from train.plan.data import DataPlan, extent_of
from train.plan.estimate import LaunchPlan
from train.plan.memory import BLOCK_BYTES, WORKING, Extent, build_on_meta, draft_activations, draft_memory
from train.plan.text import gigabytes, render

ROOT = Path(__file__).parents[2]
PRESETS = sorted(path.stem for path in (ROOT / "conf/target").glob("*.yaml") if "architecture:" in path.read_text())


@pytest.mark.parametrize("target", PRESETS)
@pytest.mark.slow
def test_presets_have_their_published_sizes(target: str) -> None:
    config = configure(f"target={target}")
    models = build_on_meta(config)
    assert models.target_parameters / 1e9 == pytest.approx(config.target.parameters_b, rel=0.01)
    has_vision = bool(models.target.family.placeholders)
    assert has_vision <= (0 < models.vision_parameters < 0.15 * max(models.target_parameters, 10e9))
    assert all(p.is_meta for p in [*models.target.model.parameters(), *models.draft.network.parameters()])
    assert models.draft.network.config.hidden_size == models.target.hidden_size


@pytest.mark.slow
def test_a_planned_draft_has_the_parameters_of_the_real_one(target: Path, tmp_path: Path) -> None:
    planned = build_on_meta(configure(f"target.path={target}"))
    draft = sage.new_draft(sage.load_target(target), "eagle", seed=0)
    assert planned.draft_parameters == sum(p.numel() for p in draft.parameters())
    draft.save_pretrained(tmp_path / "draft")
    again = build_on_meta(configure(f"target.path={target}", f"draft.path={tmp_path / 'draft'}"))
    assert again.draft_parameters == planned.draft_parameters


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "dtype", "optimizer"),
    [
        *((0, "fp32", "adamw"), (1, "bf16", "adamw"), (3, "bf16", "adamw"), (1, "bf16", "muon")),
    ],
)
def test_planned_weights_and_optimizer_states_match_the_engine(stage: int, dtype: str, optimizer: str, alone: None) -> None:
    """On one rank, without sharding: weights in the training precision, master weights and moments in float32."""
    from train.distill.build import new_student
    from train.engine.engine import Engine
    from train.launch.ranks import process_group

    same = f"train.precision={dtype}", f"target.dtype={dtype}", "launch.device=cpu"
    config = configure(f"deepspeed=zero{stage}", f"optim={optimizer}", *same)
    student = new_student(sage.new_draft(make_qwen(), "eagle", seed=0), config)
    parameters = sum(p.numel() for p in student.parameters())
    with process_group("cpu", 60) as ranks:
        engine = Engine(student, config, ranks, 1)
        try:
            base = base_optimizer(engine._optimizer)
            weights = sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in engine.draft.parameters())
            moments = [v for state in base.state.values() for v in state.values() if torch.is_tensor(v) and v.dim()]
            own = {p.data_ptr() for p in engine.draft.parameters()}
            masters = [p for group in base.param_groups for p in group["params"] if p.data_ptr() not in own]
            held = sum(v.numel() * v.element_size() for v in [*moments, *masters])
        finally:
            engine.close()
    matrices = sum(matrix.numel() for matrix in matrices_of(student.draft)) if optimizer == "muon" else 0
    planned = draft_memory(config, parameters, parameters, 1, matrices)
    assert moments or optimizer == "adamw"
    assert planned["draft weights"] == weights
    assert planned["gradient buckets"] <= 8 * parameters  # not the 500 million elements that a GPU would hold
    if moments:  # DeepSpeed may allocate them in the first step only
        assert planned["optimizer, masters"] == pytest.approx(held, rel=0.01)  # flat buffers are padded


def base_optimizer(wrapped: Any) -> Any:
    """Returns the AdamW inside DeepSpeed's wrappers."""
    while not isinstance(wrapped, torch.optim.Optimizer):
        wrapped = wrapped.optimizer
    return wrapped


def test_each_stage_shards_its_components() -> None:
    config = configure()
    for stage in range(4):
        config.deepspeed.stage = stage
        one, eight = (draft_memory(config, 1000, 1000, ranks) for ranks in (1, 8))
        for part, first in (("optimizer, masters", 1), ("draft gradients", 2), ("draft weights", 3)):
            assert eight[part] == one[part] / (8 if stage >= first else 1), (stage, part)
    config.deepspeed.offload_optimizer = Offload.cpu
    assert draft_memory(config, 1000, 1000, 1)["optimizer, masters"] == 0.0


@pytest.mark.parametrize(
    ("kind", "steps", "mode", "num_roots", "dtype"),
    [
        ("eagle", 1, None, 64, torch.float32),
        ("eagle3", 1, None, 64, torch.float32),
        *(("eagle3", 7, None, roots, dtype) for roots in (64, 32) for dtype in (torch.float32, torch.bfloat16)),
        *(("eagle", 1, mode, 64, torch.float32) for mode in COMPRESSORS),
        ("eagle3", 2, "pool", 64, torch.float32),
        ("eagle3.1", 1, None, 64, torch.float32),
    ],
)
def test_draft_activations_are_close_to_the_memory_saved_by_autograd(kind, steps, mode, num_roots, dtype):
    """The estimate is within a quarter of the bytes that autograd saves, excluding parameters."""
    target, norms = make_qwen(), EAGLE_3_1 if kind == "eagle3.1" else {}
    kind = kind.removesuffix(".1")
    options: dict[str, Any] = {"feature_levels": [0, 1, 2], **norms} if kind == "eagle3" else {}
    compressor = None if mode is None else COMPRESSORS[mode]
    draft = sage.new_draft(target, kind, seed=0, compressor=compressor, **options).train().requires_grad_(True)
    draft = draft.to(dtype)
    batch, length, visual, hidden = 2, 64, 32, target.hidden_size
    embeds, features = torch.randn(2, batch, length, hidden, dtype=dtype)
    roots = None if num_roots == length else torch.arange(num_roots).expand(batch, -1)
    token = torch.arange(length + 1).expand(batch, -1)
    pair_masks = PairMasks.of((token >= 8) & (token <= 8 + visual), token < 0, token > 50)
    own = {p.untyped_storage().data_ptr() for p in draft.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(value: torch.Tensor) -> torch.Tensor:
        if value.untyped_storage().data_ptr() not in own:
            kept[value.untyped_storage().data_ptr()] = value
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        fused = draft.fuse(sage.targets.Features(features, (features,) * len(draft.levels)))
        short = draft.shorten(embeds, fused, torch.arange(length).expand(3, batch, length), pair_masks)
        outputs = draft.unroll(short, steps, roots)
    assert len(outputs) == steps
    held = sum(value.untyped_storage().nbytes() for value in kept.values())
    precision = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    config = configure(f"draft={kind}", f"objective.steps={steps}", f"train.precision={precision}")
    assert draft_activations(config, draft, batch, length, visual, num_roots) == pytest.approx(held, rel=0.25)


def test_the_verdict_says_what_is_tight_dropped_or_refused() -> None:
    found = big("llava_onevision_0_5b", "deepspeed.bucket_elements=1000000")
    assert render(found).splitlines()[-1].startswith("fits: ")
    found.config.launch.gpu_memory_gb = found.total_bytes / 0.96e9
    data = DataPlan(10, [], preparation=Preparation(image_s=0.05, images=1.0), dropped_share=0.1)
    text = render(replace(found, data=data))
    tight, dropped = text.splitlines()[-2:]
    assert tight.startswith(f"tight: {gigabytes(found.limit_bytes - found.total_bytes).strip()} to spare, less than 5%")
    assert dropped == "10% of the examples are dropped (data.max_length)"
    assert re.search(r"\n  images +50 ms of a core of this machine each, \d+% of the time of \d worker\(s\) per rank", text)
    assert "\nrefused: drops 30%" in render(replace(found, data=replace(data, refusal="drops 30%")))


def test_a_validation_may_take_more_memory_than_a_step() -> None:
    found = big("llava_onevision_0_5b", "train.micro_batch_size=1", "data.max_length=256")
    states = sum(found.memory.values()) - sum(found.memory[part] for part in WORKING)
    assert found.total_bytes == states + found.validation_bytes > sum(found.memory.values())
    long = big("llava_onevision_0_5b", "train.micro_batch_size=1", "data.max_length=8192")
    assert long.total_bytes == sum(long.memory.values()) and long.validation_bytes > 3 * found.validation_bytes / 2


def test_a_compressor_is_planned_with_what_it_saves() -> None:
    """By hand: 258.7 M of 6.53 B parameters, for 13,619 of the 16,384 tokens of the longest example."""
    overrides = ["draft=eagle", "data.max_length=16384"]
    assert "compressor" not in render(big("qwen2_5_vl_7b", *overrides))
    text = render(big("qwen2_5_vl_7b", *overrides, "draft/compressor=pool"))
    assert re.search(
        r"\n  compressor +14,336 visual tokens of the draft become 717: at most 3.3% of a prefill\n +warning: ", text
    )


def test_a_trained_lm_head_of_a_large_vocabulary_is_planned_with_32000_tokens() -> None:
    """Their rows of the target's lm_head are copied: 2,048 values of 2 bytes each."""
    found, whole = (big("qwen2_5_vl_3b", "draft=eagle3", *words) for words in ([], ["draft.draft_vocab_size=0"]))
    assert found.memory["lm_head, draft's rows"] == 32_000 * 2048 * 2 and not whole.memory["lm_head, draft's rows"]
    assert whole.models.draft_parameters - found.models.draft_parameters == (151_936 - 32_000) * 2048


def test_the_objective_has_smaller_blocks_on_a_cpu() -> None:
    found, cpu = (big("llava_onevision_0_5b", f"launch.device={device}").memory["objective"] for device in ("cuda", "cpu"))
    assert found - cpu == (2**24 - 2**20) * BLOCK_BYTES


def test_the_longest_example_of_the_data_is_planned() -> None:
    lengths = np.array([[900, 700, 500], [1000, 950, 900], [800, 200, 50]])
    extent = extent_of(lengths, DataConfig(max_length=960), has_images=True)
    assert extent == Extent(length=960, visual=900, supervised=750)
    assert extent_of(lengths, DataConfig(max_length=100), has_images=True) is None
    config = configure("target=qwen2_5_vl_7b", "data=llava_instruct")
    models = build_on_meta(config)
    found, unknown = (LaunchPlan(config=config, models=models, ranks=1, extent=longest) for longest in (extent, None))
    assert (found.length, found.num_visual, found.num_roots) == (960, 900, 750)
    assert (unknown.length, unknown.num_visual, unknown.num_roots) == (18_432, 18_432 - 2048, 4096)
    assert found.total_bytes < unknown.total_bytes


def test_the_limits_of_images_are_planned() -> None:
    """Published: 3,136 to 12,845,056 pixels, 784 for a token of Qwen2.5-VL. Those of the target's files come first."""
    found = big("qwen2_5_vl_7b", "data.max_length=4096", "data.min_pixels=100000")
    assert "100,000 to 12,845,056 pixels, at most 16,384 visual tokens" in render(found)
    assert "warning: more than data.max_length=4096; data.max_pixels=1605632 is half of it" in render(found)
    assert "100,000 to 400,000 pixels, at most 510 visual" in render(
        replace(found, data=DataPlan(1, [], pixels=(3136, 400_000)))
    )
    capped = render(big("qwen2_5_vl_7b", "data.max_length=4096", "data.max_pixels=802816"))
    assert "3,136 to 802,816 pixels, at most 1,024 visual tokens" in capped and "data.max_length=" not in capped
    assert "65,536 to 16,777,216 pixels, at most 16,384" in render(big("qwen3_vl_8b"))
    assert "an image" not in render(big("llava_1_5_7b"))


@pytest.mark.slow
def test_plans_of_a_mixture_of_experts_and_of_a_text_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network; published: 31.07 B parameters, and 8.03 B without a vision tower."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    words = ("launch.gpus=8", "data.max_length=4096")
    sparse, dense = big("qwen3_vl_30b_a3b", *words), big("llama3_1_8b", *words)
    assert "31.07 B   (538.6 M vision, 30.53 B text; 3.89 B active per token)" in render(sparse)
    assert re.search(r"linear layers +0.05 GB per request, 0.99 MB per node of a tree\n", render(big("qwen3_5_9b", *words)))
    assert sparse.flops["text"] < 0.6 * dense.flops["text"]  # of the parameters of a token, not of all
    text = render(dense)
    assert re.search(r"target +8\.03 B$", text, re.M) and "visual" not in text and "vision" not in text


SMALLER = ["draft=model", "draft.num_layers=2", "train.global_batch_size=64"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "memory", "overrides", "never"),
    [
        ("qwen2_5_vl_7b", 30, [*SMALLER, "launch.gpus=2"], {"deepspeed=zero3", "deepspeed.shard_target=true"}),
        ("qwen2_5_vl_7b", 60, [*SMALLER, "draft.train_part=all", "deepspeed=zero0", "launch.gpus=2"], {"deepspeed=zero1"}),
        ("qwen2_5_vl_72b", 60, ["launch.gpus=8", "train.validate_on=all"], {"deepspeed.shard_target=true"}),
        ("qwen2_5_vl_7b", 30, ["train.micro_batch_size=32", "launch.gpus=2"], set()),
        ("qwen2_5_vl_72b", 8, [], set()),
    ],
)
def test_the_suggested_change_is_valid_and_makes_the_run_fit(target, memory, overrides, never):
    found = big(target, *overrides, f"launch.gpu_memory_gb={memory}")
    assert (found.change is None) == ("no change of batch" in render(found).splitlines()[-1])
    assert not never & set(found.change or [])
    if found.change is not None:
        accepted = big(target, *overrides, f"launch.gpu_memory_gb={memory}", *found.change)
        check(accepted.config)
        assert accepted.fits


@pytest.mark.slow
def test_a_plan_reports_the_data(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Number of examples and steps, long rows, invalid rows; why data are not opened."""
    path = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "Red. " * 60}]
    path.write_text("".join(json.dumps({"id": str(i), "messages": turns}) + "\n" for i in range(24)))
    words = ["launch.plan=true", f"target.path={target}", "draft=eagle", "data=messages", f"data.cache_dir={tmp_path}/cache"]

    def planned(*more: str) -> str:
        config = compose("config", [*words, *more], Config)
        assert train(config) == 0
        shown = capsys.readouterr()
        return shown.out + shown.err

    text = planned(f"data.path={path}", "data.max_length=64", "data.on_long=cut")
    assert re.search(rf"examples +20 for training in {path}", text)
    assert re.search(r"answers +as given; own answers: \d+% of [\d,]+ supervised tokens are the target's own choice\n", text)
    assert "the answers are not the target's own" in text and "regenerate them with: data.answers=target" in text
    assert "the target's own, generated before the first step" in planned(f"data.path={path}", "data.answers=target")
    assert "20 of 20 examples are too long for data.max_length=64: 20 shortened" in text
    assert re.search(r"training +50 steps, (\d|less than a second)", text)
    assert re.search(r"these data +64 tokens per example, 100% of", text)
    assert "drops all of 20 examples" in planned(f"data.path={path}", "data.max_length=64")
    assert "not opened" in planned() and "data.path is not given" in planned()
    assert "no such file" in planned(f"data.path={tmp_path}/gone.jsonl")
    path.write_text("{}\n" * 3)
    assert "all of the first 3 items are invalid" in planned(f"data.path={path}")


def test_a_plan_writes_nothing_and_needs_no_data(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("seed: 1")
    assert train(configure("run.dir=run", "target=llava_onevision_7b", "data=llava_instruct")) == 0
    assert capsys.readouterr().out.startswith("plan: eagle draft for llava_onevision_7b on 1 GPU(s), ZeRO 2")
    assert [path.name for path in tmp_path.rglob("*")] == ["run", "config.yaml"]
    assert not logging.getLogger("torchao").isEnabledFor(logging.WARNING)  # which names every kernel that the machine lacks
