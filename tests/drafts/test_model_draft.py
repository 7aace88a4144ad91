"""A smaller model as the draft, and pruning of the visual tokens that a draft reads."""

import pytest
import torch
from support.messages import refused
from support.models import MAKERS, followed_by, greedy_text, in_float64, make_inputs, make_qwen, random_draft
from support.processors import make_processor
from transformers import PreTrainedTokenizerFast

import sage
from sage.drafts.model import ModelDraft, ModelSession
from sage.drafts.pruning import two_stage_indices, uniform_indices

LENGTH = 24


@pytest.mark.parametrize(("family", "policy"), [("qwen2_5_vl", "chain"), ("llava_onevision", "eagle2")])
@pytest.mark.slow
def test_any_model_drafts_losslessly(family: str, policy: str) -> None:
    """The target as its own draft and an unrelated model both give the target's text."""
    target = MAKERS[family]()
    inputs = in_float64(target, make_inputs(target))
    expected = greedy_text(target, inputs, LENGTH)
    for seed, is_itself in ((0, True), (7, False)):
        other = MAKERS[family](seed=seed)
        other.model.double()
        out = sage.generate(target, ModelDraft(other, target), inputs, policy=policy, max_new_tokens=LENGTH)
        assert out.tokens.tolist() == expected
        if is_itself and policy == "chain":
            assert set(out.stats.accepted[:-1]) == {5}


def test_commit_equals_a_fresh_prefill(tiny_target: sage.Target) -> None:
    inputs = in_float64(tiny_target, make_inputs(tiny_target))
    prompt = tiny_target.embed(inputs)
    session = ModelSession(ModelDraft(tiny_target, tiny_target), tiny_target, 64)
    session.prefill(prompt, None, torch.tensor([5]))
    session.expand(torch.tensor([0, 0]), torch.tensor([9, 8]))
    found = session.commit(None, torch.tensor([6, 7]))
    again = followed_by(tiny_target, inputs, torch.tensor([5, 6, 7]))
    fresh = tiny_target.lm_head(tiny_target.features(tiny_target.embed(again)).last[:, -1])
    torch.testing.assert_close(found, fresh, atol=1e-10, rtol=0)


@pytest.mark.parametrize(("method", "ratio"), [("attention", 0.3), ("uniform", 1.0), ("random", 0.3)])
def test_pruning_changes_the_draft_and_never_the_output(method: str, ratio: float, tiny_target: sage.Target) -> None:
    inputs = in_float64(tiny_target, make_inputs(tiny_target))
    expected = greedy_text(tiny_target, inputs, 12)
    pruning = sage.Pruning(ratio, method)
    for draft in (random_draft(tiny_target, seed=0), ModelDraft(tiny_target, tiny_target)):
        out = sage.generate(tiny_target, draft, inputs, policy="sage", max_new_tokens=12, pruning=pruning)
        assert out.tokens.tolist() == expected


def test_kept_tokens_are_the_text_and_the_budget(tiny_target: sage.Target) -> None:
    prompt = tiny_target.embed(make_inputs(tiny_target))
    features = tiny_target.prefill(prompt, tiny_target.new_cache(64), wants_attention=True)
    num_visual = int(prompt.visual_mask.sum())
    for ratio in (0.0, 0.5, 0.9, 1.0):
        kept = sage.Pruning(ratio)(prompt, features).kept
        if ratio == 0:
            assert kept is None
            continue
        is_visual = prompt.visual_mask[0, kept]
        assert int(is_visual.sum()) == int(num_visual * (1 - ratio))
        assert int((~is_visual).sum()) == int((~prompt.visual_mask).sum())
        pruned = prompt.at(kept)
        assert torch.equal(pruned.position_ids, prompt.position_ids[..., kept])


def test_recorded_attention_is_the_eager_models(tiny_target: sage.Target) -> None:
    """Recorded attention equals the attention weights of transformers."""
    prompt = tiny_target.embed(in_float64(tiny_target, make_inputs(tiny_target)))
    found = tiny_target.prefill(prompt, tiny_target.new_cache(64), wants_attention=True).attention
    tiny_target.model.set_attn_implementation("eager")
    out = tiny_target.text_model(
        inputs_embeds=prompt.embeds, position_ids=prompt.position_ids, output_attentions=True, use_cache=False
    )
    visual = prompt.visual_mask[0].nonzero()[:, 0]
    weights = torch.stack(out.attentions)[:, 0, :, int(visual[-1]) + 1 :]
    torch.testing.assert_close(found.double(), weights[..., visual].mean((0, 1, 2)), atol=1e-6, rtol=0)


def test_two_stage_indices_by_hand() -> None:
    """Scores .3 .2 .1 .1 .1 .1 .05 .05 sum to 1: .3 is below 40%, .5 is not, so two are selected by attention; of the other
    six, a budget of four selects two evenly: the second and the fifth (indices 3 and 6)."""
    scores = torch.tensor([0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05])
    assert two_stage_indices(scores, 4).tolist() == [0, 1, 3, 6]
    assert two_stage_indices(scores, 1).tolist() == [0]
    assert two_stage_indices(scores, 0).tolist() == []


def test_uniform_indices_are_even_and_distinct() -> None:
    assert uniform_indices(10, 5).tolist() == [1, 3, 5, 7, 9]
    for count in range(1, 20):
        for budget in range(count + 1):
            picks = uniform_indices(count, budget).tolist()
            assert len(set(picks)) == budget
            assert all(0 <= pick < count for pick in picks)


class TestMistakes:
    def test_vocabularies(self, tiny_qwen: sage.Target) -> None:
        other = make_qwen(seed=1)
        other.vocab_size = 400
        with refused("draft: ", "400", "330"):
            ModelDraft(other, tiny_qwen)

    def test_another_family(self, tiny_qwen: sage.Target, tiny_llava: sage.Target) -> None:
        with refused("draft: ", "llava_onevision", "qwen2_5_vl"):
            ModelDraft(tiny_llava, tiny_qwen)

    @pytest.mark.parametrize(
        ("options", "message"),
        [({"ratio": 1.5}, "pruning.ratio: 1.5"), ({"ratio": 0.5, "method": "best"}, "pruning.method: 'best'")],
    )
    def test_pruning_options(self, options: dict[str, object], message: str) -> None:
        with refused(message):
            sage.Pruning(**options)  # type: ignore[arg-type]


def test_padding_of_the_vocabulary_may_differ(tiny_qwen: sage.Target) -> None:
    """A draft with a shorter lm_head never drafts the missing tokens; a longer lm_head is truncated."""
    for rows in (320, 340):
        small = make_qwen(seed=3)
        small.model.resize_token_embeddings(rows, mean_resizing=False)
        session = ModelSession.__new__(ModelSession)
        session.model, session.vocab_size = sage.Target(small.model), tiny_qwen.vocab_size
        logits = session._fitted(session.model.lm_head(torch.randn(2, 32)))
        assert logits.shape == (2, 330)
        assert bool(logits[:, 320:].isneginf().all()) == (rows == 320)


def test_different_vocabularies_are_refused(tiny_qwen: sage.Target) -> None:
    first, second = (sage.Target(make_qwen().model, make_processor(tiny_qwen)) for _ in range(2))
    assert ModelDraft(first, second).model is first
    tokenizer = second.processor.tokenizer
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    tokenizer.add_tokens(["extra"])
    with refused("draft: ", "vocabularies"):
        ModelDraft(first, second)
