"""Conversations about scenes of a few shapes: detailed captions, questions with reasons, comparisons of two images."""

from __future__ import annotations

import random

from data_prep.pocket.palette import COLOURS, SHAPES, SIZES, SceneObject, background, draw_scene
from data_prep.pocket.phrases import (
    CELL_WORDS,
    KINDS,
    NUMBERS,
    RELATIONS,
    SCENES,
    SIZE_WORDS,
    Dialogue,
    Phraser,
    Turn,
    beside,
    capital,
    join,
    named,
    place,
    relation,
    statement,
)

CAPTION_PROMPTS = (
    "Describe the image.", "Describe the picture in detail.", "What do you see?", "Give a detailed caption.",
    "Describe this image.", "What is in this picture?", "Please describe the scene in detail.",
)  # fmt: skip
WHY = ("Explain.", "Why?", "Give a reason.", "How do you know?", "Say why.")


def draw_objects(rng: random.Random, count: int) -> list[SceneObject]:
    """Draws `count` objects in different cells and colours."""
    cells, colours = rng.sample(range(9), count), rng.sample(list(COLOURS), count)
    return [
        SceneObject(rng.choice(list(SIZES)), colour, rng.choice(SHAPES), cell)
        for cell, colour in zip(cells, colours, strict=True)
    ]


def ordered(phraser: Phraser, objects: list[SceneObject]) -> list[SceneObject]:
    """Returns the objects in the order of a caption: by rows, by columns, backwards, or by size."""
    rows = sorted(objects, key=lambda obj: obj.cell)
    order = phraser.pick(("rows", "columns", "back", "size"), rows[0].colour)
    if order == "columns":
        return sorted(objects, key=lambda obj: (obj.column, obj.row))
    if order == "back":
        return rows[::-1]
    if order == "size":
        return sorted(objects, key=lambda obj: (-SIZES[obj.size], obj.cell))
    return rows


def opening(phraser: Phraser, objects: list[SceneObject]) -> str:
    count, first = NUMBERS[len(objects)], objects[0]
    kind = phraser.pick(KINDS, first.colour) if len(objects) > 1 else "object"
    scene = phraser.pick(SCENES, first.shape)
    ground = phraser.pick(("", "", " on a pale background", " on a light ground", " and nothing else"), first.size)
    form = phraser.pick(("this", "there", "we", "in"), first.colour)
    if form == "there":
        return f"there {'are' if len(objects) > 1 else 'is'} {count} {kind} in {phraser.pick(('this', 'the'))} {scene}{ground}"
    if form == "we":
        who = phraser.pick(("we", "you", "I"), first.cell)
        return f"{who} {phraser.pick(('see', 'count', 'find'), first.size)} {count} {kind}{ground}"
    if form == "in":
        return f"in this {scene} {phraser.pick(('I see', 'one finds', 'we have'), first.cell)} {count} {kind}{ground}"
    verb = phraser.pick(("shows", "contains", "has", "depicts", "presents"), first.cell)
    return f"{phraser.pick(('this', 'the'), first.size)} {scene} {verb} {count} {kind}{ground}"


def closing(phraser: Phraser, objects: list[SceneObject]) -> str:
    last = objects[-1]
    return phraser.pick(
        ("nothing else is visible", "nothing more can be seen", "no other shape appears", "that is all there is",
         "the rest stays empty", "the ground is plain", "all of them have different colours", "none of them touch",
         "the remaining places are empty", "everything else is blank"),
        last.colour,
    )  # fmt: skip


def caption(phraser: Phraser, objects: list[SceneObject]) -> str:
    in_order = ordered(phraser, objects)
    parts = [opening(phraser, in_order)] if phraser.is_drawn(0.7) else []
    for number, obj in enumerate(in_order):
        clause = beside(phraser, obj, in_order[number - 1]) if number and phraser.is_drawn(0.3) else ""
        parts.append(statement(phraser, obj) + clause)
    if phraser.is_drawn(0.6):
        parts.append(closing(phraser, in_order))
    return join(phraser, parts)


