"""Gumbel noise as a hash of seed, position and token.

A counter-based generator: every number is a function of its three coordinates alone, computed in int32 arithmetic, which wraps
around equally on every device, and float32. Batch, order and slice of the vocabulary make no difference, nothing is drawn on
the host, and no data is transferred to the device.

* Hash: h(x) = C. Wellons' two-round 32-bit permutation with the smallest measured bias. The bits of (seed, position, token) are
  m(h(token) ^ h(h(position) ^ key(seed))), m being h without its first step, which mixes what h(token) already is, and with the
  sign copied in its last one, which leaves 31 bits. Tokens that share bits, within a position or across two, are as rare as for
  random numbers.
* Gumbel: with 31 bits as v in (0, 1), E = -log1p(-v) is an Exp(1) variable and -log E is Gumbel(0, 1). `log1p` resolves small
  E, which decide the draws: E is exact to rounding down to 2^-32. Tokens of probability below 2^-31 are drawn too rarely, by a
  total variation of at most V / 2^31 (7e-5 for V = 152064).

Ref: 32-bit hash, https://github.com/skeeto/hash-prospector (public domain); counter-based random numbers, Salmon et al., SC
2011; Gumbel-max, Maddison et al., arXiv 1411.0030.

Shapes: P positions, V vocabulary.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

SHIFTS = (16, 15, 15)
MULTIPLIERS = (0x21F0AAAD, 0xD35A2D97)
WORD = 2**32
UNIT = 2.0**-31 * (1 - 2.0**-23)  # keeps v below 1 after rounding to float32
CHUNK = 2**17  # elements per pass over the CPU's caches
MIN_ROWS, MAX_ROWS, BLOCK = 8, 64, 2**16  # of a block of positions, and its number of elements between these limits


def gumbel(seed: int, positions: Tensor, num_tokens: int) -> Tensor:
    """Returns Gumbel(0, 1) noise, float32 [P, V], of integer `positions` [P] and tokens 0 to `num_tokens - 1`."""
    keys = _hash(_hash(positions.to(torch.int32)) ^ _signed(seed_key(seed)))
    tokens = _token_bits(num_tokens, keys.device)
    rows = max(1, CHUNK // num_tokens) if keys.device.type == "cpu" else len(keys)
    out = torch.empty(len(keys), num_tokens, device=keys.device)
    scratch = torch.empty(2, min(rows, len(keys)), num_tokens, dtype=torch.int32, device=keys.device)
    for part, noise in zip(keys.split(rows), out.split(rows), strict=True):
        bits, spare = scratch[:, : len(part)]
        _mix(torch.bitwise_xor(tokens, part[:, None], out=bits), spare)
        _to_gumbel(noise.copy_(bits))
    return out


def seed_key(seed: int) -> int:
    """Returns 32 bits of a seed; those of all seeds below 2^32 are distinct."""
    low, high = seed % WORD, seed // WORD % WORD
    return _hash_number(low ^ _hash_number(high))


class PositionNoise:
    """The noise of one request by position, computed in blocks and kept while it is in use.

    Draft and target ask for the same positions, so the noise of a position is computed once.
    """

    def __init__(self, seed: int, num_tokens: int, device: torch.device) -> None:
        self.seed, self.num_tokens, self.device = seed, num_tokens, device
        self.block = min(max(BLOCK // num_tokens, MIN_ROWS), MAX_ROWS)
        self._first = 0
        self._rows = torch.empty(0, num_tokens, device=device)

    def __call__(self, first: int, count: int) -> Tensor:
        """Returns the noise [count, V] of the positions from `first` on; earlier positions are dropped."""
        end = self._first + len(self._rows)
        if not self._first <= first <= end:
            self._first = end = first
            self._rows = self._rows[:0]
        if first + count > end:
            positions = torch.arange(end, max(first + count, end + self.block), device=self.device)
            fresh, kept = gumbel(self.seed, positions, self.num_tokens), self._rows[first - self._first :]
            self._first, self._rows = first, torch.cat((kept, fresh)) if len(kept) else fresh
        return self._rows.narrow(0, first - self._first, count)


@lru_cache(maxsize=8)
def _token_bits(num_tokens: int, device: torch.device) -> Tensor:
    """Hashed token ids, int32 [V]; do not modify the result."""
    return _hash(torch.arange(num_tokens, dtype=torch.int32, device=device))


def _to_gumbel(numbers: Tensor) -> None:
    """Turns numbers in [0, 2^31) into Gumbel noise, float32, in place."""
    offset = torch.full((), -(2.0**-32), device=numbers.device)
    torch.sub(offset, numbers, alpha=UNIT, out=numbers)  # -v; `rsub` has no `out`
    numbers.log1p_().neg_().log_().neg_()


def _hash(x: Tensor) -> Tensor:
    """Hashes int32 in place. `>>` of int32 copies the sign, hence the masks."""
    _shift_in(x, SHIFTS[0])
    x *= _signed(MULTIPLIERS[0])
    _shift_in(x, SHIFTS[1])
    x *= _signed(MULTIPLIERS[1])
    _shift_in(x, SHIFTS[2])
    return x


def _mix(x: Tensor, spare: Tensor) -> None:
    """Turns int32 of hashed bits into numbers in [0, 2^31), in place; `spare` is memory of the same shape.

    Every pass over the vocabulary counts, and new memory for a result costs more than the pass.
    """
    x *= _signed(MULTIPLIERS[0])
    _shift_in(x, SHIFTS[1], spare)
    x *= _signed(MULTIPLIERS[1])
    x ^= torch.bitwise_right_shift(x, SHIFTS[2], out=spare)  # clears the sign: two numbers for every result


def _shift_in(x: Tensor, shift: int, spare: Tensor | None = None) -> None:
    x ^= torch.bitwise_right_shift(x, shift, out=spare).bitwise_and_((1 << 32 - shift) - 1)


def _hash_number(x: int) -> int:
    """The same of a number in [0, 2^32)."""
    x ^= x >> SHIFTS[0]
    x = x * MULTIPLIERS[0] % WORD
    x ^= x >> SHIFTS[1]
    x = x * MULTIPLIERS[1] % WORD
    return x ^ x >> SHIFTS[2]


def _signed(x: int) -> int:
    """The int32 with the bits of x in [0, 2^32)."""
    return x - WORD if x >= WORD // 2 else x
