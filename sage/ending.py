"""Where an answer ends: length limit, EOS, stop strings."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any


class Ending:
    """Cuts emitted tokens where the answer ends.

    Args:
        max_new_tokens: at least 1.
        eos: token ids that end the answer; kept.
        stop: texts that end the answer; the token that completes one is kept.
        tokenizer: needed for `stop`.

    Raises:
        ValueError: a length limit below 1, an empty stop string, or stop strings without a tokenizer.
    """

    def __init__(self, max_new_tokens: int, eos: Collection[int] = (), stop: Sequence[str] = (), tokenizer: Any = None) -> None:
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: {max_new_tokens} is not allowed; ask for at least 1")
        if stop and tokenizer is None:
            raise ValueError("stop: the target has no tokenizer to find stop strings with; use sage.load_target(path)")
        if not all(stop):
            raise ValueError("stop: an empty stop string would end every answer; leave it out")
        self.max_new_tokens, self.eos = max_new_tokens, frozenset(eos)
        self.stop, self.tokenizer = tuple(stop), tokenizer
        self.tokens: list[int] = []
        self.is_over = False

    @property
    def room(self) -> int:
        """Tokens the answer may still get."""
        return self.max_new_tokens - len(self.tokens)

    def cut(self, tokens: list[int]) -> list[int]:
        """Adds tokens to the answer up to its end; returns those that belong to it."""
        kept = tokens[: self.room]
        if self.stop or not self.eos.isdisjoint(kept):
            kept = self._up_to_the_end(kept)
        else:
            self.tokens += kept
        self.is_over = self.is_over or self.room == 0
        return kept

    def _up_to_the_end(self, tokens: list[int]) -> list[int]:
        """Adds tokens one by one until one ends the answer; returns those added."""
        for count, token in enumerate(tokens, start=1):
            self.tokens.append(token)
            if token in self.eos or (self.stop and self._completes_a_stop_string()):
                self.is_over = True
                return tokens[:count]
        return tokens

    def _completes_a_stop_string(self) -> bool:
        longest = max(len(text.encode()) for text in self.stop)
        tail = self.tokenizer.decode(self.tokens[-longest - 1 :], skip_special_tokens=True)
        return any(text in tail for text in self.stop)