def generate_caption(phraser: Phraser, split: str) -> Dialogue:
    objects = draw_objects(phraser, phraser.randint(3, 5))
    image = draw_scene(objects, background(phraser, split), phraser)
    turns = [Turn(phraser.pick(CAPTION_PROMPTS), caption(phraser, objects))]
    if phraser.is_drawn(0.25):
        turns.append(make_turn(phraser, objects))
    return Dialogue([image], turns, {"scenes": [[vars(obj) for obj in objects]]})


def make_turn(phraser: Phraser, objects: list[SceneObject]) -> Turn:
    kind = phraser.pick(("relation", "relation", "relation", "missing", "colour", "shape", "size", "place", "count"))
    one, other = phraser.sample(objects, 2)
    if kind == "relation":
        return relation_turn(phraser, one, other)
    if kind == "missing":
        return missing_turn(phraser, objects)
    if kind == "count":
        return count_turn(phraser, objects)
    return detail_turn(phraser, one, kind)


def relation_turn(phraser: Phraser, one: SceneObject, other: SceneObject) -> Turn:
    sideways = one.column != other.column and (one.row == other.row or phraser.is_drawn(0.5))
    true = relation(one, other, sideways)
    claimed = phraser.pick(("left", "right") if sideways else ("above", "below"))
    form = phraser.pick(("Is the {} {} {}?", "Is there a {} {} {}?"))
    question = form.format(f"{one.colour} {one.shape}", RELATIONS[claimed][1 if sideways else 0], named(phraser, other, "the"))
    verdict = "Yes" if claimed == true else "No"
    here = f"{named(phraser, one, 'the')} {phraser.pick(('is', 'sits', 'lies', 'stands'), one.cell)} "
    here += f"{phraser.pick(('in', 'at', 'within'), one.colour)} {place(phraser, one)}"
    there = f"{named(phraser, other, 'the')} {phraser.pick(('is', 'sits', 'lies', 'stands'), other.cell)} "
    there += f"{phraser.pick(('in', 'at', 'within'), other.colour)} {place(phraser, other)}"
    bridge = phraser.pick((", and ", ", while ", " and ", ", whereas ", ", but "), one.shape)
    lead = phraser.pick((", ", ", because ", ": ", ", since ", ", as "), verdict)
    answer = f"{verdict}{lead}{here}{bridge}{there}"
    if phraser.is_drawn(0.5):
        answer += phraser.pick((", so it is ", "; hence it is ", ", which puts it ", ". It is "), one.colour)
        answer += f"{phraser.pick(RELATIONS[true], one.shape)} "
        answer += phraser.pick(("it", "the other", "that one"), one.cell)
    return Turn(f"{question} {phraser.pick(WHY)}", answer + ".", [("answer", verdict.lower())])


def missing_turn(phraser: Phraser, objects: list[SceneObject]) -> Turn:
    used = {obj.colour: obj for obj in objects}
    colour = phraser.pick(list(COLOURS))
    shape = phraser.pick([shape for shape in SHAPES if colour not in used or shape != used[colour].shape])
    tail = phraser.pick(("nothing here is " + colour, "that colour is not used", f"I see no {colour} thing at all"), shape)
    if colour in used:
        tail = f"the only {colour} {phraser.pick(('thing', 'object', 'item'), shape)} is a {used[colour].shape}"
    lead = phraser.pick(("No, there is no", "No, I see no", "No, the picture has no", "No, one finds no"), colour)
    bridge = phraser.pick((": ", ", ", "; ", ", because ", ", since "), colour)
    question = f"Is there a {colour} {shape}? {phraser.pick(WHY)}"
    return Turn(question, f"{lead} {colour} {shape}{bridge}{tail}.", [("answer", "no")])


