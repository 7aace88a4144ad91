"""Decoding speed of our decoder and of engines, in turns on the same prompts, target and draft.

A turn decodes all prompts with one decoder, one request at a time. Turns alternate between decoders, in an order that rotates
from repeat to repeat, so that other load on the machine affects all alike; ratios are taken within a repeat. Decoding time runs
from the first token to the last one: without vision tower, prefill and the draft's prefill, on both sides.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import not_
from statistics import median
from typing import Any, TypeVar

from sage.bench.measurement import rotated
from sage.io.tables import text_table

logger = logging.getLogger(__name__)
SETTLE_S = 0.5  # between turns: OpenMP threads of the last process spin for 0.2 s before they sleep
VLLM, LLAMA, OURS = "vLLM", "llama.cpp", "ours"
T = TypeVar("T")


def in_turns(items: Sequence[T], repeats: int) -> Iterator[T]:
    """Yields all items `repeats` times, in an order that rotates from repeat to repeat, with a pause before each."""
    for repeat in range(repeats):
        for item in rotated(items, repeat):
            time.sleep(SETTLE_S)
            yield item
        logger.info("repeat %d of %d", repeat + 1, repeats)


def spread(name: str, values: Sequence[float]) -> dict[str, Any]:
    """Returns the median of the turns under a name, and their range."""
    return {name: median(values), "range": [min(values), max(values)]}


@dataclass(frozen=True)
class Answer:
    """A decoded prompt; `decode_s` from the first token to the last one, `wall_s` with vision tower and prefill."""

    tokens: list[int]
    decode_s: float
    wall_s: float
    passes: int | None = None  # of the target after the prefill; None if the decoder does not report it


@dataclass(frozen=True)
class Decoder:
    """One decoder of the comparison."""

    label: str
    side: str  # `OURS` or the engine
    draft: str  # label of its draft, or the method of vLLM without one; empty without one
    turn: Callable[[], list[Answer]]  # decodes every prompt
    dtype: str = ""  # of the target's weights, or their form; empty if unknown


@dataclass
class Turns:
    """All turns of one decoder: `tokens_per_s` per repeat, and the first answers."""

    decoder: Decoder
    answers: list[Answer]
    tokens_per_s: list[float] = field(default_factory=list)
    end_to_end: list[float] = field(default_factory=list)  # tokens/s with prefill
    first_token_s: list[float] = field(default_factory=list)  # medians over the prompts

    def add(self, answers: Sequence[Answer]) -> None:
        """Adds one timed turn."""
        tokens = sum(len(answer.tokens) for answer in answers)
        self.tokens_per_s.append((tokens - len(answers)) / sum(answer.decode_s for answer in answers))
        self.end_to_end.append(tokens / sum(answer.wall_s for answer in answers))
        self.first_token_s.append(median(answer.wall_s - answer.decode_s for answer in answers))


def take_turns(decoders: Sequence[Decoder], repeats: int) -> list[Turns]:
    """Runs every decoder once as a warm-up, then `repeats` times in turns."""
    found = [Turns(decoder, decoder.turn()) for decoder in decoders]
    for turns in in_turns(found, repeats):
        turns.add(turns.decoder.turn())
    return found


def figures(found: Sequence[Turns], same_draft: str) -> dict[str, Any]:
    """Returns the figures of every decoder, and the ratios of the fastest ones by dtype of the engines.

    Texts are compared with those of our autoregressive loop in the same dtype, speeds with ours; what we do not have, such as
    weights of eight bits, with the texts of our first dtype and the speed of our last one.

    Args:
        same_draft: label of the draft of both sides.
    """

    def fastest(is_ours: bool, dtype: str, has_draft: Callable[[str], object]) -> Turns | None:
        """The turns with the highest median speed of one side, among those whose draft's label is accepted."""
        chosen = [turns for turns in found if (turns.decoder.side == OURS) is is_ours and turns.decoder.dtype == dtype]
        with_draft = [turns for turns in chosen if has_draft(turns.decoder.draft)]
        return max(with_draft, key=lambda turns: median(turns.tokens_per_s), default=None)

    own = dict[str, list[list[int]]]()  # by dtype: the texts of our first decoder, which has no draft
    for turns in found:
        if turns.decoder.side == OURS:
            own.setdefault(turns.decoder.dtype, [answer.tokens for answer in turns.answers])
    first, last = next(iter(own)), next(reversed(own))
    dtypes = list(dict.fromkeys(turns.decoder.dtype for turns in found if turns.decoder.side != OURS))
    ratios = {}
    for dtype in dtypes:
        for name, has_draft in {"autoregressive": not_, "same draft": same_draft.__eq__, "any draft": bool}.items():
            ours, theirs = fastest(True, dtype if dtype in own else last, has_draft), fastest(False, dtype, has_draft)
            if ours and theirs:
                ratios[name if len(dtypes) == 1 else f"{name}, {dtype}"] = _ratio(ours, theirs)
    decoders = {turns.decoder.label: _decoder_figures(turns, own.get(turns.decoder.dtype, own[first])) for turns in found}
    return {"decoders": decoders, "ratios": ratios}


