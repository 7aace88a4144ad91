"""The page of a serve check: the answer of every prompt by vLLM beside that of our decoder, and the rounds that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from sage.bench.measurement import BenchPrompt
from sage.inputs.messages import text_of
from sage.inputs.thumbnails import media_thumbnails
from sage.io.page import link, render, table
from sage.io.tables import counted
from sage.replay.trace_page import MAX_STYLES, answer_spans, num_equal, token_pieces
from train.serve_check.acceptance import Answers, acceptance_table

TEMPLATE = Path(__file__).with_name("serve_check.html")
MAX_SHOWN = 48  # prompts with their answers, those with the most differences; all would make the page large
IMAGE_SIDE, FRAME_SIDE = 160, 64  # pixels
BASE = 1  # the row that others are compared with: the export in our decoder


def differing_rounds(answers: Answers, base: Answers, prompt: int) -> list[bool]:
    """Returns, per round, whether `base` emits the same tokens by other rounds; False after the first token that differs."""
    ours = _starts(base.rounds[prompt])
    equal = num_equal(answers.tokens[prompt], base.tokens[prompt])
    return [start + emitted <= equal and (start, emitted) not in ours for start, emitted in _starts(answers.rounds[prompt])]


def _starts(rounds: Sequence[int]) -> list[tuple[int, int]]:
    """Returns first token, counted from 0, and number of tokens of every round; the prefill emits the first token."""
    return list(zip(accumulate(rounds, initial=1), rounds, strict=False))


def render_check(
    rows: Mapping[str, Answers],
    faults: Sequence[str],
    prompts: Sequence[BenchPrompt],
    tokenizer: Any,
    settings: Mapping[str, str],
) -> str:
    """Returns the page of the answers by label (`Measured.rows`), with draft, export, target and engine among the settings."""
    base = list(rows.values())[BASE]
    differing = [{label: differing_rounds(one, base, place) for label, one in rows.items()} for place in range(len(prompts))]
    order = sorted(range(len(prompts)), key=lambda place: -sum(map(sum, differing[place].values())))
    head, cells = acceptance_table(rows)
    return render(
        TEMPLATE,
        title=f"Serve check: {settings['export']}",
        subtitle=f"{settings['draft']} drafting for {Path(settings['target']).name}, served by {settings['engine']}",
        faults=faults,
        settings=settings,
        acceptance=table(head, cells, caption="Shares of the complete rounds that accept each position"),
        overview=_overview(rows, differing, prompts, order),
        prompts=[_prompt(rows, differing[place], place, prompts[place], tokenizer) for place in order[:MAX_SHOWN]],
        omitted=counted(len(prompts) - MAX_SHOWN, "prompt") if len(prompts) > MAX_SHOWN else "",
        base=list(rows)[BASE],
        depth=min(base.depth, MAX_STYLES),
    )


def _overview(
    rows: Mapping[str, Answers],
    differing: Sequence[Mapping[str, Sequence[bool]]],
    prompts: Sequence[BenchPrompt],
    order: Sequence[int],
) -> dict[str, Any]:
    """Returns the table of all prompts, those with the most differences first."""
    ours, (label, theirs) = list(rows.values())[BASE], list(rows.items())[BASE + 1]
    cells = []
    for number, place in enumerate(order):
        name, tokens = prompts[place].name, ours.tokens[place]
        is_same = tokens == theirs.tokens[place]
        cells.append(
            [
                [link(name, f"#prompt-{place + 1}")] if number < MAX_SHOWN else name,
                prompts[place].family or "-",
                "equal" if is_same else f"equal up to token {num_equal(tokens, theirs.tokens[place])}",
                len(tokens),
                len(ours.rounds[place]),
                len(theirs.rounds[place]),
                sum(differing[place][label]),
            ]
        )
    head = ["prompt", "task", "texts", "tokens", "rounds, ours", "rounds, vLLM", "that differ"]
    return table(head, cells, text_columns=(0, 1, 2), id="overview")


def _prompt(
    rows: Mapping[str, Answers], differing: Mapping[str, Sequence[bool]], place: int, prompt: BenchPrompt, tokenizer: Any
) -> dict[str, Any]:
    ours = list(rows)[BASE]
    counts = {label: counted(sum(found), "round") for label, found in differing.items() if any(found)}
    notes = [f"{label}: {count} unlike those of {ours}" for label, count in counts.items()]
    answers = []
    for label in list(rows)[BASE:]:
        tokens, rounds = rows[label].tokens[place], zip(rows[label].rounds[place], rows[label].accepted_in(place), strict=True)
        spans = answer_spans(tokens, token_pieces(tokens, tokenizer), rounds, tokenizer)
        for span in spans:
            if span["round"] and differing[label][span["round"] - 1]:
                span["style"] += " differs"
        answers.append({"label": label, "tokens": spans})
    return {
        "number": place + 1,
        "prompt": prompt,
        "texts": [(str(message["role"]), text_of(message)) for message in prompt.messages],
        "media": list(media_thumbnails(prompt.messages, IMAGE_SIDE, FRAME_SIDE)),
        "notes": notes or ["All rounds are equal."],
        "answers": answers,
    }
