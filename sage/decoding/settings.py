"""Settings of an answer: the one definition of their names, defaults, ranges and meanings.

`decode.*`, `regenerate.*` and the options of the commands are derived from these classes. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any

from sage.io.ranges import AnyInt, NonNegativeInt, PositiveInt, Range, check_fields, from_attributes


@dataclass(kw_only=True)
class AnswerSettings:
    """Settings that determine the text of an answer.

    Attributes:
        max_new_tokens: maximum length of an answer, in tokens.
        temperature: sampling temperature; 0: greedy decoding.
        top_k: sample from the k most likely tokens; 0: all.
        top_p: sample from the most likely tokens of this total probability; 1: all.
        seed: seed of the sampling noise.
    """

    max_new_tokens: PositiveInt = 256
    temperature: Annotated[float, Range(ge=0, remedy="0 is greedy decoding")] = 0.0
    top_k: Annotated[int, Range(ge=0, remedy="0 keeps all tokens")] = 0
    top_p: Annotated[float, Range(gt=0, le=1, remedy="1 keeps the complete distribution")] = 1.0
    seed: AnyInt = 0


@dataclass(kw_only=True)
class DraftedAnswerSettings(AnswerSettings):
    """Settings of an answer that a draft speeds up.

    Attributes:
        couple: with a temperature, the draft proposes with the noise of the target's draws; without, it is slower. The text is
            the same.
    """

    couple: bool = True


@dataclass(kw_only=True)
class Sampling(DraftedAnswerSettings):
    """Sampling parameters of a request. A single string or processor stands for a list of one, None for none.

    Attributes:
        min_new_tokens: minimum number of tokens to generate before EOS is allowed.
        min_p: minimum probability of a token, relative to that of the most likely token; 0: off.
        repetition_penalty: above 1 makes tokens of the prompt and the answer less likely; 1: off.
        stop: strings that end the answer.
        bad_words: strings that are never generated.
        logits_processor: Hugging Face logits processors, applied to each tree node with the prefix of that node.

    Raises:
        ValueError: a value out of range, an empty string, or a logits processor that is not callable.
    """

    min_new_tokens: NonNegativeInt = 0
    min_p: Annotated[float, Range(ge=0, le=1, remedy="0 is off")] = 0.0
    repetition_penalty: Annotated[float, Range(gt=0, remedy="1 is off")] = 1.0
    stop: Collection[str] | str | None = ()
    bad_words: Collection[str] | str | None = ()
    logits_processor: Any = ()

    def __post_init__(self) -> None:
        check_fields(self)
        if self.is_greedy and not self.couple:
            raise ValueError("couple: False has no effect on greedy decoding; set a temperature above 0 or leave couple out")
        self.stop = _strings("stop", self.stop, "end every answer")
        self.bad_words = _strings("bad_words", self.bad_words, "forbid every answer")
        self.logits_processor = _processors(self.logits_processor)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @classmethod
    def from_attributes(cls, source: object) -> Sampling:
        """Builds from the attributes of `source` that have a field's name, for example of parsed arguments."""
        return from_attributes(cls, source)


def _processors(value: Any) -> tuple[Any, ...]:
    found = () if value is None else value if isinstance(value, (list, tuple)) else (value,)
    if wrong := [processor for processor in found if not callable(processor)]:
        raise ValueError(f"logits_processor: {wrong[0]!r} is not callable; give one or more Hugging Face logits processors")
    return tuple(found)


def _strings(key: str, value: Collection[str] | str | None, effect: str) -> tuple[str, ...]:
    """Normalizes an option of several strings; `effect` describes what an empty string, which is refused, would do."""
    found = (value,) if isinstance(value, str) else tuple(value or ())
    if not all(found):
        raise ValueError(f"{key}: an empty string would {effect}; remove it")
    return found