def _ratio(ours: Turns, theirs: Turns) -> dict[str, Any]:
    """Returns the ratio of decoding speeds: median, lowest and highest over the repeats."""
    values = [a / b for a, b in zip(ours.tokens_per_s, theirs.tokens_per_s, strict=True)]
    return {"ours": ours.decoder.label, "theirs": theirs.decoder.label, **spread("ratio", values)}


def _decoder_figures(turns: Turns, texts: Sequence[list[int]]) -> dict[str, Any]:
    decoded = sum(len(answer.tokens) - 1 for answer in turns.answers)
    passes = [answer.passes for answer in turns.answers if answer.passes is not None]
    return {
        "side": turns.decoder.side,
        "draft": turns.decoder.draft,
        "dtype": turns.decoder.dtype,
        **spread("tokens_per_s", turns.tokens_per_s),
        "end_to_end_tokens_per_s": median(turns.end_to_end),
        "first_token_ms": 1e3 * median(turns.first_token_s),
        **({"tokens_per_target_pass": decoded / sum(passes)} if passes else {}),
        "match": sum(answer.tokens == text for answer, text in zip(turns.answers, texts, strict=True)),
        "total": len(texts),
    }


def report(found: Mapping[str, Any]) -> str:
    """Returns the tables of decoders and ratios as text."""
    rows = [
        (
            part["side"],
            label,
            part["draft"],
            f"{part['tokens_per_s']:.0f}",
            "-".join(f"{bound:.0f}" for bound in part["range"]),
            f"{part['end_to_end_tokens_per_s']:.0f}",
            f"{part['first_token_ms']:.0f} ms",
            f"{part['tokens_per_target_pass']:.2f}" if "tokens_per_target_pass" in part else "",
            f"{part['match']}/{part['total']}",
        )
        for label, part in found["decoders"].items()
    ]
    head = ("", "decoder", "draft", "tokens/s", "range", "end to end", "first token", "tokens/pass", "identical")
    ratios = [
        f"{name}: {ratio['ours']} / {ratio['theirs']} = {ratio['ratio']:.2f} ({ratio['range'][0]:.2f}-{ratio['range'][1]:.2f})"
        for name, ratio in found["ratios"].items()
    ]
    if (server := found.get("server")) is not None:  # counted by the server, in warm-up and turns together
        shares = " ".join(f"{share:.3f}" for share in server["accepted"])
        accepted = f"accepted {shares} at position 1, 2, .. of {server['rounds']} rounds"
        ratios.append(f"server: {accepted if server['rounds'] else 'reports no acceptance'}")
    return "\n".join([text_table(head, rows, "<<<>"), *ratios])
