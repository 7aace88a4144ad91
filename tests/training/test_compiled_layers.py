"""Layers compiled for training: equal to eager ones, one function for all layers and lengths, eager where nothing compiles.

Most tests trace and differentiate as a compiled run does, and leave out Inductor's code, which takes a C++ compiler seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.data_helpers import make_student
from support.messages import refused
from support.models import make_qwen, padded_batch
from support.train_helpers import configure, configured, draft_weights, train_quickly

from sage.runtime import attention
from sage.runtime.modes import VisionAttention
from sage.targets.loading import set_attention
from train.config.checks import check
from train.distill import compiled_layers
from train.distill.compiled_layers import CompiledLayers, draft_layers, is_compiling, target_layers, target_methods
from train.distill.student import Student
from train.distill.teacher import Teacher

if TYPE_CHECKING:
    from torch._dynamo.testing import CompileCounterWithBackend

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch reads it, and hides the warning


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """Counts the functions that are compiled."""
    from torch._dynamo.testing import CompileCounterWithBackend  # takes a second

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(compiled_layers, "BACKEND", counter)
    return counter


def packed(query: Any, key: Any, value: Any, ends: Any, *_: Any) -> torch.Tensor:
    """Attention within the parts of a packed sequence, as `varlen_attn`."""
    part = torch.bucketize(torch.arange(len(query)), ends, right=True, out_int32=True)
    heads = [states.transpose(0, 1) for states in (query, key, value)]
    return torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=part[:, None] == part).transpose(0, 1)


def longer(batch: dict[str, Any], count: int) -> dict[str, Any]:
    """Returns a batch with `count` more tokens of text in each sequence."""
    more = {key: value[:, -1:].expand(-1, count) for key, value in batch.items() if key in TOKENS}
    return batch | {key: torch.cat((batch[key], value), 1) for key, value in more.items()}


TOKENS = ("input_ids", "attention_mask", "loss_mask", "mm_token_type_ids")


def gradients(teacher: Teacher, student: Student, batch: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    loss = student(teacher(batch), teacher.lm_head)[0]
    return (loss, *torch.autograd.grad(loss, list(student.draft.parameters())))


@pytest.mark.slow
def test_one_function_for_all_layers_and_lengths(counter: CompileCounterWithBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vision blocks, text layers, and two methods of an EAGLE-3 layer, each compiled once; losses and gradients are equal."""
    monkeypatch.setattr(attention, "varlen_attn", packed)
    target = make_qwen()
    set_attention(target.model, VisionAttention.varlen)
    eager, student = (make_student(target, "eagle3", ce_weight=1.0) for _ in range(2))
    teacher = Teacher(target, "embed", student.levels, student.token_map, CompiledLayers(target_methods(target)))
    plain = Teacher(target, "embed", student.levels, student.token_map)
    student.layers = CompiledLayers(student.compilable())
    batch = padded_batch(target)
    for number, one in enumerate((batch, longer(batch, 11))):
        for found, expected in zip(gradients(teacher, student, one), gradients(plain, eager, one), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        if number == 0:
            first = counter.frame_count
    assert counter.frame_count == first == 4
    assert not any("forward" in vars(module) for module in target.model.modules()), "decoding runs layers as they are"


@pytest.mark.slow
def test_a_model_draft_is_compiled_with_the_function_of_its_layers(counter: CompileCounterWithBackend) -> None:
    target = make_qwen()
    batch, found = padded_batch(target), []
    for is_compiled in (False, True):
        student = make_student(target, "model", ce_weight=1.0)
        student.layers = CompiledLayers(student.compilable() if is_compiled else ())
        teacher = Teacher(target)
        loss = student(teacher(batch), teacher.lm_head)[0]
        found.append(torch.autograd.grad(loss, list(student.decoding_draft.model.text_model.layers.parameters())))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["no compiler", "no torch.compile"])
def test_eager_after_one_warning(failure: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Cannot find a working\ncompiler")

    if failure == "no compiler":
        monkeypatch.setattr(compiled_layers, "BACKEND", broken)
    else:
        monkeypatch.setattr(torch, "compile", broken)
    target = make_qwen()
    teacher = Teacher(target, layers=CompiledLayers([(layer, "forward") for layer in target.text_model.layers]))
    batch = padded_batch(target)
    for _ in range(2):
        assert torch.equal(teacher(batch).features_next, Teacher(target)(batch).features_next)
    (record,) = (one for one in caplog.records if one.name == compiled_layers.__name__)
    assert record.getMessage().startswith("train.compile: Qwen2_5_VLDecoderLayer cannot be compiled, it runs eagerly (")
    assert "working compiler" in record.getMessage()


@pytest.mark.slow
def test_what_is_compiled_where() -> None:
    """On GPUs by default; no layer that ZeRO-3 shards; no vision block with a call for each window."""
    cuda, target, one = torch.device("cuda:0"), make_qwen(), [(torch.nn.Linear(1, 1), "forward")]
    auto, layers, none, exact = (
        configure(*words) for words in ((), ("train.compile=layers",), ("train.compile=none",), ("train.deterministic=true",))
    )
    assert [is_compiling(config, cuda) for config in (auto, layers, none, exact)] == [True, True, False, False]
    assert [is_compiling(config, CPU) for config in (auto, layers, none, exact)] == [False, True, False, False]
    assert not is_compiling(layers, torch.device("meta"))
    stages = [len(str(draft_layers(configure("train.compile=layers", f"deepspeed=zero{n}"), one, CPU))) > 0 for n in range(4)]
    assert stages == [True, True, True, False]
    assert str(target_layers(auto, target)) == "" and str(target_layers(layers, target)) == "3 Qwen2_5_VLDecoderLayer"
    set_attention(target.model, VisionAttention.varlen)
    assert str(target_layers(layers, target)) == "1 Qwen2_5_VLVisionBlock, 3 Qwen2_5_VLDecoderLayer"
    target.is_whole = False
    assert str(target_layers(layers, target)) == "1 Qwen2_5_VLVisionBlock"
    with refused("train.compile=layers", "auto or none with train.deterministic=true"):
        check(configure("data=llava_instruct", "train.compile=layers", "train.deterministic=true"))


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_a_compiled_run_resumes_exactly(target: Path, tmp_path: Path, counter: CompileCounterWithBackend) -> None:
    for name, steps in (("straight", 2), ("resumed", 1), ("resumed", 2)):
        if (tmp_path / name).exists():
            torch._dynamo.reset()  # as in another process, which compiles for another batch
        options = ["draft=eagle3", "draft.feature_levels=[0,1,2]", "objective.steps=2", "train.compile=layers"]
        given = [*options, f"train.max_steps={steps}", f"run.resume={(tmp_path / name).exists()}"]
        assert train_quickly(configured(target, tmp_path / name, *given)) == 0
    assert counter.frame_count > 0
    weights, resumed = (draft_weights(tmp_path / name) for name in ("straight", "resumed"))
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