def count_turn(phraser: Phraser, objects: list[SceneObject]) -> Turn:
    in_order = ordered(phraser, objects)
    names = [named(phraser, obj, "the") for obj in in_order]
    count, kind = NUMBERS[len(objects)], phraser.pick(KINDS)
    start = phraser.pick((f"there are {count} {kind}", f"I count {count} {kind}", f"{count}", f"we see {count} {kind}"), count)
    listed = f"{', '.join(names[:-1])} and {names[-1]}"
    return Turn(f"How many {kind} are there?", f"{capital(start)}: {listed}.", [("count", count)])


def detail_turn(phraser: Phraser, obj: SceneObject, kind: str) -> Turn:
    spot = f"the {CELL_WORDS[obj.cell][0]}"
    questions = {
        "colour": f"What colour is the {obj.shape} in {spot}?",
        "shape": f"Which shape is in {spot}?",
        "size": f"How large is the {obj.colour} {obj.shape}?",
        "place": f"Where is the {obj.colour} {obj.shape}?",
    }
    answers = {"colour": obj.colour, "shape": obj.shape, "size": obj.size, "place": str(obj.cell)}
    if kind == "size":
        clause = phraser.pick(("it is", "it looks", "it seems"), obj.colour)
        clause += f" {phraser.pick(SIZE_WORDS[obj.size], obj.colour)}"
    elif kind == "place":
        clause = f"{phraser.pick(('it is', 'it sits', 'you find it', 'it lies'), obj.shape)} in {place(phraser, obj)}"
    else:
        clause = f"{phraser.pick(('it is', 'that is', 'there is', 'I see'), obj.cell)} {named(phraser, obj)}"
    expected = [("position" if kind == "place" else kind, answers[kind])]
    return Turn(questions[kind], capital(clause) + ".", expected)


def generate_question(phraser: Phraser, split: str) -> Dialogue:
    objects = draw_objects(phraser, phraser.randint(2, 5))
    image = draw_scene(objects, background(phraser, split), phraser)
    turns = [make_turn(phraser, objects) for _ in range(phraser.randint(2, 3))]
    return Dialogue([image], turns, {"scenes": [[vars(obj) for obj in objects]]})


def generate_comparison(phraser: Phraser, split: str) -> Dialogue:
    """Generates two images of one object each, and their differences."""
    pair = [draw_objects(phraser, 1)[0], draw_objects(phraser, 1)[0]]
    images = [draw_scene([obj], background(phraser, split), phraser) for obj in pair]
    parts = []
    for which, obj in zip(("first", "second"), pair, strict=True):
        noun = phraser.pick(SCENES, obj.colour)
        if phraser.pick(("in", "the"), obj.shape) == "in":
            parts.append(f"in the {which} {noun} {statement(phraser, obj)}")
        else:
            clause = f"{phraser.pick(('shows', 'has', 'contains', 'presents', 'displays'), obj.cell)} {named(phraser, obj)}"
            parts.append(f"the {which} {noun} {clause} {phraser.pick(('in', 'at', 'within'))} {place(phraser, obj)}")
    questions = ("What differs between the two pictures?", "Compare the two images.", "How do the pictures differ?")
    question = phraser.pick(questions)
    answer = ". ".join(capital(part) for part in parts) + "."
    return Dialogue(images, [Turn(question, answer)], {"scenes": [[vars(obj)] for obj in pair]})


def generate_bare(phraser: Phraser, split: str) -> Dialogue:
    """Generates one object with the shortest caption; used at the start of training only."""
    obj = draw_objects(phraser, 1)[0]
    image = draw_scene([obj], background(phraser, split), phraser)
    text = f"a {obj.size} {obj.colour} {obj.shape} in the {CELL_WORDS[obj.cell][0]}."
    return Dialogue([image], [Turn("Name it.", capital(text))], {"scenes": [[vars(obj)]]})
