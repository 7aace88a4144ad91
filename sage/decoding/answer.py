"""The answer of one request: its end (length limit, EOS, stop strings), its statistics, its text piece by piece."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from sage.decoding.settings import Sampling

PREFILL_PHASES = ("vision", "target_prefill", "draft_prefill")


@dataclass(repr=False)
class Stats:
    """Statistics of one generation.

    Attributes:
        rounds: draft-and-verify rounds.
        target_passes: target passes after the prefill; equals `rounds`.
        draft_steps: draft passes after its prefill, one per level and one per synchronization with the accepted tokens.
        prompt_tokens: length of the prompt.
        draft_context: rows of the draft's cache that represent the prompt; 0 without a draft.
        accepted: drafted tokens accepted in each round, truncated at the end of the answer.
        new_tokens: emitted tokens, including the first one, which the prefill yields.
        time_s: seconds per phase of `sage.runtime.timing.PHASES`.
        rounds_log: per round: depth, nodes, accepted and the policy's figures.
    """

    rounds: int = 0
    target_passes: int = 0
    draft_steps: int = 0
    prompt_tokens: int = 0
    draft_context: int = 0
    accepted: list[int] = field(default_factory=list)
    new_tokens: int = 0
    time_s: dict[str, float] = field(default_factory=dict)
    rounds_log: list[dict[str, Any]] = field(default_factory=list)

    def __repr__(self) -> str:
        seconds = f"{self.total_s:.2f} s" if self.time_s else "not finished"
        passes = f"{self.target_passes} target passes ({self.tokens_per_target_pass:.2f} tokens per pass)"
        return f"Stats({self.new_tokens} tokens, {passes}, {self.draft_steps} draft passes, {seconds})"

    def add_round(self, depth: int, nodes: int, accepted: int, figures: dict[str, float]) -> None:
        """Records one verified tree of `nodes` drafted nodes, `accepted` of them accepted, and the policy's figures."""
        self.rounds += 1
        self.target_passes += 1
        self.accepted.append(accepted)
        self.rounds_log.append({**figures, "depth": depth, "nodes": nodes, "accepted": accepted})

    @property
    def mean_accepted_draft(self) -> float:
        """Drafted tokens accepted per round (tau of the SAGE paper)."""
        return sum(self.accepted) / len(self.accepted) if self.accepted else 0.0

    @property
    def tokens_per_target_pass(self) -> float:
        """Tokens per target pass, including the bonus token (tau of the EAGLE papers), without the prefill's token."""
        return (self.new_tokens - 1) / self.target_passes if self.target_passes else 0.0

    @property
    def decode_s(self) -> float:
        """Seconds after vision tower and prefill."""
        return sum(seconds for phase, seconds in self.time_s.items() if phase not in PREFILL_PHASES)

    @property
    def total_s(self) -> float:
        """Seconds of all phases."""
        return sum(self.time_s.values())


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
        if not self.stop and self.eos.isdisjoint(kept):
            self.tokens += kept
        else:
            for count, token in enumerate(kept, start=1):
                self.tokens.append(token)
                if token in self.eos or self._has_stop_string():
                    kept, self.is_over = kept[:count], True
                    break
        self.is_over = self.is_over or self.num_remaining == 0
        return kept

    def _has_stop_string(self) -> bool:
        if not self.stop:
            return False
        longest = max(len(text.encode()) for text in self.stop)
        tail = self.tokenizer.decode(self.tokens[-longest - 1 :], skip_special_tokens=True)
        return any(text in tail for text in self.stop)


REPLACEMENT_CHARACTER = "\ufffd"  # decoded bytes of an incomplete character


class Detokenizer:
    """Decodes a growing list of tokens; the concatenation of all pieces is the decoded list.

    Only the tokens since the last but one complete piece are decoded. The piece before the new one is context: a tokenizer may
    decode a token differently at the beginning of a text.

        tokens    Der Him mel \\xe2 \\x98 \\x80 blau
        decoded   [context| new             ]            held back: the new text ends within a character
                  [context| new                  ]       complete: becomes the context
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._context = self._start = 0  # of the window; the text of all tokens before `_start` was returned
        self._num_returned = 0  # characters returned of the text after `_start`

    def next_piece(self, tokens: Sequence[int], end: int, is_last: bool = False) -> str:
        """Returns the text up to token `end` that was not returned before, without the bytes of an incomplete character at its
        end, unless `is_last`; `tokens` are all tokens of the answer so far.
        """
        known = len(self._decode(tokens[self._context : self._start]))
        text = self._decode(tokens[self._context : end])[known:]
        complete = text if is_last else text.rstrip(REPLACEMENT_CHARACTER)
        piece = complete[self._num_returned :]
        self._num_returned = max(len(complete), self._num_returned)
        if text and complete == text:
            self._context, self._start, self._num_returned = self._start, end, 0
        return piece

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text
