"""Drafts with a visual compressor: training equals decoding, the gate, and lossless decoding."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compressor_helpers import (
    COMPRESSORS,
    CONVERSATIONS,
    draft_with,
    example,
    prompt_of,
    starts_of_answers,
    together,
    words,
)
from support.messages import refused
from support.models import EOS, MAKERS, in_double
from torch import Tensor

import sage
from sage.drafts.compressor import Compressor, Single, check_compressor, gumbel
from sage.drafts.draft import new_session
from sage.drafts.spans import HeadInput
from sage.targets import Features, Prompt
from train.distill.teacher import Pairs, Teacher

LEVELS = (1, 2, 3)
STEPS = 3
KINDS = ("eagle", "eagle3")
GATED = ("weighted", "select")
CASES = [*(("eagle3", mode) for mode in COMPRESSORS), ("eagle", "select")]  # a head only fuses features in its own way


@dataclass
class World:
    """A target in float64, all conversations as one training batch, and every prompt that it would decode from them.

    Attributes:
        prompts: (sequence of the batch, first token of the answer, prompt, its features).
        inputs: of the prompt with two images; `answer`: the greedy answer of the target.
    """

    target: sage.Target
    batch: dict[str, Tensor]
    pairs: Pairs
    prompts: list[tuple[int, int, Prompt, Features]]
    inputs: dict[str, Tensor]
    answer: Tensor

    def shorten(self, draft: Any, pairs: Pairs | None = None) -> HeadInput:
        pairs = pairs or self.pairs
        return draft.shorten(pairs.embeds_next, draft.fuse(pairs.features), pairs.position_ids, pairs.pair_masks)

    def pairs_of(self, pieces: list[Any]) -> Pairs:
        return Teacher(self.target, levels=LEVELS)(in_double(example(self.target, pieces)))


@pytest.fixture(scope="module", params=MAKERS)
def world(request: pytest.FixtureRequest) -> World:
    generator = torch.get_rng_state()
    target = MAKERS[request.param]()
    target.model.double()
    examples = {name: in_double(example(target, pieces)) for name, pieces in CONVERSATIONS.items()}
    batch = together(target, list(examples.values()))
    prompts = []
    for number, full in enumerate(examples.values()):
        for start in starts_of_answers(full["loss_mask"]):
            prompt = target.embed(in_double(prompt_of(target, full, start)))
            prompts.append((number, start, prompt, target.features(prompt, LEVELS)))
    full = examples["two images"]
    inputs = in_double(prompt_of(target, full, starts_of_answers(full["loss_mask"])[0]))
    answer = sage.generate(target, None, inputs, policy="autoregressive", max_new_tokens=10).tokens
    torch.set_rng_state(generator)
    return World(target, batch, Teacher(target, levels=LEVELS)(batch), prompts, inputs, answer)


def compressed(world: World, kind: str, mode: str | None, seed: int = 0) -> Any:
    return draft_with(world.target, kind, COMPRESSORS[mode] if mode else None, seed).double()


@torch.no_grad()
def make_undecided(draft: Any) -> None:
    """Sets a gate that gives every operator the same probability for any question."""
    gate = draft.compressor.mode.gate
    gate.outer.weight *= 1e-3
    gate.outer.bias.zero_()


def assert_equal(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("kind", "mode"), CASES)
@torch.no_grad()
def test_training_equals_the_session(world: World, kind: str, mode: str) -> None:
    """A padded batch of images, videos, text and turns against each of its prompts alone: rows, positions, outputs; then the
    session's drafted chain, and its logits after the target's features have replaced the drafted ones."""
    draft = compressed(world, kind, mode)
    short = world.shorten(draft)
    assert short.layout is not None
    unrolled = draft.unroll(short, STEPS)
    seen: list[Any] = []
    hook = draft.register_forward_pre_hook(lambda _, args: seen.append(args))
    for number, start, prompt, features in world.prompts:
        ids = world.batch["input_ids"][number]
        session = new_session(draft, world.target, 64)
        session.prefill(prompt, features, ids[start : start + 1])
        (embeds, fused, positions), rows = seen[-1][:3], session.context
        assert rows == embeds.shape[1] == int(short.layout.place[number, start - 1]) + 1
        assert torch.equal(positions[..., 0, :], short.position_ids[..., number, :rows])
        assert_equal(embeds[0], short.embeds_next[number, :rows])
        assert_equal(fused[0], short.features[number, :rows])
        for step in range(STEPS):
            if step:
                session.expand(torch.tensor([0]), ids[start + step : start + step + 1])
            assert_equal(session.hidden[0], unrolled[step][number, rows - 1])
        read = [
            states[number : number + 1, start : start + 2]
            for states in (world.pairs.features.last, *world.pairs.features.levels)
        ]
        session.commit(Features(read[0], tuple(read[1:])), ids[start + 1 : start + 3])
        assert_equal(session.hidden[0], unrolled[0][number, rows + 1])
    hook.remove()


@pytest.mark.parametrize(("kind", "mode"), CASES)
def test_decoding_is_lossless_and_the_context_shorter(world: World, kind: str, mode: str, tmp_path: Path) -> None:
    draft = compressed(world, kind, mode)
    draft.save_pretrained(tmp_path)
    loaded: Any = sage.load_draft(tmp_path, world.target)
    assert loaded.config.compressor == COMPRESSORS[mode]
    out, other = (sage.generate(world.target, one, world.inputs, "static", max_new_tokens=10) for one in (loaded, draft))
    assert torch.equal(out.tokens, world.answer)
    assert out.stats.prompt_tokens == world.inputs["input_ids"].shape[1]
    assert out.stats.draft_context < out.stats.prompt_tokens or mode == "concat"  # these images are tiny
    assert out.stats.accepted == other.stats.accepted


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_kind_none_changes_nothing(world: World, kind: str, tmp_path: Path) -> None:
    """Bit for bit: the tensors, weights and config of a draft without compressor."""
    draft, pairs = compressed(world, kind, None), world.pairs
    fused = draft.fuse(pairs.features)
    short = draft.shorten(pairs.embeds_next, fused, pairs.position_ids, pairs.pair_masks)
    assert short.embeds_next is pairs.embeds_next and short.features is fused and short.position_ids is pairs.position_ids
    assert short.weight is None and short.run_length is None and short.move_mask(pairs.mask) is pairs.mask
    assert "compressor" not in draft.config.to_dict() and not any("compressor" in name for name in draft.state_dict())
    options: dict[str, Any] = {"feature_levels": list(LEVELS)} if kind == "eagle3" else {}
    fresh, other = (
        sage.new_draft(world.target, kind, seed=5, compressor=one, **options) for one in (None, {"kind": "pool", "ratio": 2})
    )
    for name, value in fresh.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    out = sage.generate(world.target, draft, world.inputs, "static", max_new_tokens=4)
    assert out.stats.draft_context == out.stats.prompt_tokens


@pytest.mark.parametrize("mode", COMPRESSORS)
def test_text_batch_is_unchanged_and_reaches_every_weight(world: World, mode: str) -> None:
    draft = compressed(world, "eagle", mode).train()
    pairs = world.pairs_of(CONVERSATIONS["text only"])
    short = world.shorten(draft, pairs)
    assert torch.equal(short.embeds_next, pairs.embeds_next) and short.layout is None
    if short.embeds_next.requires_grad:
        short.embeds_next.sum().backward()
    for name, parameter in draft.compressor.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


@pytest.mark.parametrize("mode", [mode for mode in COMPRESSORS if mode not in ("prune", "pool", "text_only")])
def test_training_reaches_every_weight_of_a_compressor(world: World, mode: str) -> None:
    draft = compressed(world, "eagle3", mode).train()
    if mode == "select":
        make_undecided(draft)
    torch.manual_seed(0)
    for _ in range(4 if mode == "select" else 1):
        short = world.shorten(draft)
        steps = draft.unroll(short, 2)
        torch.stack([step.square().sum() for step in steps]).sum().backward()
    silent = {name for name, p in draft.compressor.named_parameters() if p.grad is None or not p.grad.any()}
    assert silent == set()


class TestGate:
    """The gate's scores depend on the question."""

    @staticmethod
    def scores_of(world: World, draft: Any, pieces: list[Any]) -> Tensor:
        seen: list[Tensor] = []
        hook = draft.compressor.mode.gate.register_forward_hook(lambda _, args, out: seen.append(out))
        with torch.no_grad():
            world.shorten(draft, world.pairs_of(pieces))
        hook.remove()
        return seen[0]

    @pytest.mark.parametrize("mode", GATED)
    def test_gate_reads_only_the_question(self, world: World, mode: str) -> None:
        """Only the turn of the image counts: not its answer, nor later turns, whose features depend on the image too."""
        draft = compressed(world, "eagle", mode)
        turn = [words(3, 1), "image", words(4, 2), [EOS], words(2, 3)]
        scores = self.scores_of(world, draft, [*turn, (*words(4, 4), EOS)])
        later = [*turn, (*words(6, 14), EOS), words(5, 15), [EOS], (*words(3, 16), EOS)]
        assert_equal(self.scores_of(world, draft, later), scores)
        question = [words(3, 1), "image", words(4, 99), [EOS], words(2, 3), (*words(4, 4), EOS)]
        other = self.scores_of(world, draft, question)
        assert (other - scores).abs().max() > 1e-3

    @pytest.mark.parametrize("best", [0, 3])
    @torch.no_grad()
    def test_decoding_selects_the_highest_score(self, world: World, best: int) -> None:
        draft = compressed(world, "eagle", "select")
        mode = draft.compressor.mode
        mode.gate.outer.bias[best] += 1e3
        alone = Compressor(draft.config)
        alone.mode = Single([mode.operators[best]], None)
        ours, pairs = world.shorten(draft), world.pairs
        theirs = alone(pairs.embeds_next, draft.fuse(pairs.features), pairs.position_ids, pairs.pair_masks)
        assert torch.equal(ours.features, theirs.features) and torch.equal(ours.position_ids, theirs.position_ids)
        assert ours.weight is None

    def test_training_samples_and_decoding_does_not(self, world: World) -> None:
        torch.manual_seed(0)
        scores = torch.tensor([1.0, 0.0, -1.0, 0.5])
        share = (scores + gumbel(scores.expand(20000, 4))).argmax(-1).bincount(minlength=4) / 20000
        torch.testing.assert_close(share, scores.softmax(-1), rtol=0, atol=0.015)
        draft = compressed(world, "eagle", "select")
        make_undecided(draft)
        layouts = [world.shorten(draft.train()).layout for _ in range(8)]
        assert len({tuple(layout.source.flatten().tolist()) for layout in layouts if layout is not None}) > 1
        state = torch.get_rng_state()
        first, second = (world.shorten(draft.eval()).features for _ in range(2))
        assert torch.equal(first, second) and torch.equal(torch.get_rng_state(), state)

    def test_sample_weight_is_one_with_the_gradient_of_the_relaxed_share(self, world: World) -> None:
        """A score's gradient: d loss / d weight of the chosen operator's rows, times d share / d score."""
        draft = compressed(world, "eagle", "select").train()
        pairs = world.pairs_of(CONVERSATIONS["image"])
        caught: dict[str, Tensor] = {}

        def catch(_: Any, __: Any, out: Tensor) -> None:
            out.retain_grad()
            caught["scores"] = out

        draft.compressor.mode.gate.register_forward_hook(catch)
        torch.manual_seed(3)
        short = world.shorten(draft, pairs)
        assert short.weight is not None and bool((short.weight == 1).all())
        short.weight.retain_grad()
        draft.unroll(short)[0].square().sum().backward()
        torch.manual_seed(3)
        share = ((caught["scores"].detach().float() + gumbel(caught["scores"])) / draft.compressor.mode.temperature).softmax(
            -1
        )[0]
        chosen = int(share.argmax())
        assert short.layout is not None and short.weight.grad is not None and caught["scores"].grad is not None
        is_made = torch.zeros_like(short.weight, dtype=torch.bool)
        is_made[short.layout._batch, short.layout._slot] = True
        slope = share[chosen] * (torch.eye(4)[chosen] - share)
        expected = short.weight.grad[is_made].sum() * slope.double()
        torch.testing.assert_close(caught["scores"].grad[0], expected, rtol=1e-4, atol=1e-6)


