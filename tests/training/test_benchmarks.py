"""The benchmarks of training run on a CPU and print the figures that docs/performance.md quotes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.messages import refused
from support.train_helpers import command, configure
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import training as bench
from benchmarks import visual_tokens
from benchmarks.figures import Figures
from sage.io.files import read_json
from sage.targets.families import family_of
from train.distill.teacher import Staging
from train.plan.estimate import flops_of_step
from train.plan.memory import target_architecture

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("alone")
IMAGES = ["--images", "160x160", "--device", "cpu", "target=pocket_qwen2_5_vl", "draft=eagle"]


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the benchmark with arguments; returns what it prints."""

    def call(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", ["benchmarks.training", *arguments])
        assert bench.main() == 0
        return capsys.readouterr().out

    return call


@pytest.mark.slow
def test_a_step_is_printed_with_its_parts(target: Path, tmp_path: Path, printed: Callable[..., str]) -> None:
    few = ["--measured", "2", "--warmup", "1", "--device", "cpu", "deepspeed=zero0"]
    text = printed(*few, *command(target, tmp_path / "run"))
    assert "draft=eagle, 2 steps of 4 = 1 rank(s) x 2 x 2" in text and "step / parts:" in text and "data wait" in text
    assert not (tmp_path / "run").exists()


def test_images_prints_the_time_of_every_part(tmp_path: Path, printed: Callable[..., str]) -> None:
    few = ["--measured", "1", "--warmup", "0", "--length", "128", "--out", str(tmp_path / "out.json")]
    text = printed(*IMAGES, *few, "train.micro_batch_size=2", "train.global_batch_size=2")
    assert "12 of 12 text layers, draft=eagle, 1 step(s), fp32: 2 sequences with an image of 160 x 160" in text
    assert "256 tokens, 0.12 visual, 54 supervised" in text
    figures = Figures.of(read_json(tmp_path / "out.json"))
    assert [row[0] for row in figures.rows] == [*bench.PARTS.values(), "sum"] and figures.text() in text
    assert all(float(row[2]) > 0 for row in figures.rows)


def counted(sequences: int, length: int, *overrides: str) -> tuple[dict[str, int], dict[str, float]]:
    """The operations of a micro-batch by part, and those of the plan; attention is counted with all of its pairs."""
    config = configure("target=pocket_qwen2_5_vl", *overrides)
    architecture = target_architecture(config.target)
    processor = bench.image_processor(config.target.path, architecture)
    batch = bench.make_batch(family_of(architecture), processor, sequences, length, (160, 160), 1.0)
    config.data.max_length = length
    config.train.global_batch_size = config.train.micro_batch_size = sequences
    teacher, student = bench.build(config, architecture, CPU)
    flops = dict.fromkeys(bench.PARTS, 0)

    @contextmanager
    def part(name: str) -> Iterator[None]:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            yield
        flops[name] += counter.get_total_flops()

    bench.run_parts(teacher, student, Staging(teacher.target, CPU, torch.float32)(batch), part)
    return flops, flops_of_step(bench.workload(config, teacher, student, batch))


def test_counted_operations_are_those_of_the_plan() -> None:
    """The plan reads the merger of the vision tower for every patch, and counts half of the pairs of causal attention."""
    flops, plan = counted(2, 128, "draft=eagle")
    shares = {name: flops[name] / plan[name] for name in plan}
    assert shares["vision"] == pytest.approx(1, abs=0.21)
    assert shares["text"] == pytest.approx(1, abs=0.06) and shares["draft"] == pytest.approx(1, abs=0.04)
    assert shares["objective"] == pytest.approx(1, abs=0.02)


def test_shares_of_visual_tokens_under_a_compressor() -> None:
    """By hand: fc and a layer read all tokens, one in twenty under `pool`; of a resampler keys and values read all."""
    tokens = 4096
    layer = 2 * 3584 * 128 * (28 + 4) + 3 * 3584 * 18944

    def operations(layers: int, rows: int, other: float = 2 * 3584**2) -> float:
        return 2 * rows * (layers * layer + other) + 2 * layers * rows**2 * 3584

    text = operations(28, tokens, 0)
    for kind, draft in (
        ("none", operations(1, tokens)),
        ("pool", operations(1, 205)),
        ("resampler", operations(1, 2) + 2 * tokens * 2 * 7168 * 3584),
    ):
        models = visual_tokens.models_of("qwen2_5_vl_7b", kind)
        assert visual_tokens.counted(models, tokens)[0] == pytest.approx(draft / (draft + text), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["deepspeed=zero3"], ("deepspeed.stage=3", "0, 1 or 2")),
        ([*IMAGES, "--layers", "99"], ("--layers 99", "pocket_qwen2_5_vl", "1 to 12")),
        ([*IMAGES, "--length", "12"], ("--images", "--length 12", "too short")),
        (
            ["--images", "--device", "cpu", "target=qwen3_8b", "draft=eagle", "data.path=/no", "data=llava_instruct"],
            ("--images", "qwen3", "no images"),
        ),
    ],
)
def test_unknown_and_unsupported_arguments_are_refused(printed, arguments, words):
    with refused(*words):
        printed(*arguments)
