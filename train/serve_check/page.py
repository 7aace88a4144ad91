"""The page of a serve check: every prompt with the rounds of vLLM beside those of our decoder, and where they differ.

Does not own: the verdict (train.serve_check.acceptance).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from sage.bench.measurement import BenchPrompt
from sage.decoding.detokenizer import Detokenizer
from sage.inputs.thumbnails import Media, media_thumbnails, message_text
from sage.io.page import link, render, table, visible
from sage.io.tables import counted
from train.serve_check.acceptance import Answers

TEMPLATE = Path(__file__).with_name("serve_check.html")
MAX_SHOWN = 48  # prompts with their rounds, those with the most differences; all would make the page large
IMAGE_SIDE, FRAME_SIDE = 160, 64  # pixels
MAX_STYLES = 6  # shades of accepted tokens
UNIT, LANE, BOX, LABEL, AXIS = 16, 44, 22, 15, 18  # pixels: a token; of a lane: height, boxes, baseline of its label; the axis
TICK = 10  # tokens
BAR, GAP, PLOT = 15, 22, 120  # pixels of the chart: a bar, between positions, height
BASE = 1  # the row that others are compared with: the export in our decoder
COLORS = ("soft", "accepted", "bonus", "commit")  # of the rows, names of the style sheet


@dataclass(frozen=True)
class AskedPrompt:
    """A prompt as the page shows it: name, task, (role, text) of its messages, small copies of its images."""

    name: str
    family: str
    texts: list[tuple[str, str]]
    media: list[Media]

    @classmethod
    def of(cls, prompt: BenchPrompt) -> AskedPrompt:
        """Returns what is shown of a prompt."""
        texts = [(str(message["role"]), message_text(message.get("content", ""))) for message in prompt.messages]
        media = list(media_thumbnails(prompt.messages, IMAGE_SIDE, FRAME_SIDE))
        return cls(prompt.name, prompt.family, texts, media)


@dataclass(frozen=True, kw_only=True)
class ServedRound:
    """One round of an answer: its first token, counted from 0, emitted tokens, and drafted ones that it accepted.

    Attributes:
        differs: whether the same tokens were emitted by other rounds of the row compared with.
    """

    start: int
    emitted: int
    accepted: int
    differs: bool
    is_last: bool


def served_rounds(answers: Answers, base: Answers, prompt: int) -> list[ServedRound]:
    """Returns the rounds of an answer. They are compared with those of `base` up to the first token that differs."""
    ours = _starts(base.rounds[prompt])
    rounds, equal = answers.rounds[prompt], _num_equal(answers.tokens[prompt], base.tokens[prompt])
    return [
        ServedRound(
            start=start,
            emitted=emitted,
            accepted=accepted,
            differs=start + emitted <= equal and (start, emitted) not in ours,
            is_last=number == len(rounds) - 1,
        )
        for number, ((start, emitted), accepted) in enumerate(zip(_starts(rounds), answers.accepted_in(prompt), strict=True))
    ]


def _starts(rounds: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(accumulate(rounds, initial=1), rounds, strict=False))


def _num_equal(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Returns the number of tokens before the first that differs."""
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(tokens), len(others)))


def render_check(
    rows: Mapping[str, Answers],
    faults: Sequence[str],
    prompts: Sequence[AskedPrompt],
    tokenizer: Any,
    settings: Mapping[str, str],
) -> str:
    """Returns the page.

    Args:
        rows: the answers by label, as of `Measured.rows`.
        faults: of the verdict.
        settings: draft, export, target and engine by name.
    """
    served = [{label: served_rounds(one, _base(rows), place) for label, one in rows.items()} for place in range(len(prompts))]
    order = sorted(range(len(prompts)), key=lambda place: -_num_differing(served[place]))
    return render(
        TEMPLATE,
        title=f"Serve check: {settings['export']}",
        subtitle=f"{settings['draft']} drafting for {Path(settings['target']).name}, served by {settings['engine']}",
        tiles=_tiles(rows, served),
        faults=faults,
        settings=settings,
        chart=_chart(rows),
        acceptance=_acceptance(rows),
        overview=_overview(rows, served, prompts, order),
        prompts=[_prompt(rows, served[place], place, prompts[place], tokenizer) for place in order[:MAX_SHOWN]],
        omitted=counted(len(prompts) - MAX_SHOWN, "prompt") if len(prompts) > MAX_SHOWN else "",
        base=list(rows)[BASE],
    )