class TestMistakes:
    @pytest.mark.parametrize(
        ("given", "parts"),
        [
            ({"kind": "blur", "ratio": 2}, ("draft.compressor.kind: 'blur'", "prune, pool")),
            ({"kind": "pool"}, ("draft.compressor.ratio: missing", "pool")),
            ({"kind": "text_only", "ratio": 2}, ("draft.compressor.ratio: unknown", "text_only")),
            ({"kind": "pool", "ratio": 0}, ("draft.compressor.ratio: 0", "at least 1")),
            ({"kind": "pool", "ratio": 2.5}, ("draft.compressor.ratio: 2.5", "at least 1")),
            ({"kind": "resampler", "queries": True}, ("draft.compressor.queries: True", "at least 1")),
            ({**COMPRESSORS["select"], "temperature": 0}, ("draft.compressor.temperature: 0", "above 0")),
        ],
    )
    def test_an_invalid_compressor_is_named(self, given: dict[str, Any], parts: tuple[str, ...]) -> None:
        with refused(*parts):
            check_compressor(given)

    def test_a_draft_with_a_compressor_cannot_be_pruned(self, world: World) -> None:
        draft = compressed(world, "eagle", "pool")
        with refused("pruning.ratio: 0.5", "(pool)"):
            sage.generate(world.target, draft, world.inputs, pruning=sage.Pruning(0.5))

    def test_weights_of_another_compressor_are_refused(self, world: World, tmp_path: Path) -> None:
        compressed(world, "eagle", "conv").save_pretrained(tmp_path)
        config = tmp_path / "config.json"
        config.write_text(config.read_text().replace('"conv"', '"pool"'))
        with refused("config", "compressor.mode.operator.weight"):
            sage.load_draft(tmp_path, world.target)
