"""Signs to read, bar charts to read off, clips of moving shapes, and talk without a picture."""

from __future__ import annotations

import random

from data_prep.pocket.palette import (
    COLOURS,
    MAX_HEIGHT,
    SHAPES,
    SIGNS,
    SIZES,
    Thing,
    background,
    draw_chart,
    draw_clip,
    draw_sign,
)
from data_prep.pocket.phrases import NUMBERS, Pen, capital, join, named, place
from data_prep.pocket.turns import Story, Turn

DESCRIBE = ("Describe the image.", "Describe the picture in detail.", "What do you see?", "Describe this image.")
Bars = list[tuple[str, int]]


def tell_sign(rng: random.Random, split: str) -> Story:
    pen = Pen(rng)
    word, number, board = rng.choice(SIGNS), str(rng.randint(10, 99)), rng.choice(list(COLOURS))
    shown = rng.choice(("word", "word", "number", "both", "both"))
    word, number = ("" if shown == "number" else word), ("" if shown == "word" else number)
    picture = draw_sign(word, number, board, background(rng, split), rng)
    kinds = rng.sample(["describe", "read", "board"], 2)
    turns = [_sign_turn(pen, kind, word, number, board) for kind in kinds]
    return Story([picture], turns, {"sign": [text for text in (word, number) if text], "board": board})


def _sign_turn(pen: Pen, kind: str, word: str, number: str, board: str) -> Turn:
    texts = [("sign", text) for text in (word, number) if text]
    noun = pen.pick(("sign", "board", "plate", "panel"), board, word)
    says = pen.pick(("says", "reads", "bears", "carries", "spells"), word[:1], number[:1])
    said = f'{says} "{word}"' if word else f'{says} "{number}"'
    if word and number:
        under = pen.pick((" and below it ", ", with below ", " over ", ", and under that ", " above "), word, number[-1:])
        said += f'{under}"{number}"'
    if kind == "board":
        start = pen.pick(("it is", "the " + noun + " is", "its colour is", "that " + noun + " is"), board, word)
        tail = pen.pick(("", f" and it {said}", f", and it {said}", f"; it {said}"), word, board)
        return Turn("What colour is the sign?", f"{capital(start)} {board}{tail}.", [("colour", board)])
    if kind == "read":
        question = pen.pick(("What does the sign say?", "Read the sign.", "What is written here?", "Which text do you see?"))
        colour = pen.pick(("", "", board + " "), word, number)
        return Turn(question, f"{capital(pen.pick(('the', 'this', 'that'), board))} {colour}{noun} {said}.", texts)
    start = pen.pick(("this is a", "we see a", "there is a", "the picture shows a", "I see a", "here is a"), word, board)
    bridge = pen.pick((" that ", ", and it ", " which ", "; it "), board, number[:1])
    letters = pen.pick(("dark", "deep", "dim") if board in ("yellow", "pink", "orange") else ("white", "pale", "light"), board)
    style = pen.pick(("", f" in {letters} letters", f", in {letters} print", f", written in {letters}"), word, number)
    return Turn(pen.pick(DESCRIBE), f"{capital(start)} {board} {noun}{bridge}{said}{style}.", [("colour", board), *texts])


def tell_chart(rng: random.Random, split: str) -> Story:
    pen, count = Pen(rng), rng.randint(3, 5)
    heights = rng.sample(range(1, MAX_HEIGHT + 1), count)
    bars = list(zip(rng.sample(list(COLOURS), count), heights, strict=True))
    picture = draw_chart(bars, background(rng, split))
    kinds = rng.sample(["describe", "highest", "lowest", "value", "value", "more", "count"], 2)
    return Story([picture], [_chart_turn(pen, kind, bars) for kind in kinds], {"bars": dict(bars)})


def _reach(pen: Pen, colour: str, height: int) -> str:
    verb = pen.pick(("reaches", "rises to", "goes up to", "stands at", "measures", "comes to", "is at"), colour, height)
    return f"{verb} {height}{pen.pick(('', '', ' units' if height > 1 else ' unit'), colour)}"


def _bar(pen: Pen, colour: str, height: int) -> str:
    return f"the {colour} {pen.pick(('bar', 'column', 'one'), colour, height)}"


