"""Scenes of a few shapes: detailed captions, questions with reasons, and comparisons of two pictures."""

from __future__ import annotations

import random

from data_prep.pocket.palette import COLOURS, SHAPES, SIZES, Thing, background, draw_scene
from data_prep.pocket.phrases import (
    CELL_WORDS,
    KINDS,
    NUMBERS,
    RELATIONS,
    SCENES,
    SIZE_WORDS,
    Pen,
    beside,
    capital,
    join,
    named,
    place,
    relation,
    statement,
)
from data_prep.pocket.turns import Story, Turn

CAPTION_PROMPTS = (
    "Describe the image.", "Describe the picture in detail.", "What do you see?", "Give a detailed caption.",
    "Describe this image.", "What is in this picture?", "Please describe the scene in detail.",
)  # fmt: skip
WHY = ("Explain.", "Why?", "Give a reason.", "How do you know?", "Say why.")


def draw_things(rng: random.Random, count: int) -> list[Thing]:
    """`count` things in different cells and of different colours."""
    cells, colours = rng.sample(range(9), count), rng.sample(list(COLOURS), count)
    return [
        Thing(rng.choice(list(SIZES)), colour, rng.choice(SHAPES), cell) for cell, colour in zip(cells, colours, strict=True)
    ]


def ordered(pen: Pen, things: list[Thing]) -> list[Thing]:
    """The order in which a caption tells things: by rows, by columns, backwards, or by size."""
    rows = sorted(things, key=lambda thing: thing.cell)
    order = pen.pick(("rows", "columns", "back", "size"), rows[0].colour, rows[-1].shape, len(things))
    if order == "columns":
        return sorted(things, key=lambda thing: (thing.column, thing.row))
    if order == "back":
        return rows[::-1]
    if order == "size":
        return sorted(things, key=lambda thing: (-SIZES[thing.size], thing.cell))
    return rows


def opening(pen: Pen, things: list[Thing]) -> str:
    count, first = NUMBERS[len(things)], things[0]
    kind = pen.pick(KINDS, first.colour, first.cell) if len(things) > 1 else "object"
    scene = pen.pick(SCENES, first.shape, len(things))
    ground = pen.pick(("", "", " on a pale background", " on a light ground", " and nothing else"), first.size)
    form = pen.pick(("this", "there", "we", "in"), first.colour, first.shape)
    if form == "there":
        return f"there {'are' if len(things) > 1 else 'is'} {count} {kind} in {pen.pick(('this', 'the'))} {scene}{ground}"
    if form == "we":
        who = pen.pick(("we", "you", "I"), first.cell)
        return f"{who} {pen.pick(('see', 'count', 'find'), first.size)} {count} {kind}{ground}"
    if form == "in":
        return f"in this {scene} {pen.pick(('I see', 'one finds', 'we have'), first.cell)} {count} {kind}{ground}"
    verb = pen.pick(("shows", "contains", "has", "depicts", "presents"), first.cell, first.colour)
    return f"{pen.pick(('this', 'the'), first.size)} {scene} {verb} {count} {kind}{ground}"


def closing(pen: Pen, things: list[Thing]) -> str:
    last = things[-1]
    return pen.pick(
        ("nothing else is visible", "nothing more can be seen", "no other shape appears", "that is all there is",
         "the rest stays empty", "the ground is plain", "all of them have different colours", "none of them touch",
         "the remaining places are empty", "everything else is blank"),
        last.colour, last.cell,
    )  # fmt: skip


def caption(pen: Pen, things: list[Thing]) -> str:
    told = ordered(pen, things)
    parts = [opening(pen, told)] if pen.chance(0.7) else []
    for number, thing in enumerate(told):
        clause = beside(pen, thing, told[number - 1]) if number and pen.chance(0.3) else ""
        parts.append(statement(pen, thing) + clause)
    if pen.chance(0.6):
        parts.append(closing(pen, told))
    return join(pen, parts)


def tell_caption(rng: random.Random, split: str, fewest: int = 3, most: int = 5) -> Story:
    pen, things = Pen(rng), draw_things(rng, rng.randint(fewest, most))
    picture = draw_scene(things, background(rng, split), rng)
    turns = [Turn(pen.pick(CAPTION_PROMPTS), caption(pen, things))]
    if pen.chance(0.25):
        turns.append(ask(pen, things))
    return Story([picture], turns, {"scenes": [[vars(thing) for thing in things]]})


def ask(pen: Pen, things: list[Thing]) -> Turn:
    kind = pen.pick(("relation", "relation", "relation", "missing", "colour", "shape", "size", "place", "count"))
    one, other = pen.rng.sample(things, 2)
    if kind == "relation":
        return ask_relation(pen, one, other)
    if kind == "missing":
        return ask_missing(pen, things)
    if kind == "count":
        return ask_count(pen, things)
    return ask_detail(pen, one, kind)


