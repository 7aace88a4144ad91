"""Stopping rules of an answer: length limit, EOS, stop strings."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sage.decoding.settings import Sampling


class StopCriterion:
    """Holds the emitted tokens of one answer and truncates them at its end, after an EOS token of `eos`, the token that
    completes a stop string, or `max_new_tokens`. Raises ValueError for stop strings without a tokenizer.
    """

    def __init__(self, sampling: Sampling, eos: Collection[int] = (), tokenizer: Any = None) -> None:
        if sampling.stop and tokenizer is None:
            raise ValueError("stop: the target has no tokenizer to decode stop strings with; use sage.load_target(path)")
        self.stop: Collection[str] = sampling.stop or ()
        self.max_new_tokens, self.eos = sampling.max_new_tokens, frozenset(eos)
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.is_over = False

    @property
    def num_remaining(self) -> int:
        """Tokens left until the length limit."""
        return self.max_new_tokens - len(self.tokens)

    def append(self, tokens: list[int]) -> list[int]:
        """Appends tokens to the answer up to its end; returns the appended ones."""
        kept = tokens[: self.num_remaining]
        if self.stop or not self.eos.isdisjoint(kept):
            kept = self._append_until_end(kept)
        else:
            self.tokens += kept
        self.is_over = self.is_over or self.num_remaining == 0
        return kept

    def _append_until_end(self, tokens: list[int]) -> list[int]:
        for count, token in enumerate(tokens, start=1):
            self.tokens.append(token)
            if token in self.eos or (self.stop and self._has_stop_string()):
                self.is_over = True
                return tokens[:count]
        return tokens

    def _has_stop_string(self) -> bool:
        longest = max(len(text.encode()) for text in self.stop)
        tail = self.tokenizer.decode(self.tokens[-longest - 1 :], skip_special_tokens=True)
        return any(text in tail for text in self.stop)
