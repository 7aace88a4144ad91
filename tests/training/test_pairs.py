"""The index shift from sequences to pairs, worked out by hand."""

from __future__ import annotations

import torch

from sage.targets.target import Features
from train.distill.pairs import Pairs, count_supervised, make_pairs, with_noise


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
