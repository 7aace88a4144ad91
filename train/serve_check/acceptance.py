"""Tokens per round of decoded answers, acceptance by position, and the part at fault: the draft, its export or the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import sage
from checkpoints.vllm_plugin import INSTALL_PLUGIN
from sage.bench.measurement import BenchPrompt
from sage.decoding.generation import start
from sage.targets import Target

MIN_FIRST = 0.3  # share of rounds; with less, a drafted token is not worth its cost in any engine
TOLERANCE = 0.01  # of the shares of rounds, while both sides decode the same texts
TOLERANCE_OTHER_TEXTS = 0.03  # otherwise: the rounds of both sides are different samples


@dataclass(frozen=True)
class Answers:
    """The answers of one decoder, by prompt.

    The end of an answer can truncate the tokens of its last round, and not its count.
    """

    tokens: list[list[int]]
    rounds: list[list[int]]  # tokens per round after the prefill
    depth: int  # drafted tokens per round at most
    counts: list[list[int]] | None = None  # drafted tokens that each round accepted; None if the decoder does not count them

    def accepted_in(self, prompt: int) -> list[int]:
        """Returns the drafted tokens that each round of an answer accepted; without a count per round, its tokens less one."""
        emitted = self.rounds[prompt]
        counted = self.counts[prompt] if self.counts is not None else []
        return counted if len(counted) == len(emitted) else [tokens - 1 for tokens in emitted]

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
    tokens, emitted, accepted = [], [], []
    for prompt in prompts:
        request = start(target, draft, prompt.inputs, sage.policy("chain", depth=depth), max_new_tokens=max_new_tokens)
        with torch.inference_mode():
            rounds = list(request.rounds())[1:]  # the first one is the prefill
        tokens.append(list(request.tokens))
        emitted.append([len(one.tokens) for one in rounds])
        accepted.append([one.num_drafted for one in rounds])
    return Answers(tokens, emitted, depth, accepted)


@dataclass(frozen=True)
class Measured:
    """The answers of one draft in three places: as trained and as exported in our decoder, and as exported in the engine."""

    trained: Answers
    exported: Answers
    engine: Answers
    has_fault: bool = False  # whether the engine drafts wrongly after images, because our plugin is missing

    def rows(self, engine: str) -> dict[str, Answers]:
        """Returns the answers by label."""
        return {"trained, our decoder": self.trained, "export, our decoder": self.exported, f"export, {engine}": self.engine}


def acceptance_table(rows: Mapping[str, Answers]) -> tuple[list[str], list[list[str]]]:
    """Returns head and rows of a table of answers by label; their texts are compared with those of the first row."""
    reference = next(iter(rows.values()))
    head = ["", "texts equal", "rounds", "tokens/round", *(f"accepted {place}" for place in range(1, reference.depth + 1))]
    cells = [
        [
            label,
            f"{sum(a == b for a, b in zip(one.tokens, reference.tokens, strict=True))}/{len(one.tokens)}",
            str(one.num_rounds),
            f"{one.tokens_per_round:.2f}",
            *(f"{share:.3f}" for share in one.accepted),
        ]
        for label, one in rows.items()
    ]
    return head, cells


def is_short_of(answers: Answers, reference: Answers) -> bool:
    """Returns whether fewer rounds than in `reference` accept some position, by more than the tolerance."""
    tolerance = TOLERANCE if answers.tokens == reference.tokens else TOLERANCE_OTHER_TEXTS
    return any(theirs < ours - tolerance for ours, theirs in zip(reference.accepted, answers.accepted, strict=True))


def verdict(found: Measured, fed: str | None, trained_with: str | None) -> list[str]:
    """Returns one line for each part at fault, the first to correct first; empty if all are good.

    Args:
        fed: the draft's inputs at image positions in the engine, as `draft.image_inputs`.
        trained_with: those in training; None, as `fed`, for a draft without any.
    """
    lines = []
    if found.trained.accepted[0] < MIN_FIRST:
        lines.append(
            f"draft bad: our decoder accepts its first token in {found.trained.accepted[0]:.0%} of the rounds, less than "
            f"{MIN_FIRST:.0%}: train further, or on data like these prompts"
        )
    if is_short_of(found.exported, found.trained) or is_short_of(found.trained, found.exported):
        lines.append(
            "export bad: in our decoder, the exported weights and levels are accepted differently from the trained draft's: "
            "export again"
        )
    if is_short_of(found.engine, found.exported):
        lines.append(f"engine bad: it accepts less of the export than our decoder: {_cause(found, fed, trained_with)}")
    return lines


def _cause(found: Measured, fed: str | None, trained_with: str | None) -> str:
    if found.has_fault:
        fault = "it drafts wrongly after images of this target (vllm-project/vllm issue 54498), which our plugin corrects"
        return f"{fault}: run `{INSTALL_PLUGIN}` in its environment and check again"
    if fed != trained_with:
        return (
            f"at image positions it feeds draft.image_inputs={fed}, the draft was trained with {trained_with}: train with {fed}"
        )
    return "draft and export are right; check its version and settings"