def _base(rows: Mapping[str, Answers]) -> Answers:
    return list(rows.values())[BASE]


def _num_differing(served: Mapping[str, Sequence[ServedRound]]) -> int:
    return sum(one.differs for rounds in served.values() for one in rounds)


def _equal_texts(rows: Mapping[str, Answers], label: str) -> str:
    tokens, base = rows[label].tokens, _base(rows).tokens
    return f"{sum(one == other for one, other in zip(tokens, base, strict=True))}/{len(base)}"


def _tiles(rows: Mapping[str, Answers], served: Sequence[Mapping[str, Sequence[ServedRound]]]) -> list[tuple[str, str, str]]:
    ours, (label, theirs) = _base(rows), list(rows.items())[BASE + 1]
    differing = sum(one.differs for by_row in served for one in by_row[label])
    return [
        ("texts equal", _equal_texts(rows, label), "of vLLM and our decoder"),
        ("tokens per round", f"{theirs.tokens_per_round:.2f}", f"our decoder: {ours.tokens_per_round:.2f}"),
        ("rounds", str(theirs.num_rounds), f"our decoder: {ours.num_rounds}"),
        ("rounds that differ", str(differing), "of vLLM, up to the first other token"),
    ]


def _chart(rows: Mapping[str, Answers]) -> dict[str, Any]:
    """Returns size, bars and labels of the chart of acceptance by position."""
    depth, group = _base(rows).depth, len(rows) * BAR + GAP
    bars = [
        {
            "x": GAP / 2 + position * group + number * BAR,
            "y": round(PLOT * (1 - share), 1),
            "height": round(PLOT * share, 1),
            "color": COLORS[number],
            "label": f"{label}: position {position + 1} accepted in {share:.1%} of the rounds",
        }
        for number, (label, one) in enumerate(rows.items())
        for position, share in enumerate(one.accepted)
    ]
    labels = [(position * group + group / 2, str(position + 1)) for position in range(depth)]
    legend = [(label, COLORS[number]) for number, label in enumerate(rows)]
    return {"width": depth * group, "height": PLOT, "bar": BAR - 2, "bars": bars, "labels": labels, "legend": legend}


def _acceptance(rows: Mapping[str, Answers]) -> dict[str, Any]:
    head = ["", "texts equal", "rounds", "tokens/round", *(f"position {place}" for place in range(1, _base(rows).depth + 1))]
    cells = [
        [
            label,
            _equal_texts(rows, label),
            one.num_rounds,
            f"{one.tokens_per_round:.2f}",
            *(f"{share:.3f}" for share in one.accepted),
        ]
        for label, one in rows.items()
    ]
    return table(head, cells, caption="Shares of the complete rounds that accept each position")


def _overview(
    rows: Mapping[str, Answers],
    served: Sequence[Mapping[str, Sequence[ServedRound]]],
    prompts: Sequence[AskedPrompt],
    order: Sequence[int],
) -> dict[str, Any]:
    """Returns the table of all prompts, those with the most differences first."""
    ours, (label, theirs) = _base(rows), list(rows.items())[BASE + 1]
    cells = []
    for number, place in enumerate(order):
        name = prompts[place].name
        same = ours.tokens[place] == theirs.tokens[place]
        cells.append(
            [
                [link(name, f"#prompt-{place + 1}")] if number < MAX_SHOWN else name,
                prompts[place].family or "-",
                "equal" if same else f"equal up to token {_num_equal(ours.tokens[place], theirs.tokens[place])}",
                len(ours.tokens[place]),
                len(ours.rounds[place]),
                len(theirs.rounds[place]),
                sum(one.differs for one in served[place][label]),
            ]
        )
    head = ["prompt", "task", "texts", "tokens", "rounds, ours", "rounds, vLLM", "that differ"]
    return table(head, cells, text_columns=(0, 1, 2), id="overview")


