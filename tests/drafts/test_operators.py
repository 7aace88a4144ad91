"""Operators and layout of the visual compressor against loops over single pairs, in float64."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sage.drafts.compressor import Conv, Gate, Operator, Pool, Prune, Resampler, Weighted, hashed_uniform
from sage.drafts.spans import Layout, PairMasks, Rows, Spans
from sage.drafts.unroll import Chains

SIZES = SimpleNamespace(num_attention_heads=2, head_dim=3, hidden_size=4, initializer_range=0.5)
CHANNELS = 2 * SIZES.hidden_size
LENGTHS = (1, 2, 3, 7, 8)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def image_spans() -> tuple[Spans, Tensor, list[Tensor]]:
    """Returns spans of all lengths, their states padded with zeros, and the states of each span."""
    masks = torch.zeros(len(LENGTHS), 12, dtype=torch.bool)
    for row, length in enumerate(LENGTHS):
        masks[row, 2 : 2 + length] = True
    spans = Spans.of(masks)
    states = torch.randn(len(LENGTHS), 12, CHANNELS, dtype=torch.float64)
    return spans, spans.take(states), [states[row, 2 : 2 + length] for row, length in enumerate(LENGTHS)]


def randomised(module: nn.Module) -> Any:
    module.double()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def windows(span: Tensor, ratio: int) -> list[range]:
    return [range(start, min(start + ratio, len(span))) for start in range(0, len(span), ratio)]


def assert_rows(rows: Rows, expected: list[list[tuple[int, Tensor]]]) -> None:
    """Compares the valid rows of each span with (pair whose position the row has, state)."""
    for number, wanted in enumerate(expected):
        valid = rows.valid[number]
        assert rows.offset[number, valid].tolist() == [at for at, _ in wanted]
        if wanted:
            torch.testing.assert_close(rows.states[number, valid], torch.stack([state for _, state in wanted]))


@pytest.mark.parametrize("ratio", [1, 3, 20])
def test_pool_is_the_mean_of_each_window(ratio: int) -> None:
    spans, states, single = image_spans()
    expected = [
        [((w[0] + w[-1]) // 2, sum(span[i] for i in w) / len(w)) for w in windows(span, ratio)]  # type: ignore[misc]
        for span in single
    ]
    assert_rows(Pool(ratio)(states, spans, False), expected)


@pytest.mark.parametrize("ratio", [1, 3, 20])
def test_conv_weights_each_channel_and_is_initially_the_mean(ratio: int) -> None:
    spans, states, single = image_spans()
    conv = Conv(ratio, CHANNELS).double()
    for ours, theirs in zip(conv(states, spans, False), Pool(ratio)(states, spans, False), strict=True):
        torch.testing.assert_close(ours, theirs)
    weight = randomised(conv).weight
    expected = [
        [
            ((w[0] + w[-1]) // 2, sum(weight[:, tap] * span[i] for tap, i in enumerate(w)) * ratio / len(w))  # type: ignore[misc]
            for w in windows(span, ratio)
        ]
        for span in single
    ]
    assert_rows(conv(states, spans, False), expected)


@pytest.mark.parametrize("is_sampling", [True, False])
def test_prune_keeps_one_pair_of_each_window(is_sampling: bool) -> None:
    spans, states, single = image_spans()
    prune, seen = Prune(3), set()
    for _ in range(30):
        rows = prune(states, spans, is_sampling)
        for number, span in enumerate(single):
            at = rows.offset[number, rows.valid[number]].tolist()
            assert [place // 3 for place in at] == list(range(math.ceil(len(span) / 3))) and max(at) < len(span)
            assert torch.equal(rows.states[number, rows.valid[number]], span[at])
        seen.add(tuple(rows.offset[rows.valid].tolist()))
    assert (len(seen) > 1) == is_sampling


def test_fixed_pruning_is_evenly_distributed_in_the_windows() -> None:
    """The numbers are evenly distributed, and do not depend on the other images of the batch."""
    share = hashed_uniform(4000, torch.device("cpu"))
    assert torch.equal(hashed_uniform(10, torch.device("cpu")), share[:10]) and bool(((share >= 0) & (share < 1)).all())
    counts = (share * 20).long().bincount(minlength=20)
    assert int(counts.min()) > 150 and int(counts.max()) < 250
    assert abs(float(torch.corrcoef(torch.stack((share[1:], share[:-1])))[0, 1])) < 0.05


@pytest.mark.parametrize("queries", [1, 2, 5])
def test_resampler_attends_to_the_complete_span(queries: int) -> None:
    spans, states, single = image_spans()
    module = randomised(Resampler(queries, SIZES))
    assert_rows(module(states, spans, False), [resampled(module, span) for span in single])


def resampled(module: Resampler, span: Tensor) -> list[tuple[int, Tensor]]:
    eps, size = torch.finfo(torch.float64).eps, SIZES.head_dim
    halves = span.view(len(span), 2, -1)
    normed = (halves / (halves.square().mean(-1, keepdim=True) + eps).sqrt()).view_as(span)
    found, parts = [], min(len(module.queries), len(span))
    for number in range(parts):
        part = range(number * len(span) // parts, (number + 1) * len(span) // parts)
        heads = []
        for head in range(SIZES.num_attention_heads):
            cut = slice(head * size, head * size + size)
            keys, values = normed @ module.k_proj.weight[cut].T, normed @ module.v_proj.weight[cut].T
            weights = (keys @ module.queries[number, cut] / math.sqrt(size)).softmax(0)
            heads.append(weights @ values)
        found.append(((part[0] + part[-1]) // 2, span[list(part)].mean(0) + module.o_proj.weight @ torch.cat(heads)))
    return found


def test_text_only_removes_all_rows() -> None:
    spans, states, single = image_spans()
    assert_rows(Operator()(states, spans, False), [[] for _ in single])


def test_weighted_mixes_by_the_softmax_of_the_gate() -> None:
    spans, states, single = image_spans()
    operators = [Prune(3), randomised(Conv(3, CHANNELS)), Pool(3)]
    mode = Weighted(operators, SIZES)
    gate = randomised(mode.gate)
    question = torch.randn(len(single), CHANNELS, dtype=torch.float64)
    rows = mode(states, spans, question, False)
    parts = [operator(states, spans, False) for operator in operators]
    for number in range(len(single)):
        halves = question[number].view(2, -1)
        normed = (halves / halves.square().mean(-1, keepdim=True).sqrt()).flatten()
        inner = gate.inner.weight @ normed + gate.inner.bias
        scores = gate.outer.weight @ (inner / (1 + (-inner).exp())) + gate.outer.bias
        share = scores.exp() / scores.exp().sum()
        mixed = sum(share[i] * part.states[number] for i, part in enumerate(parts))
        torch.testing.assert_close(rows.states[number], mixed)
    assert torch.equal(rows.offset, parts[2].offset) and torch.equal(rows.valid, parts[2].valid)


def test_fresh_gate_scores_all_operators_equally() -> None:
    assert not Gate(CHANNELS, 4, 0.5)(torch.randn(3, CHANNELS)).any()


def test_pair_masks_of_two_turns() -> None:
    """v image, E end of turn, a answer; an image directly followed by an answer keeps its last pair."""
    tokens = "tvvvttEttaaEtvva"
    visual, ends, answer = (torch.tensor([[letter in kind for letter in tokens]]) for kind in ("v", "E", "a"))
    answer[0, 11] = True  # the answer's own end
    pair_masks = PairMasks.of(visual, ends, answer)
    assert text_of(pair_masks.visual) == ".xx............"
    assert text_of(pair_masks.text) == "....xx.x.xx...."
    assert "".join(str(turn) for turn in pair_masks.turn[0].tolist()) == "000000011222333"


def text_of(mask: Tensor) -> str:
    return "".join(".x"[int(is_set)] for is_set in mask[0])


@pytest.mark.parametrize("number", range(5))
def test_layout_of_random_sequences(number: int) -> None:
    """Every tensor of a layout against a loop over each sequence."""
    torch.manual_seed(number)
    visual, most = torch.rand(3, 14) < 0.5, 3
    spans = Spans.of(visual)
    valid = torch.arange(most) < torch.randint(0, most + 1, (len(spans.row), 1))
    at = (torch.rand(valid.shape) * spans.length[:, None]).long().sort(-1).values
    weight = torch.rand(len(spans.row))
    rows = Rows(torch.randn(*valid.shape, 5), at, valid, weight)
    layout = Layout(visual, spans, rows)
    states, positions, mask = torch.randn(3, 14, 5), torch.randint(0, 99, (3, 3, 14)), ~visual & (torch.rand(3, 14) < 0.5)
    short, placed, moved = layout.shorten(states, rows.states), layout.positions(positions), layout.move_mask(mask)
    assert int(moved.sum()) == int(mask.sum())
    for b in range(3):
        own = [s for s in range(len(spans.row)) if spans.row[s] == b]
        for q, (pair, span, nth, run) in enumerate(walk(visual[b], own, spans, rows)):
            assert torch.equal(placed[:, b, q], positions[:, b, pair])
            assert torch.equal(short[b, q], states[b, pair] if span is None else rows.states[span, nth])
            assert layout.weights(weight)[b, q] == (1 if span is None else weight[span])
            assert bool(moved[b, q]) == (span is None and bool(mask[b, pair]))
            assert span is not None or (int(layout.run_length[b, q]), int(layout.place[b, pair])) == (run, q)


def walk(visual: Tensor, own: list[int], spans: Spans, rows: Rows) -> list[tuple[int, int | None, int, int]]:
    """Returns for each row of one sequence: its pair, its span, its index in the span, and the text pairs before it."""
    found: list[tuple[int, int | None, int, int]] = []
    run = 0
    for pair in range(len(visual)):
        if not visual[pair]:
            found.append((pair, None, 0, run))
        run = 0 if visual[pair] else run + 1
        for s in own:
            if int(spans.start[s]) == pair:
                found += [(pair + int(rows.offset[s, n]), s, n, 0) for n in rows.valid[s].nonzero()[:, 0].tolist()]
    return found


def test_weight_scales_the_attention_value_not_the_score() -> None:
    """Step 0 and a chained step against dense attention over scaled values."""
    query, key, value = (torch.randn(2, heads, 6, 4, dtype=torch.float64) for heads in (4, 2, 2))
    weight = torch.rand(2, 6, dtype=torch.float64)
    chains = Chains(weight)
    first = chains.attend(query, key, value)
    later = [torch.randn(2, heads, 5, 4, dtype=torch.float64) for heads in (4, 2, 2)]
    second = chains.attend(*later)
    for b in range(2):
        for head in range(4):
            for row in range(6):
                scores = (key[b, head // 2, : row + 1] @ query[b, head, row] / 2).softmax(0)
                torch.testing.assert_close(
                    first[b, head, row], (scores * weight[b, : row + 1]) @ value[b, head // 2, : row + 1]
                )
            for row in range(5):
                keys = torch.cat((key[b, head // 2, : row + 1], later[1][b, head // 2, row : row + 1]))
                values = torch.cat((value[b, head // 2, : row + 1], later[2][b, head // 2, row : row + 1]))
                scores = (keys @ later[0][b, head, row] / 2).softmax(0)
                scaled = scores * torch.cat((weight[b, : row + 1], torch.ones(1, dtype=torch.float64)))
                torch.testing.assert_close(second[b, head, row], scaled @ values)
