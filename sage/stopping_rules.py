"""Where an answer ends: length limit, EOS, stop strings."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any


def texts(key: str, value: Sequence[str] | str | None, effect: str) -> tuple[str, ...]:
    """An option of several texts; a bare string is one of them, None is none.

    Args:
        key: the option's name, for messages.
        effect: what an empty text would do.

    Raises:
        ValueError: an empty text, or something that is no text.
    """
    found = (value,) if isinstance(value, str) else () if value is None else value
    if not isinstance(found, Collection) or not all(isinstance(text, str) for text in found):
        raise ValueError(f"{key}: {value!r} is not allowed; give a text or a list of texts")
    if not all(found):
        raise ValueError(f"{key}: an empty text would {effect}; leave it out")
    return tuple(found)


class Ending:
    """Cuts emitted tokens where the answer ends.

    Args:
        max_new_tokens: at least 1.
        eos: token ids that end the answer; kept.
        stop: texts that end the answer, or one text; the token that completes one is kept.
        tokenizer: needed for `stop`.

    Raises:
        ValueError: a length limit below 1, a stop string that is empty or no text, or stop strings without a tokenizer.
    """

    def __init__(
        self, max_new_tokens: int, eos: Collection[int] = (), stop: Sequence[str] | str | None = (), tokenizer: Any = None
    ) -> None:
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: {max_new_tokens} is not allowed; ask for at least 1")
        self.stop = texts("stop", stop, "end every answer")
        if self.stop and tokenizer is None:
            raise ValueError("stop: the target has no tokenizer to find stop strings with; use sage.load_target(path)")
        self.max_new_tokens, self.eos = max_new_tokens, frozenset(eos)
        self.tokenizer = tokenizer
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
