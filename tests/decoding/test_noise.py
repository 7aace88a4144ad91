"""Noise by seed, position and token: distribution, independence, equality in every layout, and no traffic with the device."""

import math

import pytest
import torch
from support.accelerator import DEVICE, Traffic, on_device, on_host

from sage.decoding import noise
from sage.decoding.noise import PositionNoise, gumbel, seed_key

POSITIONS, TOKENS = 64, 4096


def uniforms(seed: int = 0, positions: int = POSITIONS, tokens: int = TOKENS) -> torch.Tensor:
    """The noise as uniform variables, float64 [P, V]."""
    return (-(-gumbel(seed, torch.arange(positions), tokens).double()).exp()).exp()


def slow_bits(seed: int, position: int, token: int) -> int:
    """The hash by Python integers, one number at a time."""

    def mix(x: int) -> int:
        x = (x ^ x >> 16) * 0x21F0AAAD % 2**32
        x = (x ^ x >> 15) * 0xD35A2D97 % 2**32
        return x ^ x >> 15

    key = mix(seed % 2**32 ^ mix(seed // 2**32 % 2**32))
    x = (mix(token) ^ mix(mix(position) ^ key)) * 0x21F0AAAD % 2**32
    x = (x ^ x >> 15) * 0xD35A2D97 % 2**32
    x -= 2**32 * (x >= 2**31)
    return x ^ x >> 15


@pytest.mark.parametrize("seed", [0, 1, -5, 2**40 + 3, 2**31])
def test_noise_is_minus_log_of_minus_log1p_of_the_hash(seed: int) -> None:
    """Against Python integers and float64: 31 bits b are the uniform variable (b + 1/2) / 2^31, up to float32 rounding of v."""
    found = gumbel(seed, torch.tensor([0, 7, 100_000]), 300)
    expected = [
        [-math.log(-math.log1p(-(slow_bits(seed, position, token) + 0.5) / 2**31)) for token in range(300)]
        for position in (0, 7, 100_000)
    ]
    torch.testing.assert_close(found.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-3)


def test_extreme_bits_give_finite_noise() -> None:
    """The smallest v of 2^-32 and the largest, below 1 after rounding."""
    values = torch.tensor([0.0, 1.0, 2.0**31 - 1])
    noise._to_gumbel(values)
    assert values.isfinite().all()
    assert values[0] == pytest.approx(32 * math.log(2), abs=1e-3) and values.min() > -3


def test_the_noise_is_gumbel() -> None:
    """Kolmogorov-Smirnov; the 0.1% quantile of sqrt(n) D is 1.95. Chi-square of 256 cells: mean 255, deviation 22.6."""
    u = uniforms().flatten()
    count = len(u)
    ideal = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    assert float((u.sort().values - ideal).abs().max()) * math.sqrt(count) < 1.95
    cells = (u * 256).long().bincount(minlength=256).double()
    assert abs(float(((cells - count / 256) ** 2 / (count / 256)).sum()) - 255) < 5 * 22.6


def test_positions_tokens_and_seeds_are_independent() -> None:
    """Correlations of uniform variables in units of their deviation; the largest of 5000 normal ones is below 4.8 or so."""
    u = (uniforms() - 0.5) * math.sqrt(12)
    positions = u @ u.T / math.sqrt(TOKENS)
    assert float(positions.triu(1).abs().max()) < 5.5
    few = u[:, :100]
    assert float((few.T @ few / math.sqrt(POSITIONS)).triu(1).abs().max()) < 5.5
    others = [(uniforms(seed) - 0.5) * math.sqrt(12) for seed in (1, 2, 2**32, -1)]
    assert max(abs(float((u * other).mean())) * math.sqrt(u.numel()) for other in others) < 5


def test_equal_in_every_layout_and_slice_of_the_vocabulary() -> None:
    everything = gumbel(9, torch.arange(20), 700)
    assert torch.equal(gumbel(9, torch.tensor([17, 3, 3]), 700), everything[[17, 3, 3]])
    assert torch.equal(gumbel(9, torch.arange(20), 50), everything[:, :50])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "CHUNK", 1)
        assert torch.equal(gumbel(9, torch.arange(20), 700), everything)


def test_seeds_have_their_own_noise() -> None:
    assert len({seed_key(seed) for seed in range(20_000)}) == 20_000, "a permutation of 32 bits"
    assert seed_key(2**32) != seed_key(0) and seed_key(-1) == seed_key(2**64 - 1)


def test_noise_by_position_equals_the_function_and_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []

    def counted(seed: int, positions: torch.Tensor, tokens: int) -> torch.Tensor:
        computed.extend(positions.tolist())
        return gumbel(seed, positions, tokens)

    monkeypatch.setattr(noise, "gumbel", counted)
    found = PositionNoise(5, 40, torch.device("cpu"))
    for first, count in ((0, 1), (1, 6), (1, 1), (4, 70), (60, 9), (60, 200)):
        assert torch.equal(found(first, count), gumbel(5, torch.arange(first, first + count), 40))
    assert computed == list(range(len(computed))), "every position once"
    assert torch.equal(found(2, 3), gumbel(5, torch.arange(2, 5), 40)), "a step back starts anew"


def test_the_noise_neither_waits_nor_transfers(traffic: Traffic) -> None:
    ours = PositionNoise(3, 5000, DEVICE)
    rows = [ours(first, 6) for first in range(0, 80, 5)]
    assert not traffic.lines, traffic.table()
    assert torch.equal(
        on_host(torch.cat(rows[:2])), torch.cat((gumbel(3, torch.arange(6), 5000), gumbel(3, torch.arange(5, 11), 5000)))
    )
    assert torch.equal(on_host(gumbel(3, on_device(torch.tensor([4])), 5000)), gumbel(3, torch.tensor([4]), 5000))
