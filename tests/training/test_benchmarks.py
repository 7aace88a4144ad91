"""The benchmarks run on a CPU and print the figures that docs/performance.md quotes; the two compared losses agree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.messages import refused
from support.plans import configure
from support.train_helpers import command

from benchmarks.chain_attention import errors, inputs
from benchmarks.figures import Figures, read_figures
from benchmarks.gpu_page import filled
from benchmarks.training import __main__ as bench
from benchmarks.training import images
from benchmarks.training.compiled_calls import LayerCalls
from benchmarks.training.counting import Counts, counted
from benchmarks.training.measuring import interleaved, peak, reset_peak
from benchmarks.training.objective import Sizes, chunked, make_inputs, naive
from sage.bench.shapes import Shape, shapes
from sage.targets.families import family_of
from train.config.schema import ObjectiveConfig
from train.distill.staging import Staging
from train.plan.meta import target_architecture

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("alone")
TINY = Shape("tiny", hidden_size=32, intermediate_size=48, num_layers=8, num_heads=4, num_kv_heads=2, vocab_size=64, head_dim=8)


def printed(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr("sys.argv", ["benchmarks.training", *arguments])
    assert bench.main() == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "sizes", [Sizes(tokens=20, vocabulary=50, hidden=8), Sizes(tokens=20, hidden=8, steps=3, draft_vocab_size=30)]
)
@pytest.mark.parametrize(
    "options", [{"ce_weight": 1.0}, {"ce_weight": 0.5, "tv_weight": 0.5, "lk_weight": 0.5, "temperature": 2.0}]
)
def test_both_losses_of_the_benchmark_are_the_same(sizes: Sizes, options: dict[str, float]) -> None:
    config = ObjectiveConfig(**{"feature_weight": 0.0, "chunk_tokens": 6, **options})
    x = make_inputs(sizes, torch.float32, CPU)
    for mine, theirs in zip(chunked(x, config), naive(x, config), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-7)


def test_the_peak_is_the_memory_allocated_since_the_reset() -> None:
    before = reset_peak(CPU)
    block = torch.ones(25_000_000)
    del block
    assert 95e6 < peak(CPU) - before < 130e6
    assert peak(CPU) - reset_peak(CPU) >= 0
    samples = interleaved({"much": lambda: torch.ones(25_000_000), "little": lambda: torch.ones(10)}, 2, CPU)
    assert samples["much"].peak > 90e6 > samples["little"].peak and len(samples["much"].seconds) == 2


def test_objective_prints_the_floor_both_losses_and_their_ratio(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["objective", "--tokens", "32", "--vocabulary", "100", "--hidden", "16", "--repeats", "1", "--device", "cpu"]
    text = printed([*few, "--draft-vocab-size", "50", "--steps", "2", "--lk", "1"], monkeypatch, capsys)
    assert "S = 32, U = 50, D = 16, K = 2, float32" in text and "floor: 7 products" in text
    assert "chunked / naive: memory" in text and "relative to the largest entry" in text
    assert "row dot product of 32 rows, blocked / vecdot: time " in text


@pytest.mark.slow
def test_step_prints_the_parts_of_a_target_and_of_a_shape(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["step", "--measured", "2", "--warmup", "1", "--device", "cpu", "deepspeed=zero0"]
    text = printed([*few, *command(target, tmp_path / "run")], monkeypatch, capsys)
    assert "draft=eagle, 2 steps of 4 = 1 rank(s) x 2 x 2" in text and "step / parts:" in text and "data wait" in text
    assert not (tmp_path / "run").exists()
    monkeypatch.setitem(shapes(), "tiny", TINY)
    shape = ["--shape", "tiny", "--layers", "7", "--length", "12", "draft=eagle3", "target.dtype=fp32"]
    text = printed([*few, *shape, "train.global_batch_size=2", "train.micro_batch_size=2"], monkeypatch, capsys)
    assert "draft=eagle3, 2 steps of 2 = 1 rank(s) x 2 x 1, 24 tokens" in text


COUNTED = ["step", "--images", "160x160", "--device", "cpu", "--supervised", "1", "target=pocket_qwen2_5_vl", "draft=eagle"]


@pytest.fixture
def torch_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of the process may have run DeepSpeed under ZeRO-3, which replaces it."""
    monkeypatch.setattr(torch.nn.functional, "linear", torch._C._nn.linear)


def test_counted_operations_are_those_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], torch_linear: None
) -> None:
    """Within 4%; of the vision tower within a fifth: the plan reads its merger for every patch and leaves out attention."""
    text = printed([*COUNTED, "--lengths", "128,96", "--out", str(tmp_path / "out.json")], monkeypatch, capsys)
    assert "12 of 12 text layers, draft=eagle, 1 step(s), fp32: 2 sequences with an image of 160 x 160" in text
    assert "224 tokens, 256 with padding (0.88); 0.12 visual, 190 supervised" in text
    command, figures = read_figures(tmp_path / "out.json")
    assert command.endswith("--out " + str(tmp_path / "out.json")) and figures.text() in text
    shares = {row[0]: float(row[2]) for row in figures.rows}
    assert shares.pop("vision tower, embedding") == pytest.approx(1, abs=0.21)
    assert shares.pop("objective") == pytest.approx(190 / 224, abs=0.02)  # padding is not supervised
    assert all(share == pytest.approx(1, abs=0.04) for share in shares.values()) and len(shares) == 3


