"""From a micro-batch to the teacher's pairs: staging, teacher, index shift."""

import threading
from typing import Any

import pytest
import torch
from support.data_helpers import Numbers, collate_numbers, make_student
from support.models import padded_batch
from torch import Tensor, nn

import sage
from data_prep.loader import StepLoader
from sage.targets.family import NEXT_POSITION, POSITIONS
from sage.targets.target import Features
from train.distill.teacher import Pairs, Staging, Teacher, count_supervised, make_pairs, with_noise

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


def test_embedding_uses_the_staged_positions(tiny_target: sage.Target, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = padded_batch(tiny_target)
    plain = tiny_target.embed(batch)
    staged = Staging(tiny_target, CPU, torch.float32)(batch)
    monkeypatch.setattr(type(tiny_target.family), "positions", lambda *_: pytest.fail("computed twice"))
    found = tiny_target.embed(staged)
    assert torch.equal(found.position_ids, plain.position_ids) and torch.equal(found.next_position, plain.next_position)
    assert torch.equal(found.embeds, plain.embeds)
    assert POSITIONS not in found.inputs and NEXT_POSITION not in found.inputs


def test_pixels_are_converted_before_they_are_copied(tiny_target: sage.Target) -> None:
    """Nothing is lost: the vision tower converts them to its own dtype first."""
    target = tiny_target
    target.model.bfloat16()
    batch = padded_batch(target) | {"second_per_grid_ts": torch.tensor([0.4375, 1 / 3])}
    staged = Staging(target, CPU, torch.bfloat16)(batch)
    assert staged["pixel_values"].dtype == torch.bfloat16
    assert staged["second_per_grid_ts"].dtype == torch.float32, "rope positions are computed from them"
    expected, found = (target.family.visual_features(target.model, inputs) for inputs in (batch, staged))
    assert all(torch.equal(found[key].embeds, value.embeds) for key, value in expected.items())


def test_batches_for_a_gpu_are_pinned_in_the_context_of_that_gpu(tiny_qwen, fake_cuda, monkeypatch):
    pinned = list[int]()
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: pinned.append(id(self)) or self)
    staged = Staging(tiny_qwen, GPU, torch.float32)(padded_batch(tiny_qwen))
    assert sorted(pinned) == sorted(id(value) for value in staged.values() if isinstance(value, Tensor))
    assert fake_cuda.calls == [("set_device", GPU)]  # of the calling thread
    assert staged["ids"] == ["a", "b"]


def test_the_loader_stages_in_its_own_thread() -> None:
    threads = list[str]()

    def stage(batch: dict[str, Any]) -> dict[str, Any]:
        threads.append(threading.current_thread().name)
        return batch | {"is_staged": True}

    loader = StepLoader(Numbers(4), collate_numbers, 2, 1, stage=stage)
    steps = iter(loader)
    assert all(batch["is_staged"] for batch in next(steps))
    steps.close()
    assert set(threads) == {"step-loader_0"}


def test_no_pass_of_a_training_step_builds_a_mask(tiny_target: sage.Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flash attention takes no mask, and one of a padded batch has B T^2 entries per layer."""
    calls: list[tuple[int, Any, bool]] = []
    attend = nn.functional.scaled_dot_product_attention

    def recorded(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, is_causal: bool = False, **kw: Any
    ) -> Tensor:
        calls.append((query.shape[-2], attn_mask, is_causal))
        return attend(query, key, value, attn_mask=attn_mask, is_causal=is_causal, **kw)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", recorded)
    batch = padded_batch(tiny_target)
    length = batch["input_ids"].shape[1]
    pairs = Teacher(tiny_target)(batch)
    make_student(tiny_target, "model")(pairs, Teacher(tiny_target).lm_head)
    text = [call for call in calls if call[0] == length]
    assert len(text) == tiny_target.num_layers + 1
    assert all(mask is None and is_causal for _, mask, is_causal in text)


def pairs_of_five() -> Pairs:
    ids = torch.arange(5.0)[None, :, None]
    return make_pairs(
        embeds=ids + 10,
        features=Features(ids, (ids + 20,)),
        position_ids=ids[..., 0],
        loss_mask=torch.tensor([[0, 0, 0, 1, 1]]),
        visual_mask=torch.tensor([[True, True, False, False, False]]),
        ends=torch.tensor([[False, False, True, False, False]]),
    )


def test_pairs_of_five_tokens_are_those_of_the_table() -> None:
    pairs = pairs_of_five()
    assert pairs.features.last.flatten().tolist() == [0, 1, 2]
    assert pairs.features.levels[0].flatten().tolist() == [20, 21, 22]
    assert pairs.embeds_next.flatten().tolist() == [11, 12, 13]
    assert pairs.features_next.flatten().tolist() == [1, 2, 3]
    assert pairs.position_ids.tolist() == [[0, 1, 2]]
    assert pairs.mask.tolist() == [[False, True, True]]
    assert pairs.pair_masks.visual.tolist() == [[True, False, False]]
    assert pairs.pair_masks.turn.tolist() == [[0, 0, 0]] and pairs.pair_masks.text.tolist() == [[False, False, False]]
    assert count_supervised(torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 0, 0]])) == 3  # the first two tokens have no pair


def test_three_axis_positions_are_cut_along_tokens() -> None:
    positions = torch.arange(30).reshape(3, 2, 5)
    embeds, mask = torch.zeros(2, 5, 4), torch.ones(2, 5, dtype=torch.bool)
    pairs = make_pairs(embeds, Features(embeds), positions, mask, ~mask, ~mask)
    assert torch.equal(pairs.position_ids, positions[:, :, :3])


def test_noise_is_bounded_on_every_level_and_not_added_to_the_features_to_predict() -> None:
    pairs = pairs_of_five()
    assert with_noise(pairs.features, 0.0) is pairs.features
    torch.manual_seed(0)
    noisy = with_noise(pairs.features, 0.1)
    for clean, noised in ((pairs.features.last, noisy.last), (pairs.features.levels[0], noisy.levels[0])):
        assert 0 < float((noised - clean).abs().max()) <= 0.1
    assert pairs.features_next.flatten().tolist() == [1, 2, 3]
