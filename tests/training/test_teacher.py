"""The teacher's features of padded batches against a masked reference, and its attention calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import padded_batch
from torch import Tensor, nn

import sage
from sage.drafts.model import ModelDraft, shallow_model
from sage.targets.target import Features
from train.config.schema import ObjectiveConfig
from train.distill.objective import Objective
from train.distill.student import ModelStudent
from train.distill.teacher import Teacher


def masked_features(target: sage.Target, batch: dict[str, Any], level: int) -> Features:
    """As Hugging Face computes them from the padding mask, with materialized softmax."""
    prompt = target.embed(batch)
    target.text_config._attn_implementation = "eager"
    out = target.text_model(
        inputs_embeds=prompt.embeds,
        position_ids=prompt.position_ids,
        attention_mask=prompt.attention_mask,
        use_cache=False,
        output_hidden_states=True,
    )
    target.text_config._attn_implementation = "sdpa"
    return Features(out.last_hidden_state, (out.hidden_states[level],))


def test_features_of_a_padded_batch_equal_the_masked_reference(tiny_target: sage.Target) -> None:
    batch = padded_batch(tiny_target)
    found = tiny_target.features(tiny_target.embed(batch), [1])
    tiny_target.model.double()
    expected = masked_features(tiny_target, {**batch, "pixel_values": batch["pixel_values"].double()}, 1)
    real = batch["attention_mask"].bool()
    assert not real.all()
    for mine, theirs in zip((found.last, *found.levels), (expected.last, *expected.levels), strict=True):
        torch.testing.assert_close(mine[real].double(), theirs[real], rtol=1e-4, atol=1e-5)  # float32 against float64


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
    student = ModelStudent(shallow_model(tiny_target, 1), Objective(ObjectiveConfig(ce_weight=1.0, feature_weight=0.0)))
    assert isinstance(student.decoding_draft, ModelDraft)
    student(pairs, Teacher(tiny_target).lm_head)
    text = [call for call in calls if call[0] == length]
    assert len(text) == tiny_target.num_layers + 1
    assert all(mask is None and is_causal for _, mask, is_causal in text)