def _chart_turn(pen: Pen, kind: str, bars: Bars) -> Turn:
    colour, height = pen.rng.choice(bars)
    by_height = sorted(bars, key=lambda bar: bar[1])
    if kind == "describe":
        return _describe_chart(pen, bars)
    if kind == "count":
        start = pen.pick(("there are", "I count", "we see", "the chart has"), len(bars), bars[0][0])
        names = pen.pick((": ", ", namely ", ", that is "), len(bars)) + ", ".join(colour for colour, _ in bars)
        return Turn(
            "How many bars are there?",
            f"{capital(start)} {NUMBERS[len(bars)]}{names}.",
            [("count", NUMBERS[len(bars)])],
        )
    if kind == "value":
        question = pen.pick((f"How high is the {colour} bar?", f"What is the value of the {colour} bar?"))
        return Turn(question, f"{capital(_bar(pen, colour, height))} {_reach(pen, colour, height)}.", [("height", str(height))])
    if kind == "more":
        other, level = pen.rng.choice([bar for bar in bars if bar[0] != colour])
        verdict = "Yes" if height > level else "No"
        lead = pen.pick((", because ", ": ", ", since ", ", as ", ", "), colour, other)
        bridge = pen.pick((" and ", ", while ", ", but ", ", whereas "), height, level)
        said = f"{_bar(pen, colour, height)} {_reach(pen, colour, height)}{bridge}"
        said += f"{_bar(pen, other, level)} {_reach(pen, other, level)}"
        return Turn(
            f"Is the {colour} bar higher than the {other} bar? Explain.",
            f"{verdict}{lead}{said}.",
            [("answer", verdict.lower())],
        )
    return _extreme(pen, kind, by_height)


def _extreme(pen: Pen, kind: str, by_height: Bars) -> Turn:
    (colour, height), (next_colour, next_height) = (by_height[-1], by_height[-2]) if kind == "highest" else by_height[:2]
    words = ("highest", "tallest") if kind == "highest" else ("lowest", "shortest")
    is_it = f"{_bar(pen, colour, height)} is the {pen.pick(words, colour, next_colour)}"
    lead = pen.pick((": it ", ", because it ", ", as it ", "; it ", ", since it "), next_colour, height)
    reason = f"{lead}{_reach(pen, colour, height)}"
    if pen.chance(0.6):
        bridge = pen.pick((", while ", ", and next ", " and ", ", but ", ", whereas "), colour, next_height)
        reason += f"{bridge}{_bar(pen, next_colour, next_height)} {_reach(pen, next_colour, next_height)}"
    return Turn(
        f"Which bar is the {words[0]}? {pen.pick(('Explain.', 'Why?'))}",
        f"{capital(is_it)}{reason}.",
        [("colour", colour)],
    )


def _describe_chart(pen: Pen, bars: Bars) -> Turn:
    first = bars[0]
    chart = pen.pick(("chart", "bar chart", "diagram", "graph", "plot"), *first)
    start = pen.pick(
        (f"this {chart} has", f"the {chart} shows", f"we see a {chart} with", f"here is a {chart} with"),
        len(bars),
        first[0],
    )
    parts = [f"{start} {NUMBERS[len(bars)]} {pen.pick(('bars', 'columns'), first[0])}"]
    order = bars if pen.pick(("right", "back"), *bars[-1]) == "right" else bars[::-1]
    parts[0] += pen.pick(("", " from left to right" if order is bars else " from right to left"), *first)
    parts += [f"{_bar(pen, *bar)} {_reach(pen, *bar)}" for bar in order]
    return Turn(pen.pick((*DESCRIBE, "Describe the chart.")), join(pen, parts))


def tell_clip(rng: random.Random, split: str) -> Story:
    pen = Pen(rng)
    start, end, resting = _path(rng)
    colours = rng.sample(list(COLOURS), 2)
    mover = Thing(rng.choice(list(SIZES)), colours[0], rng.choice(SHAPES), start)
    still = Thing(rng.choice(list(SIZES)), colours[1], rng.choice(SHAPES), resting) if pen.chance(0.6) else None
    frames = draw_clip(mover, end, still, background(rng, split))
    things = [vars(mover) | {"end": end}] + ([vars(still)] if still else [])
    question = pen.pick(
        ("What happens in the video?", "Describe the clip.", "Describe the video.", "What moves, and where to?")
    )
    return Story(frames, [Turn(question, _clip_text(pen, mover, end, still))], {"scenes": [things]}, is_clip=True)