def ask_relation(pen: Pen, one: Thing, other: Thing) -> Turn:
    sideways = one.column != other.column and (one.row == other.row or pen.chance(0.5))
    true = relation(one, other, sideways)
    asked = pen.pick(("left", "right") if sideways else ("above", "below"))
    form = pen.pick(("Is the {} {} {}?", "Is there a {} {} {}?"))
    question = form.format(f"{one.colour} {one.shape}", RELATIONS[asked][1 if sideways else 0], named(pen, other, "the"))
    verdict = "Yes" if asked == true else "No"
    here = f"{named(pen, one, 'the')} {pen.pick(('is', 'sits', 'lies', 'stands'), one.cell, other.colour)} "
    here += f"{pen.pick(('in', 'at', 'within'), one.colour)} {place(pen, one)}"
    there = f"{named(pen, other, 'the')} {pen.pick(('is', 'sits', 'lies', 'stands'), other.cell, one.colour)} "
    there += f"{pen.pick(('in', 'at', 'within'), other.colour)} {place(pen, other)}"
    bridge = pen.pick((", and ", ", while ", " and ", ", whereas ", ", but "), one.shape, other.shape)
    lead = pen.pick((", ", ", because ", ": ", ", since ", ", as "), verdict, one.cell, other.cell)
    answer = f"{verdict}{lead}{here}{bridge}{there}"
    if pen.chance(0.5):
        answer += pen.pick((", so it is ", "; hence it is ", ", which puts it ", ". It is "), one.colour, other.shape)
        answer += f"{pen.pick(RELATIONS[true], one.shape, other.colour)} "
        answer += pen.pick(("it", "the other", "that one"), one.cell)
    return Turn(f"{question} {pen.pick(WHY)}", answer + ".", [("answer", verdict.lower())])


def ask_missing(pen: Pen, things: list[Thing]) -> Turn:
    used = {thing.colour: thing for thing in things}
    colour = pen.pick(list(COLOURS))
    shape = pen.pick([shape for shape in SHAPES if colour not in used or shape != used[colour].shape])
    tail = pen.pick(("nothing here is " + colour, "that colour is not used", f"I see no {colour} thing at all"), shape)
    if colour in used:
        tail = f"the only {colour} {pen.pick(('thing', 'object', 'item'), shape)} is a {used[colour].shape}"
    lead = pen.pick(("No, there is no", "No, I see no", "No, the picture has no", "No, one finds no"), colour, shape)
    bridge = pen.pick((": ", ", ", "; ", ", because ", ", since "), colour, shape)
    return Turn(f"Is there a {colour} {shape}? {pen.pick(WHY)}", f"{lead} {colour} {shape}{bridge}{tail}.", [("answer", "no")])


def ask_count(pen: Pen, things: list[Thing]) -> Turn:
    told = ordered(pen, things)
    names = [named(pen, thing, "the") for thing in told]
    count, kind = NUMBERS[len(things)], pen.pick(KINDS)
    start = pen.pick((f"there are {count} {kind}", f"I count {count} {kind}", f"{count}", f"we see {count} {kind}"), count)
    listed = f"{', '.join(names[:-1])} and {names[-1]}"
    return Turn(f"How many {kind} are there?", f"{capital(start)}: {listed}.", [("count", count)])


def ask_detail(pen: Pen, thing: Thing, kind: str) -> Turn:
    spot = f"the {CELL_WORDS[thing.cell][0]}"
    questions = {
        "colour": f"What colour is the {thing.shape} in {spot}?",
        "shape": f"Which shape is in {spot}?",
        "size": f"How large is the {thing.colour} {thing.shape}?",
        "place": f"Where is the {thing.colour} {thing.shape}?",
    }
    answers = {"colour": thing.colour, "shape": thing.shape, "size": thing.size, "place": str(thing.cell)}
    if kind == "size":
        said = (
            pen.pick(("it is", "it looks", "it seems"), thing.colour)
            + " "
            + pen.pick(SIZE_WORDS[thing.size], thing.colour, thing.cell)
        )
    elif kind == "place":
        said = f"{pen.pick(('it is', 'it sits', 'you find it', 'it lies'), thing.shape)} in {place(pen, thing)}"
    else:
        said = f"{pen.pick(('it is', 'that is', 'there is', 'I see'), thing.cell)} {named(pen, thing)}"
    expected = [("position" if kind == "place" else kind, answers[kind])]
    return Turn(questions[kind], capital(said) + ".", expected)


def tell_question(rng: random.Random, split: str) -> Story:
    pen, things = Pen(rng), draw_things(rng, rng.randint(2, 5))
    picture = draw_scene(things, background(rng, split), rng)
    turns = [ask(pen, things) for _ in range(rng.randint(2, 3))]
    return Story([picture], turns, {"scenes": [[vars(thing) for thing in things]]})


def tell_compare(rng: random.Random, split: str) -> Story:
    """Two pictures of one thing each, and what differs."""
    pen = Pen(rng)
    pair = [draw_things(rng, 1)[0], draw_things(rng, 1)[0]]
    pictures = [draw_scene([thing], background(rng, split), rng) for thing in pair]
    parts = []
    for which, thing in zip(("first", "second"), pair, strict=True):
        noun = pen.pick(SCENES, thing.colour, which)
        if pen.pick(("in", "the"), thing.shape, which) == "in":
            parts.append(f"in the {which} {noun} {statement(pen, thing)}")
        else:
            verb = pen.pick(HOLDS_ONE, thing.cell, which)
            parts.append(
                f"the {which} {noun} {verb} {named(pen, thing)} {pen.pick(('in', 'at', 'within'))} {place(pen, thing)}"
            )
    question = pen.pick(("What differs between the two pictures?", "Compare the two images.", "How do the pictures differ?"))
    answer = ". ".join(capital(part) for part in parts) + "."
    return Story(pictures, [Turn(question, answer)], {"scenes": [[vars(thing)] for thing in pair]})


HOLDS_ONE = ("shows", "has", "contains", "presents", "displays")


def tell_bare(rng: random.Random, split: str) -> Story:
    """Warm-up: one thing and the shortest caption; used at the start of training only."""
    thing = draw_things(rng, 1)[0]
    picture = draw_scene([thing], background(rng, split), rng)
    text = f"a {thing.size} {thing.colour} {thing.shape} in the {CELL_WORDS[thing.cell][0]}."
    return Story([picture], [Turn("Name it.", capital(text))], {"scenes": [[vars(thing)]]})