def _prompt(
    rows: Mapping[str, Answers], served: Mapping[str, Sequence[ServedRound]], place: int, prompt: AskedPrompt, tokenizer: Any
) -> dict[str, Any]:
    ours = list(rows)[BASE]
    differing = {label: sum(one.differs for one in rounds) for label, rounds in served.items()}
    notes = [f"{label}: {counted(count, 'round')} unlike those of {ours}" for label, count in differing.items() if count]
    return {
        "number": place + 1,
        "prompt": prompt,
        "notes": notes or ["All rounds are equal."],
        "map": _map(rows, served, place),
        "answers": [
            {"label": label, "tokens": list(_tokens(rows[label].tokens[place], served[label], tokenizer))}
            for label in list(rows)[BASE:]
        ],
    }


def _map(rows: Mapping[str, Answers], served: Mapping[str, Sequence[ServedRound]], place: int) -> dict[str, Any]:
    """Returns the rounds as boxes: a lane per row, token by token from left to right."""
    longest = max(len(one.tokens[place]) for one in rows.values())
    lanes = [
        {"label": label, "y": number * LANE, "boxes": [_box(one, number_) for number_, one in enumerate(rounds, start=1)]}
        for number, (label, rounds) in enumerate(served.items())
    ]
    ticks = [(tick * UNIT - UNIT / 2, str(tick)) for tick in (1, *range(TICK, longest + 1, TICK))]
    sizes = {"width": max(longest, 24) * UNIT + 2, "height": len(lanes) * LANE + AXIS, "unit": UNIT, "box": BOX, "label": LABEL}
    return {**sizes, "lanes": lanes, "ticks": ticks}


def _box(one: ServedRound, number: int) -> dict[str, Any]:
    tokens = f"token {one.start + 1}" if one.emitted == 1 else f"tokens {one.start + 1} to {one.start + one.emitted}"
    accepts = f"round {number}, {tokens}: accepts {counted(one.accepted, 'drafted token')}"
    return {
        "x": one.start * UNIT,
        "width": one.emitted * UNIT - 2,
        "accepted": one.accepted,
        "style": _style(one.accepted) + (" last" if one.is_last else "") + (" differs" if one.differs else ""),
        "title": accepts + ("; the answer ends here" if one.is_last else "") + ("; our decoder differs" if one.differs else ""),
    }


def _style(accepted: int) -> str:
    return f"d{min(accepted, MAX_STYLES)}"


def _tokens(tokens: Sequence[int], rounds: Sequence[ServedRound], tokenizer: Any) -> Iterator[tuple[str, str, str]]:
    """Yields text, style and note of every token of an answer."""
    detokenizer = Detokenizer(tokenizer)
    texts = [visible(detokenizer.next_piece(tokens, end, end == len(tokens))) for end in range(1, len(tokens) + 1)]
    origins = [("p", "from the prefill")]
    for number, one in enumerate(rounds, start=1):
        for depth in range(1, one.emitted + 1):
            is_drafted = depth <= one.accepted
            style = _style(depth) if is_drafted else "b"
            note = f"round {number}: {f'drafted at depth {depth}, accepted' if is_drafted else 'of the target itself'}"
            origins.append((f"{style} differs" if one.differs else style, note))
    for text, (style, note) in zip(texts, origins, strict=True):
        yield text, style, note
