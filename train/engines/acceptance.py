"""Answers with the number of tokens that each round emitted, and the acceptance by position that follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import sage
from sage.bench.measurement import BenchPrompt
from sage.decoding.generation import start
from sage.decoding.sampling import Sampling
from sage.targets import Target


@dataclass(frozen=True)
class Answers:
    """Token ids, and tokens per round after the prefill, of every prompt; at most `depth` drafted tokens per round."""

    tokens: list[list[int]]
    rounds: list[list[int]]
    depth: int

    @property
    def num_rounds(self) -> int:
        return sum(map(len, self.rounds))

    @property
    def tokens_per_round(self) -> float:
        """Tokens after the first one of every answer, per round; 0 without a round."""
        return sum(map(sum, self.rounds)) / max(self.num_rounds, 1)

    @property
    def accepted(self) -> list[float]:
        """Shares of the complete rounds that accept position 1, 2, .. `depth`.

        A round emits the accepted tokens and one more. The last round of an answer does not count: the answer's end truncates
        what it accepts. An answer of 1, 3, 2 tokens per round has the complete rounds 1 and 3: position 1 is accepted by one of
        two, position 2 as well, position 3 by none.
        """
        complete = [emitted - 1 for answer in self.rounds for emitted in answer[:-1]]
        shares = (sum(count >= position for count in complete) for position in range(1, self.depth + 1))
        return [share / max(len(complete), 1) for share in shares]


def decode_chain(target: Target, draft: Any, prompts: Sequence[BenchPrompt], depth: int, max_new_tokens: int) -> Answers:
    """Decodes every prompt greedily with our policy `chain`, which drafts as engines do: `depth` tokens, one per position."""
    sampling = Sampling(max_new_tokens=max_new_tokens)
    answers = [_decode_one(target, draft, prompt, depth, sampling) for prompt in prompts]
    return Answers([tokens for tokens, _ in answers], [rounds for _, rounds in answers], depth)


def _decode_one(target: Target, draft: Any, prompt: BenchPrompt, depth: int, sampling: Sampling) -> tuple[list[int], list[int]]:
    request = start(target, draft, prompt.inputs, sage.policy("chain", depth=depth), sampling=sampling)
    with torch.inference_mode():
        emitted = [len(one.tokens) for one in request.rounds()]
    return list(request.tokens), emitted[1:]  # the first entry is the prefill's token
