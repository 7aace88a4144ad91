"""The benchmarks of training run on a CPU and print the figures that docs/performance.md quotes."""

import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.messages import refused
from support.train_helpers import command, configure
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import sage
from benchmarks import gpu_quarter_hour, visual_tokens
from benchmarks import training as bench
from benchmarks.figures import Figures
from benchmarks.gpu_quarter_hour import Step, run_steps
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
    """By hand: fc, keys and values of all tokens, of one in twenty under `pool`; those of a resampler read all."""
    tokens, size, keys = 4096, 3584, 4 * 128
    layer = 2 * size * 128 * (28 + 4) + 3 * size * 18944
    text = 28 * (2 * tokens * layer + 2 * tokens**2 * size)
    for kind, draft in (
        ("none", 2 * tokens * (2 * size**2 + 2 * size * keys)),
        ("pool", 2 * 205 * (2 * size**2 + 2 * size * keys)),
        ("resampler", 2 * 2 * (2 * size**2 + 2 * size * keys) + 2 * tokens * 2 * 2 * size * size),
    ):
        models = visual_tokens.models_of("qwen2_5_vl_7b", kind)
        assert visual_tokens.counted(models, tokens)[0] == pytest.approx(draft / (draft + text), rel=1e-3)


@pytest.mark.slow
def test_heads_are_trained_and_measured_on_large_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 visual tokens, 63 pairs are replaced; every head decodes the target's text."""
    visual_tokens.adapt(tmp_path / "target", steps=1, examples=2, rate=1e-3)
    loaded = sage.load_target(tmp_path / "target", dtype=torch.float32)
    monkeypatch.setattr(visual_tokens, "MAX_NEW_TOKENS", 8)
    visual_tokens.train_heads(loaded, visual_tokens.KINDS, tmp_path, [(16, 1, 2), (64, 1, 1)])
    drafts = {kind: sage.load_draft(tmp_path / kind, loaded) for kind in visual_tokens.KINDS}
    found = visual_tokens.measure(loaded, drafts, 64, pictures=1)
    rows = {kind: head["rows"] for kind, head in found["heads"].items()}
    left = {kind: rows[kind] - rows["text_only"] for kind in rows if kind not in ("select", "text_only")}
    assert left == {"none": 63, "prune": 4, "pool": 4, "conv": 21, "resampler": 2, "weighted": 21, "concat": 27}
    assert [head["match"] for head in found["heads"].values()] == [found["answers"]] * len(drafts)
    text = visual_tokens.table("qwen2_5_vl_7b", [64, 128], {"64": found})
    assert f"| {rows['pool']:.0f} | {found['heads']['pool']['tokens_per_pass']:.2f} |" in text and "; 64: 2 answers" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*IMAGES, "--layers", "99"], ("--layers 99", "pocket_qwen2_5_vl", "1 to 12")),
        (
            ["--images", "--device", "cpu", "target=qwen3_8b", "draft=eagle", "data.path=/no", "data=llava_instruct"],
            ("--images", "qwen3", "no images"),
        ),
    ],
)
def test_unknown_and_unsupported_arguments_are_refused(printed, arguments, words):
    with refused(*words):
        printed(*arguments)


# -- the quarter of an hour of a GPU ------------------------------------------------------------------------------------


DEAF = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('hangs', flush=True); time.sleep(600)"


def step(name: str, code: str, limit_s: float = 600.0, estimate_s: float = 0.0) -> Step:
    return Step(name=name, estimate_s=estimate_s, limit_s=limit_s, command=[sys.executable, "-c", code], shows="")


@pytest.mark.slow
def test_steps_that_fail_hang_and_do_not_fit_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grace_s = {signal.SIGINT: 0.1}  # which the step ignores; it ends as soon as the next signal has printed its stack
    monkeypatch.setattr(
        gpu_quarter_hour, "SIGNALS", [(number, grace_s.get(number, 60)) for number, _ in gpu_quarter_hour.SIGNALS]
    )
    writes = f"open(r'{tmp_path}/work/works/table.json', 'w').write('{{\"rows\": [NaN]}}')"
    todo = [step("fails", "print('why'); exit(3)"), step("hangs", DEAF, limit_s=5), step("works", writes)]
    (tmp_path / "work" / "works").mkdir(parents=True)
    assert run_steps([*todo, step("large", "", estimate_s=9999)], tmp_path, tmp_path / "work", budget_s=999) == 1
    rows = read_json(tmp_path / "results.json")["steps"]
    outcomes = [row["outcome"] for row in rows]
    assert outcomes[:3] == ["failed, exit code 3", "killed at 5 s", "ran"] and re.fullmatch(r"skipped, \d+ s left", outcomes[3])
    figures = read_json(tmp_path / "figures.json")
    assert figures["fails"]["output"] == "why" and "Fatal Python error: Aborted" in figures["hangs"]["output"]
    assert figures["works"]["files"] == {"table.json": {"rows": ["NaN"]}}
