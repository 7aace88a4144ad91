"""Complete runs on a random pocket target in this process: files, exact resume, independence of the batch split, callbacks."""

import json
import logging
import math
import random
import sys
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.messages import check_message, refused
from support.train_helpers import (
    VALIDATE,
    command,
    configured,
    draft_weights,
    metrics,
    quick_validation,
    single_process,
    train_quickly,
    train_until_signal,
)

import sage
import train
from checkpoints.run_folder import LOCK, draft_step
from sage.io.manifest import write_manifest
from train.config.hydra_app import compose
from train.config.schema import Config
from train.job.build import building
from train.job.loop import TrainingError, TrainingRun, fit, try_largest
from train.job.run import check_main_guard, run_rank
from train.launch.ranks import process_group
from train.state.resume import seed_everything
from train.validation.validate import validate

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("alone")]
Configure = Callable[..., Config]


@pytest.fixture(scope="module")
def configure(targets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Configure:
    """Configures short runs, which share the cache of their data."""
    cache = f"data.cache_dir={tmp_path_factory.mktemp('cache')}"
    return lambda run, *overrides, family="qwen2_5_vl": configured(targets[family], run, cache, *overrides)


# Both kinds of head; the small targets have too few layers for the default feature levels.
EAGLE_3_1 = ("draft=eagle3", "draft.feature_levels=[0,1,2]", "draft.fc_norm=true", "draft.norm_output=true")
DRAFTS = {"eagle": ("draft=eagle",), "eagle3": EAGLE_3_1}


@pytest.fixture(scope="module")
def trained(configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, not to be changed."""
    run = tmp_path_factory.mktemp("trained") / "run"
    with pytest.MonkeyPatch.context() as patch, single_process(patch):
        assert train_quickly(configure(run, "train.micro_batch_size=4")) == 0
    return run


def assert_close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert (left[name].double() - right[name].double()).abs().max() <= tolerance, name


@pytest.mark.usefixtures("rendered_plots")
@pytest.mark.parametrize(("family", "draft"), [("llava_onevision", "eagle"), ("qwen2_5_vl", "eagle3")])
def test_a_run_writes_the_documented_files(configure, targets, tmp_path, family, draft, caplog):
    run = tmp_path / "run"
    config = configure(run, *DRAFTS[draft], "train.save_every=1", "train.validate_every=1", family=family)
    with caplog.at_level(logging.INFO):
        assert run_rank(config) == 0
    assert f"for {targets[family].name}" in caplog.text, "the loaded target, not the preset"
    lines = metrics(run)
    assert [line["step"] for line in lines] == [1, 2]
    documented = {"step", "tokens", "loss", "loss_ce", "loss_feature", "lr", "grad_norm", "tokens_per_s", "time_s"}
    assert documented <= lines[0].keys()
    assert all(math.isfinite(value) for line in lines for value in line.values())
    if draft == "eagle":
        assert lines[0]["loss"] == pytest.approx(0.1 * lines[0]["loss_ce"] + lines[0]["loss_feature"])
    else:
        assert lines[0]["loss"] == pytest.approx(lines[0]["loss_ce"], rel=1e-2)  # of all unrolled steps, and of the first
    pages = ["curves.png", "report.html", "report.md"]
    written = ["config.yaml", "draft", "draft_best", "metrics.jsonl", "provenance.json", "state", "validation", *pages]
    assert sorted(path.name for path in run.iterdir() if path.name != LOCK) == sorted(written)
    assert sorted(path.name for path in (run / "state").iterdir()) == ["latest", "step_00000001", "step_00000002"]
    tensors = {"weight.safetensors", "exp_avg.safetensors", "exp_avg_sq.safetensors", "rank_00000.safetensors"}  # no pickle
    state = {path.name for path in (run / "state" / "step_00000002").iterdir()}
    assert state == {*tensors, "trainer.json", "manifest.json"}
    report = json.loads((run / "validation" / "step_00000002" / "report.json").read_text())
    assert report["policies"]["sage"]["match"] == report["policies"]["sage"]["total"] == 1
    provenance = json.loads((run / "provenance.json").read_text())
    assert provenance["versions"]["torch"] == torch.__version__ and provenance["data_fingerprint"]
    saved = sage.load_draft(run / "draft", sage.load_target(targets[family], dtype=torch.float32))
    assert saved.kind == draft
    for name, value in saved.state_dict().items():
        assert torch.equal(value, draft_weights(run)[name])


@pytest.mark.parametrize("options", [["deepspeed=zero2"], ["target.dtype=bf16", "train.micro_batch_tokens=260"]])
def test_trying_the_largest_micro_batch_changes_nothing(configure: Configure, tmp_path: Path, options: list[str]) -> None:
    """With noise on the features, so that a generator that is not restored would show; then without memory."""
    for name in ("tried", "plain"):
        config = configure(tmp_path / name, "objective.feature_noise=0.1", "train.micro_batch_size=4", *options)
        with process_group("cpu", 60) as ranks, mock.patch(VALIDATE, quick_validation), building(config, ranks) as run:
            if name == "tried":
                try_largest(run)
            assert fit(run)
            run.teacher = out_of_memory  # type: ignore[assignment]
            with refused("rank 0", "largest micro-batch", "launch.plan=true", error=TrainingError):
                try_largest(run)
    left, right = draft_weights(tmp_path / "tried"), draft_weights(tmp_path / "plain")
    assert all(torch.equal(left[name], right[name]) for name in left)


def out_of_memory(batch: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize(("draft", "dtype", "budget"), [("eagle3", "fp32", 300), ("eagle", "bf16", None)])
def test_three_steps_and_three_resumed_are_six_bit_for_bit(configure, tmp_path, draft, dtype, budget):
    """With noise on the features and random anchors, so that a generator that is not restored would show."""
    schedule = ["optim.schedule=cosine", "optim.warmup_steps=2", "train.log_every=3"]
    same = [*DRAFTS[draft], f"target.dtype={dtype}", "objective.feature_noise=0.1", *schedule]
    same += ["objective.anchors=4"] if draft == "eagle3" else []
    same += ["train.micro_batch_size=4", f"train.micro_batch_tokens={budget}"] if budget else []
    straight, halved = tmp_path / "straight", tmp_path / "halved"
    assert train_quickly(configure(straight, *same, "train.max_steps=6")) == 0
    stopping = configure(halved, *same, "train.max_steps=6")
    with process_group("cpu", 60) as ranks:
        train_until_signal(stopping, ranks, 3)
    assert (halved / "state" / "latest").read_text() == "step_00000003\n"
    assert draft_step(halved / "draft") == 3  # can be measured before the run goes on
    seed_everything(99, 0)  # the state of the process does not matter
    assert train_quickly(configure(halved, *same, "train.max_steps=6", "run.resume=true")) == 0
    left, right = draft_weights(straight), draft_weights(halved)
    assert all(torch.equal(left[name], right[name]) for name in left)
    for one, other in zip(metrics(straight), metrics(halved), strict=True):
        for name in ("step", "tokens", "loss", "loss_ce", "loss_feature", "lr", "grad_norm", "agreement"):
            assert one[name] == other[name], name
    provenance = json.loads((halved / "provenance.json").read_text())
    assert provenance["from_step"] == 0 and provenance["resumed"][0]["from_step"] == 3


def test_the_split_of_a_batch_does_not_matter(configure: Configure, trained: Path, tmp_path: Path) -> None:
    """1 x 4 = 4 x 1 micro-batches, and as many as a budget of tokens allows; drafts of other kinds are in test_students.

    Sums run in another order and padding differs, so the teacher's features agree to
    about 1e-6 and so does the loss; AdamW divides by the gradient's size, so where that is near zero a weight may move by
    some thousandths of a step (lr 1e-3) more or less."""
    for name, size, *budget in (("ones", 1), ("budget", 4, "train.micro_batch_tokens=300")):
        run = tmp_path / name
        assert train_quickly(configure(run, f"train.micro_batch_size={size}", *budget)) == 0
        assert_close(draft_weights(trained), draft_weights(run), 5e-6)
        for one, other in zip(metrics(trained), metrics(run), strict=True):
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
            assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def test_negative_control_another_batch_is_another_run(configure: Configure, trained: Path, tmp_path: Path) -> None:
    assert train_quickly(configure(tmp_path / "run", "seed=1")) == 0
    with pytest.raises(AssertionError):
        assert_close(draft_weights(trained), draft_weights(tmp_path / "run"), 5e-6)


def test_one_batch_is_overfitted(configure: Configure, tmp_path: Path) -> None:
    """With four examples the feature loss falls below a fifth and the draft agrees with the target."""
    run = tmp_path / "run"
    few = ["data.num_examples=4", "train.max_steps=60", "train.micro_batch_size=4", "optim.lr=3e-3", "train.log_every=20"]
    assert train_quickly(configure(run, *few)) == 0
    first, *_, last = metrics(run)
    assert last["loss_feature"] < 0.2 * first["loss_feature"]
    assert last["agreement"] > max(0.5, first["agreement"])


class NonFinite:
    """A feed whose second step holds one example with features that are not finite."""

    def __init__(self, run: TrainingRun, value: float) -> None:
        self.feed, self.value = run.loader, value

    def __iter__(self) -> Any:
        for number, batches in enumerate(self.feed, start=1):
            if number == 2:
                batches[0]["pixel_values"] = batches[0]["pixel_values"] * self.value
            yield batches


def test_a_loss_that_is_not_finite_stops_before_the_step_and_names_the_batch(configure: Configure, tmp_path: Path) -> None:
    config = configure(tmp_path / "run", "train.max_steps=3")
    with process_group("cpu", 60) as ranks, building(config, ranks) as run:
        with closing(iter(run.loader)) as steps:
            ids = [batch["ids"] for batch in list(islice(steps, 2))[1]]
        run.loader = NonFinite(run, float("nan"))
        before: list[torch.Tensor] = []
        step = run.engine.step
        run.engine.step = lambda lr: [step(lr), before.extend(p.detach().clone() for p in run.engine.draft.parameters())][0]  # type: ignore[method-assign,func-returns-value]
        with refused("step 2", "step 1", *ids[0], error=TrainingError) as caught:
            fit(run)
        assert not any(name in str(caught.value) for name in ids[1])
        now = list(run.engine.draft.parameters())
        assert all(torch.equal(one, other) for one, other in zip(before, now, strict=True))


def test_a_batch_without_answers_is_refused(configure: Configure, tmp_path: Path) -> None:
    with process_group("cpu", 60) as ranks, building(configure(tmp_path / "run"), ranks) as run:
        with closing(iter(run.loader)) as steps:
            batches = next(steps)
        for batch in batches:
            batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
        run.loader = (given for given in [batches])  # type: ignore[assignment]
        with refused("step 1", error=TrainingError):
            fit(run)


def test_a_corrupt_state_is_skipped_and_that_of_another_draft_refused(configure, tmp_path, caplog):
    run = tmp_path / "run"
    assert train_quickly(configure(run, "train.save_every=1")) == 0
    newest = run / "state" / "step_00000002"
    (newest / "exp_avg.safetensors").write_bytes(b"rubbish")
    with caplog.at_level(logging.INFO):
        assert train_quickly(configure(run, "run.resume=true")) == 0
    assert "exp_avg.safetensors" in caplog.text
    check_message(next(message for message in caplog.messages if "resumed" in message), "step_00000001")
    assert [line["step"] for line in metrics(run)] == [1, 2]  # step 2 was repeated and is logged once
    moments = load_file(newest / "exp_avg.safetensors")
    save_file({"other": next(iter(moments.values()))}, newest / "exp_avg.safetensors", metadata={"step": "2"})
    write_manifest(newest, 2)
    with refused("exp_avg.safetensors", "another draft"):
        train_quickly(configure(run, "run.resume=true", "train.max_steps=3"))


def test_training_continues_from_a_saved_draft(configure: Configure, trained: Path, tmp_path: Path) -> None:
    """In float32 beside a target in bfloat16, whose dtype would round every weight by up to 0.4%."""
    mixed = ("target.dtype=bf16", "train.precision=fp32", "train.max_steps=1")
    assert train_quickly(configure(tmp_path / "run", f"draft.path={trained / 'draft'}", "optim.lr=1e-12", *mixed)) == 0
    state = load_file(tmp_path / "run" / "state" / "step_00000001" / "weight.safetensors")
    assert_close(draft_weights(trained), {name.removeprefix("draft."): value for name, value in state.items()}, 1e-9)


def test_seeding_differs_between_ranks() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    seed_everything(3, 0)
    first = draw()
    seed_everything(3, 1)
    assert all(one != other for one, other in zip(first, draw(), strict=True))
    seed_everything(3, 0)
    assert draw() == first


def test_a_run_returns_its_report_and_calls_back(target: Path, tmp_path: Path) -> None:
    seen = mock.Mock(spec=train.Callback)
    report = train.run(train.compose(*command(target, tmp_path / "run"), "train.save_every=1"), [seen])
    assert report["policies"]["sage"]["total"] == 1
    calls = [(name, arguments[0]) for name, arguments, _ in seen.method_calls]
    assert calls[:4] == [("on_log", 1), ("on_save", 1), ("on_log", 2), ("on_save", 2)] and ("on_validate", 2) in calls


@pytest.mark.parametrize(
    ("script", "words", "is_refused"),
    [
        ("train.run(config)\n", ["data.num_workers=2"], True),
        ("if __name__ == '__main__':\n    train.run(config)\n", ["data.num_workers=2", "launch.ranks=2"], False),
        ("%matplotlib inline\n", ["data.num_workers=2"], False),
    ],
)
def test_a_script_without_a_main_guard_starts_no_processes(target, tmp_path, monkeypatch, script, words, is_refused):
    """Each process would import the script and train again."""
    (tmp_path / "mine.py").write_text(script)
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(tmp_path / "mine.py")))
    config = train.compose(*command(target, tmp_path / "run"), "launch.ranks=null", "data.num_workers=0", *words)
    if is_refused:
        with refused(words[0], 'if __name__ == "__main__":', error=train.ConfigError):
            train.run(config)
    else:
        check_main_guard(config)
    assert not (tmp_path / "run").exists()


def test_every_validation_decodes_with_a_copy_of_the_same_policies(target: Path, tmp_path: Path) -> None:
    learned: list[tuple[int, int]] = []

    def decode(*arguments: Any, policies: Any, **options: Any) -> Any:
        learner = policies["cost_aware"].learner
        before = learner.rounds
        report = validate(*arguments, policies=policies, **options)
        learned.append((before, learner.rounds))
        return report

    words = ["train.validate_every=1", "decode.policies=[cost_aware]", "decode.baselines=[]", "launch.device=cpu"]
    assert train_quickly(compose("config", command(target, tmp_path / "run", *words), Config), decode) == 0
    assert [before for before, _ in learned] == [0, 0] and all(after > 0 for _, after in learned)
