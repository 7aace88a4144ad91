"""Acceptance of decoded answers by position, the part at fault (draft, export or engine), and the page of a serve check: the
answer of every prompt by vLLM beside that of our decoder, and the rounds that differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

import sage
from checkpoints.vllm_plugin import INSTALL_PLUGIN
from sage.bench.measurement import BenchPrompt
from sage.decoding.generation import start
from sage.inputs.messages import text_of
from sage.inputs.thumbnails import media_thumbnails
from sage.io.page import render, table
from sage.io.tables import counted
from sage.targets import Target
from sage.tracing.trace_page import MAX_STYLES, answer_spans, num_equal, token_pieces

MIN_FIRST = 0.3  # share of rounds; with less, a drafted token is not worth its cost in any engine
TOLERANCE = 0.01  # of the shares of rounds, while both sides decode the same texts
TOLERANCE_OTHER_TEXTS = 0.03  # otherwise: the rounds of both sides are different samples
TEMPLATE = Path(__file__).with_name("serve_check.html")
MAX_SHOWN = 48  # prompts with their answers, those with the most differences; all would make the page large
IMAGE_SIDE, FRAME_SIDE = 160, 64  # pixels
BASE = 1  # the row that others are compared with: the export in our decoder


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
        counts = self.counts[prompt] if self.counts is not None else []
        return counts if len(counts) == len(emitted) else [tokens - 1 for tokens in emitted]

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
        emitted.append([len(round_.tokens) for round_ in rounds])
        accepted.append([round_.num_drafted for round_ in rounds])
    return Answers(tokens, emitted, depth, accepted)


def acceptance_table(rows: Mapping[str, Answers]) -> tuple[list[str], list[list[str]]]:
    """Returns head and rows of a table of answers by label; their texts are compared with those of the first row."""
    reference = next(iter(rows.values()))
    head = ["", "texts equal", "rounds", "tokens/round", *(f"accepted {place}" for place in range(1, reference.depth + 1))]
    cells = [
        [
            label,
            f"{sum(a == b for a, b in zip(answers.tokens, reference.tokens, strict=True))}/{len(answers.tokens)}",
            str(answers.num_rounds),
            f"{answers.tokens_per_round:.2f}",
            *(f"{share:.3f}" for share in answers.accepted),
        ]
        for label, answers in rows.items()
    ]
    return head, cells


def is_short_of(answers: Answers, reference: Answers) -> bool:
    """Returns whether fewer rounds than in `reference` accept some position, by more than the tolerance."""
    tolerance = TOLERANCE if answers.tokens == reference.tokens else TOLERANCE_OTHER_TEXTS
    return any(theirs < ours - tolerance for ours, theirs in zip(reference.accepted, answers.accepted, strict=True))


def verdict(rows: Sequence[Answers], fed: str | None, trained_with: str | None, has_fault: bool = False) -> list[str]:
    """Returns one line for each part at fault, the first to correct first; empty if all are good.

    Args:
        rows: the answers of one draft: as trained and as exported in our decoder, and as exported in the engine.
        fed, trained_with: the draft's inputs at image positions in the engine and in training; None: it has none.
        has_fault: whether the engine drafts wrongly after images, because our plugin is missing.
    """
    trained, exported, engine = rows
    lines, first = [], trained.accepted[0]
    if first < MIN_FIRST:
        lines.append(
            f"draft bad: our decoder accepts its first token in {first:.0%} of the rounds, less than {MIN_FIRST:.0%}: train "
            "further, or on data like these prompts"
        )
    if is_short_of(exported, trained) or is_short_of(trained, exported):
        lines.append(
            "export bad: in our decoder, the exported weights and levels are accepted differently from the trained draft's: "
            "export again"
        )
    if not is_short_of(engine, exported):
        return lines
    cause = "draft and export are right; check its version and settings"
    if has_fault:
        fault = "it drafts wrongly after images of this target (vllm-project/vllm issue 54498), which our plugin corrects"
        cause = f"{fault}: run `{INSTALL_PLUGIN}` in its environment and check again"
    elif fed != trained_with:
        cause = f"at image positions it feeds draft.image_inputs={fed}, the draft was trained with {trained_with}: "
        cause += f"train with {fed}"
    return [*lines, f"engine bad: it accepts less of the export than our decoder: {cause}"]


def differing_rounds(answers: Answers, base: Answers, prompt: int) -> list[bool]:
    """Returns, per round, whether `base` emits the same tokens by other rounds; False after the first token that differs."""
    ours, theirs = (  # first token, counted from 0, and number of tokens of every round; the prefill emits the first token
        list(zip(accumulate(side.rounds[prompt], initial=1), side.rounds[prompt], strict=False)) for side in (base, answers)
    )
    equal = num_equal(answers.tokens[prompt], base.tokens[prompt])
    return [first + emitted <= equal and (first, emitted) not in ours for first, emitted in theirs]


def render_check(
    rows: Mapping[str, Answers],
    faults: Sequence[str],
    prompts: Sequence[BenchPrompt],
    tokenizer: Any,
    settings: Mapping[str, str],
) -> str:
    """Returns the page of the answers by label, as `verdict` takes them; draft, export, target and engine are settings."""
    base = list(rows.values())[BASE]
    differing = [{label: differing_rounds(side, base, place) for label, side in rows.items()} for place in range(len(prompts))]
    order = sorted(range(len(prompts)), key=lambda place: -sum(map(sum, differing[place].values())))
    head, cells = acceptance_table(rows)
    return render(
        TEMPLATE,
        title=f"Serve check: {settings['export']}",
        subtitle=f"{settings['draft']} drafting for {Path(settings['target']).name}, served by {settings['engine']}",
        faults=faults,
        settings=settings,
        acceptance=table(head, cells, caption="Shares of the complete rounds that accept each position"),
        prompts=[_prompt(rows, differing[place], place, prompts[place], tokenizer) for place in order[:MAX_SHOWN]],
        shown=MAX_SHOWN,
        base=list(rows)[BASE],
        depth=min(base.depth, MAX_STYLES),
    )


def _prompt(
    rows: Mapping[str, Answers], differing: Mapping[str, Sequence[bool]], place: int, prompt: BenchPrompt, tokenizer: Any
) -> dict[str, Any]:
    ours, *others = list(rows)[BASE:]
    notes = []
    for label in others:
        tokens, base = rows[label].tokens[place], rows[ours].tokens[place]
        texts = "equal texts" if tokens == base else f"texts equal up to token {num_equal(tokens, base)}"
        unlike = f"{counted(sum(differing[label]), 'round')} unlike those of {ours}"
        notes.append(f"{label}: {texts}; {unlike}" if any(differing[label]) else f"{label}: {texts}, all rounds are equal")
    answers = []
    for label in (ours, *others):
        tokens, rounds = rows[label].tokens[place], zip(rows[label].rounds[place], rows[label].accepted_in(place), strict=True)
        spans = answer_spans(tokens, token_pieces(tokens, tokenizer), rounds, tokenizer)
        for span in spans:
            if span["round"] and differing[label][span["round"] - 1]:
                span["style"] += " differs"
        answers.append({"label": label, "tokens": spans})
    return {
        "prompt": prompt,
        "texts": [(str(message["role"]), text_of(message)) for message in prompt.messages],
        "media": list(media_thumbnails(prompt.messages, IMAGE_SIDE, FRAME_SIDE)),
        "notes": notes,
        "answers": answers,
    }