def _path(rng: random.Random) -> tuple[int, int, int]:
    """Start and end on one row or column, and a cell off that line."""
    line, near, far = rng.randrange(3), *rng.choice(((0, 2), (2, 0), (0, 1), (1, 2), (2, 1), (1, 0)))
    along_row = rng.random() < 0.5
    cells = [line * 3 + k if along_row else k * 3 + line for k in (near, far)]
    off = [c for c in range(9) if (c // 3 if along_row else c % 3) != line]
    return cells[0], cells[1], rng.choice(off)


def _clip_text(pen: Pen, mover: Thing, end: int, still: Thing | None) -> str:
    verb = pen.pick(("moves", "travels", "goes", "glides", "slides", "drifts", "wanders"), mover.shape, mover.cell)
    goal = Thing(mover.size, mover.colour, mover.shape, end)
    pace = pen.pick(("", "", " slowly", " steadily", " straight", " smoothly"), mover.colour, end)
    start, target = place(pen, mover), place(pen, goal)
    parts = [
        f"{named(pen, mover)} {verb}{pace} from {start} {pen.pick(('to', 'over to', 'towards'), mover.size, end)} {target}"
    ]
    if still is not None:
        verb = pen.pick(("stays", "remains", "rests", "keeps still", "waits", "does not move"), still.shape, still.colour)
        told = f"{named(pen, still)} {verb} {pen.pick(('in', 'at', 'within'), still.cell)} {place(pen, still)}"
        parts.insert(int(pen.chance(0.6)), told)
    if pen.chance(0.4):
        parts.append(
            pen.pick(("nothing else happens", "the rest is empty", "then the clip ends", "that is all"), mover.colour, end)
        )
    return join(pen, parts)


SIDES = {"circle": "no", "square": "four", "triangle": "three", "star": "ten", "diamond": "four", "cross": "twelve"}
OPPOSITES = {"left": "right", "right": "left", "top": "bottom", "bottom": "top", "large": "small", "small": "large",
             "above": "below", "below": "above", "high": "low", "low": "high"}  # fmt: skip


def tell_text(rng: random.Random, split: str) -> Story:
    """Talk without any picture."""
    pen = Pen(rng)
    makers = rng.sample((_ask_sides, _ask_opposite, _ask_larger, _ask_name), 3)
    return Story([], [maker(pen) for maker in makers])


def _ask_sides(pen: Pen) -> Turn:
    shape = pen.rng.choice(SHAPES)
    verb = pen.pick(("has", "has got", "comes with", "is drawn with"), shape)
    return Turn(
        f"How many sides does a {shape} have?",
        f"A {shape} {verb} {SIDES[shape]} {pen.pick(('sides', 'edges'), shape)}.",
    )


def _ask_opposite(pen: Pen) -> Turn:
    word, other = pen.rng.choice(list(OPPOSITES.items()))
    form = pen.pick(("The opposite of {} is {}.", "It is {1}, the reverse of {0}.", "{0} is the contrary of {1}."), word)
    return Turn(f"What is the opposite of {word}?", capital(form.format(word, other)))


def _ask_larger(pen: Pen) -> Turn:
    low, high = sorted(pen.rng.sample(range(10), 2))
    asked = f"{low} or {high}" if pen.chance(0.5) else f"{high} or {low}"
    lead = pen.pick((", because ", ": ", ", since ", ", as "), low)
    why = pen.pick(("it exceeds {}", "it comes after {}", "{} is smaller", "{} comes first"), high).format(low)
    return Turn(
        f"Which is larger, {asked}?",
        f"{pen.pick(('The larger is', 'It is', 'The larger one is'), low)} {high}{lead}{why}.",
    )


def _ask_name(pen: Pen) -> Turn:
    what = pen.rng.choice(("colours", "shapes"))
    chosen = pen.rng.sample(list(COLOURS) if what == "colours" else SHAPES, 3)
    start = pen.pick((f"three {what} are", "for example", "such are", f"some {what} are"), chosen[0])
    return Turn(f"Name three {what}.", f"{capital(start)} {chosen[0]}, {chosen[1]} and {chosen[2]}.")
