"""Decoding speed of our decoder and of vLLM or a running server, in turns on the same prompts, target and draft.

Owns: the order of turns and the figures. Does not own: the engine's process (checkpoints.engines), our decoders
(sage.bench.runners).

A turn decodes all prompts with one decoder, one request at a time. Turns alternate between decoders, in an order that rotates
from repeat to repeat, so that other load on the machine affects all alike; ratios are taken within a repeat. Decoding time runs
from the first token to the last one: without vision tower, prefill and the draft's prefill, on both sides.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

from checkpoints.engines.vllm_process import VllmProcess
from sage.bench.measurement import BenchPrompt, rotated
from sage.bench.runners import Runner
from sage.decoding.sampling import Sampling
from sage.decoding.stats import PREFILL_PHASES
from sage.io.tables import text_table

logger = logging.getLogger(__name__)
SETTLE_S = 0.5  # between turns: OpenMP threads of the last process spin for 0.2 s before they sleep
VLLM, OURS = "vLLM", "ours"


@dataclass(frozen=True)
class Answer:
    """A decoded prompt; `decode_s` from the first token to the last one, `wall_s` with vision tower and prefill."""

    tokens: list[int]
    decode_s: float
    wall_s: float
    passes: int | None = None  # of the target after the prefill; None if the decoder does not report it


class Decoder(Protocol):
    """One decoder of the comparison: `side` is `OURS` or the other one, `draft` the label of its draft, empty without one."""

    label: str
    side: str
    draft: str

    def turn(self) -> list[Answer]:
        """Decodes every prompt."""
        ...


@dataclass
class OurDecoder:
    """A policy of this project, or a Hugging Face baseline, in this process."""

    label: str
    runner: Runner
    prompts: Sequence[BenchPrompt]
    sampling: Sampling
    draft: str = ""
    side: str = OURS

    def turn(self) -> list[Answer]:
        """Decodes every prompt."""
        return [self._answer(prompt) for prompt in self.prompts]

    def _answer(self, prompt: BenchPrompt) -> Answer:
        run = self.runner.run(prompt.inputs, self.sampling)
        prefill_s = sum(run.time_s[phase] for phase in PREFILL_PHASES) if run.time_s else run.wall_s - run.decode_s
        passes = run.stats.target_passes if run.stats else None
        return Answer(run.tokens, run.wall_s - prefill_s, run.wall_s, passes)


@dataclass
class VllmDecoder:
    """vLLM in its own process; `passes` of the target after the prefill, per prompt."""

    label: str
    process: VllmProcess
    passes: Sequence[int]
    draft: str = ""
    side: str = VLLM

    def turn(self) -> list[Answer]:
        """Decodes every prompt."""
        return [Answer(**answer, passes=passes) for answer, passes in zip(self.process.time(), self.passes, strict=True)]


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
    for repeat in range(repeats):
        for turns in rotated(found, repeat):
            time.sleep(SETTLE_S)
            turns.add(turns.decoder.turn())
        logger.info("repeat %d of %d", repeat + 1, repeats)
    return found


def figures(found: Sequence[Turns], same_draft: str) -> dict[str, Any]:
    """Returns the figures of every decoder and the ratios of our fastest one to the other side's fastest one.

    Args:
        same_draft: label of the draft that both sides have.
    """
    reference = next(turns.answers for turns in found if turns.decoder.side == OURS and not turns.decoder.draft)
    texts = [answer.tokens for answer in reference]
    ours = [turns for turns in found if turns.decoder.side == OURS]
    theirs = [turns for turns in found if turns.decoder.side != OURS]
    speculative = fastest([turns for turns in theirs if turns.decoder.draft])
    ratios = {
        "autoregressive": (fastest(without_draft(ours)), fastest(without_draft(theirs))),
        "same draft": (fastest([turns for turns in ours if turns.decoder.draft == same_draft]), speculative),
        "any draft": (fastest([turns for turns in ours if turns.decoder.draft]), speculative),
    }
    return {
        "decoders": {turns.decoder.label: _decoder_figures(turns, texts) for turns in found},
        "ratios": {name: ratio(*pair) for name, pair in ratios.items() if all(pair)},
    }


def without_draft(turns: Sequence[Turns]) -> list[Turns]:
    return [one for one in turns if not one.decoder.draft]


def fastest(turns: Sequence[Turns]) -> Turns | None:
    """Returns the turns with the highest median speed; None without any."""
    return max(turns, key=lambda one: median(one.tokens_per_s), default=None)


def ratio(ours: Turns | None, theirs: Turns | None) -> dict[str, Any]:
    """Returns the ratio of decoding speeds: median, lowest and highest over the repeats."""
    assert ours is not None and theirs is not None
    values = [a / b for a, b in zip(ours.tokens_per_s, theirs.tokens_per_s, strict=True)]
    return {
        "ours": ours.decoder.label,
        "theirs": theirs.decoder.label,
        "ratio": median(values),
        "range": [min(values), max(values)],
    }


def _decoder_figures(turns: Turns, texts: Sequence[list[int]]) -> dict[str, Any]:
    decoded = sum(len(answer.tokens) - 1 for answer in turns.answers)
    passes = [answer.passes for answer in turns.answers if answer.passes is not None]
    return {
        "side": turns.decoder.side,
        "draft": turns.decoder.draft,
        "tokens_per_s": median(turns.tokens_per_s),
        "range": [min(turns.tokens_per_s), max(turns.tokens_per_s)],
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
        f"{name}: {one['ours']} / {one['theirs']} = {one['ratio']:.2f} ({one['range'][0]:.2f}-{one['range'][1]:.2f})"
        for name, one in found["ratios"].items()
    ]
    return "\n".join([text_table(head, rows, "<<<>"), *ratios, *_server_lines(found.get("server"))])


def _server_lines(server: Mapping[str, Any] | None) -> list[str]:
    """Returns what a server counts itself, in warm-up and turns together."""
    if server is None:
        return []
    if not server["rounds"]:
        return ["server: reports no acceptance"]
    shares = " ".join(f"{share:.3f}" for share in server["accepted"])
    return [f"server: accepted {shares} at position 1, 2, .. of {server['rounds']} rounds"]