def test_operations_with_anchors_grow_with_the_anchors(
    torch_linear: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An eighth of the supervised positions: at most a quarter of the operations. The plan leaves out attention."""
    anchors = ["draft=eagle3", "draft.feature_levels=[4,8,12]", "objective.anchors=60", "--length", "512"]
    text = printed([*COUNTED[:-1], *anchors], monkeypatch, capsys)
    (line,) = (line for line in text.splitlines() if line.startswith("objective.anchors=60, share of the TFLOP"))
    shares = [float(word.rstrip(";")) for word in line.split() if word.rstrip(";").startswith("0.")]
    assert len(shares) == 2 and max(shares) <= 0.25
    rows = [line.split() for line in text.splitlines() if line.startswith(("draft,", "objective "))]
    assert [float(row[-2]) for row in rows] == pytest.approx([1, 1], abs=0.25)


@pytest.mark.parametrize("target_name", ["pocket_qwen2_5_vl", "pocket_llava_onevision"])
def test_counts_without_weights_are_those_of_real_tensors(target_name: str) -> None:
    config = configure(f"target={target_name}", "draft=eagle3", "objective.steps=3", "draft.draft_vocab_size=100")
    architecture = target_architecture(config.target)
    sizes = images.Sizes(lengths=(300, 200), image=(64, 64))
    processor = images.image_processor(config.target.path, architecture)
    batch = images.make_batch(family_of(architecture), processor, sizes)
    real, meta = ({name: Counts() for name in images.PARTS} for _ in range(2))
    teacher, student = images.build(config, architecture, CPU)
    staged = Staging(teacher.target, CPU, torch.float32)(batch)
    images.run_parts(teacher, student, staged, lambda name: counted(real[name]))
    images.count(config, architecture, batch, meta, LayerCalls())
    assert meta.pop("objective").flops == pytest.approx(real.pop("objective").flops, rel=0.01)  # another dot product of rows
    assert {name: one.flops for name, one in meta.items()} == {name: one.flops for name, one in real.items()}
    assert all(0 < meta[name].operators <= 1.25 * one.operators for name, one in real.items())


def test_compiled_blocks_of_a_vision_tower_make_a_tenth_of_the_calls(torch_linear: None) -> None:
    """Of those with a call for each window, for an image of 640 x 480; without compiler, GPU, and the weights of the 7B."""
    found = {}
    for choice in ("sdpa", "varlen"):
        config = configure("target=qwen2_5_vl_7b", f"target.attention={choice}", "data=llava_instruct")
        architecture = target_architecture(config.target)
        architecture.get_text_config().num_hidden_layers = 1
        processor = images.image_processor(config.target.path, architecture)
        batch = images.make_batch(family_of(architecture), processor, images.Sizes(lengths=(1024,)))
        counts, layers = {name: Counts() for name in images.PARTS}, LayerCalls()
        images.count(config, architecture, batch, counts, layers)
        found[choice] = counts["vision"].operators, layers.compiled("vision", counts["vision"].operators)
    assert found["sdpa"] == (pytest.approx(4510, rel=0.2), None)  # no block is compiled that attends to windows one by one
    assert found["varlen"][1] is not None and 10 * found["varlen"][1] <= 4510


def test_causal_attention_is_counted_with_half_of_its_pairs() -> None:
    counts, query = Counts(), torch.ones(1, 2, 8, 4)
    with counted(counts):
        torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        torch.zeros(3, 5).addmm_(torch.ones(3, 7), torch.ones(7, 5))
    assert counts.flops == 2 * (2 * 2 * 8 * 8 * 4) // 2 + 2 * 3 * 7 * 5 and counts.operators >= 2


def test_the_chain_attention_of_a_step_is_exact_to_the_precision_of_its_inputs() -> None:
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        found = errors(inputs(12, 136, 4, 2, dtype, CPU))
        assert len(found) == 6 and max(found) < bound


def test_figures_of_a_gpu_replace_the_text_of_their_block_only(tmp_path: Path) -> None:
    page = "<!-- figures: a b -->\nNever.\n<!-- end -->\n<!-- figures: c -->\nNever.\n<!-- end -->\n<!-- figures: steps -->\n"
    Figures("A title", ("x", "y"), [["1", "2|3"]], ["note"], "one GPU").write(tmp_path / "a.json")
    (tmp_path / "b.txt").write_text("$ command\nwarning: hidden\nshown\n")
    (tmp_path / "steps").write_text("a 0 3\nb 124 60\n")
    found = filled(page + "-\n<!-- end -->", tmp_path)
    assert "measured on one GPU:\n\nA title.\n\n| x | y |\n| :-- | --: |\n| 1 | 2\\|3 |\n\nnote." in found
    assert "```text\n$ command\nshown\n```" in found and found.count("Never.") == 1
    assert "| `b` | failed, exit code 124 | 60 |" in found and filled(found, tmp_path) == found


@pytest.mark.slow
def test_unknown_and_unsupported_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, parts in (
        (["objective", "seed=1"], ("seed=1", "objective")),
        (["step", "--frobnicate"], ("--frobnicate", "step")),
        (["step", "deepspeed=zero3"], ("deepspeed.stage=3", "0, 1 or 2")),
        (
            ["step", "--shape", "qwen2_5_vl_7b", "--layers", "99", "launch.device=cpu"],
            ("--layers 99", "qwen2_5_vl_7b", "1 to 28"),
        ),
        ([*COUNTED, "--layers", "99"], ("--layers 99", "pocket_qwen2_5_vl", "1 to 12")),
        ([*COUNTED, "--length", "12"], ("--images", "--length 12", "too short")),
        ([*COUNTED, "--shape", "qwen2_5_vl_7b"], ("--shape", "target=NAME")),
        (
            ["step", "--images", "--device", "cpu", "target=qwen3_8b", "draft=eagle", "data.path=/no", "data=llava_instruct"],
            ("--images", "qwen3", "no images"),
        ),
    ):
        monkeypatch.setattr("sys.argv", ["benchmarks.training", *arguments])
        with refused(*parts):
            bench.main()
