"""Conversations about generated images: scenes of a few shapes, signs, bar charts, videos; and conversations without images."""

from __future__ import annotations

from data_prep.pocket import palette
from data_prep.pocket.palette import RELATIONS, SHAPES, Dialogue, Phraser, SceneObject, Turn, background, capital, named, place

CAPTION_PROMPTS = (
    "Describe the image.", "Describe the picture in detail.", "What do you see?", "Give a detailed caption.",
    "Describe this image.", "What is in this picture?", "Please describe the scene in detail.",
)  # fmt: skip
WHY = ("Explain.", "Why?", "Give a reason.", "How do you know?", "Say why.")


def ordered(phraser: Phraser, objects: list[SceneObject]) -> list[SceneObject]:
    """Returns the objects in the order of a caption: by rows, by columns, backwards, or by size."""
    rows = sorted(objects, key=lambda obj: obj.cell)
    order = phraser.pick(("rows", "columns", "back", "size"), rows[0].colour)
    if order == "columns":
        return sorted(objects, key=lambda obj: (obj.column, obj.row))
    if order == "back":
        return rows[::-1]
    if order == "size":
        return sorted(objects, key=lambda obj: (-palette.SIZES[obj.size], obj.cell))
    return rows


def opening(phraser: Phraser, objects: list[SceneObject]) -> str:
    count, first = palette.NUMBERS[len(objects)], objects[0]
    kind = phraser.pick(palette.KINDS, first.colour) if len(objects) > 1 else "object"
    scene = phraser.pick(palette.SCENES, first.shape)
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
        clause = palette.beside(phraser, obj, in_order[number - 1]) if number and phraser.is_drawn(0.3) else ""
        parts.append(palette.statement(phraser, obj) + clause)
    if phraser.is_drawn(0.6):
        parts.append(closing(phraser, in_order))
    return palette.join(phraser, parts)


def generate_caption(phraser: Phraser, split: str) -> Dialogue:
    objects = palette.draw_objects(phraser, phraser.randint(3, 5))
    image = palette.draw_scene(objects, background(phraser, split), phraser)
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
    true = palette.relation(one, other, sideways)
    claimed = phraser.pick(("left", "right") if sideways else ("above", "below"))
    form = phraser.pick(("Is the {} {} {}?", "Is there a {} {} {}?"))
    question = form.format(f"{one.colour} {one.shape}", RELATIONS[claimed][1 if sideways else 0], named(phraser, other, "the"))
    verdict = "Yes" if claimed == true else "No"
    here, there = (
        f"{named(phraser, obj, 'the')} {phraser.pick(('is', 'sits', 'lies', 'stands'), obj.cell)} "
        f"{phraser.pick(('in', 'at', 'within'), obj.colour)} {place(phraser, obj)}"
        for obj in (one, other)
    )
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
    colour = phraser.pick(list(palette.COLOURS))
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
    count, kind = palette.NUMBERS[len(objects)], phraser.pick(palette.KINDS)
    start = phraser.pick((f"there are {count} {kind}", f"I count {count} {kind}", f"{count}", f"we see {count} {kind}"), count)
    listed = f"{', '.join(names[:-1])} and {names[-1]}"
    return Turn(f"How many {kind} are there?", f"{capital(start)}: {listed}.", [("count", count)])


def detail_turn(phraser: Phraser, obj: SceneObject, kind: str) -> Turn:
    spot = f"the {palette.CELL_WORDS[obj.cell][0]}"
    questions = {
        "colour": f"What colour is the {obj.shape} in {spot}?",
        "shape": f"Which shape is in {spot}?",
        "size": f"How large is the {obj.colour} {obj.shape}?",
        "place": f"Where is the {obj.colour} {obj.shape}?",
    }
    answers = {"colour": obj.colour, "shape": obj.shape, "size": obj.size, "place": str(obj.cell)}
    if kind == "size":
        clause = phraser.pick(("it is", "it looks", "it seems"), obj.colour)
        clause += f" {phraser.pick(palette.SIZE_WORDS[obj.size], obj.colour)}"
    elif kind == "place":
        clause = f"{phraser.pick(('it is', 'it sits', 'you find it', 'it lies'), obj.shape)} in {place(phraser, obj)}"
    else:
        clause = f"{phraser.pick(('it is', 'that is', 'there is', 'I see'), obj.cell)} {named(phraser, obj)}"
    expected = [("position" if kind == "place" else kind, answers[kind])]
    return Turn(questions[kind], capital(clause) + ".", expected)


def generate_question(phraser: Phraser, split: str) -> Dialogue:
    objects = palette.draw_objects(phraser, phraser.randint(2, 5))
    image = palette.draw_scene(objects, background(phraser, split), phraser)
    turns = [make_turn(phraser, objects) for _ in range(phraser.randint(2, 3))]
    return Dialogue([image], turns, {"scenes": [[vars(obj) for obj in objects]]})


def generate_comparison(phraser: Phraser, split: str) -> Dialogue:
    """Generates two images of one object each, and their differences."""
    pair = [palette.draw_objects(phraser, 1)[0], palette.draw_objects(phraser, 1)[0]]
    images = [palette.draw_scene([obj], background(phraser, split), phraser) for obj in pair]
    parts = []
    for which, obj in zip(("first", "second"), pair, strict=True):
        noun = phraser.pick(palette.SCENES, obj.colour)
        if phraser.pick(("in", "the"), obj.shape) == "in":
            parts.append(f"in the {which} {noun} {palette.statement(phraser, obj)}")
        else:
            clause = f"{phraser.pick(('shows', 'has', 'contains', 'presents', 'displays'), obj.cell)} {named(phraser, obj)}"
            parts.append(f"the {which} {noun} {clause} {phraser.pick(('in', 'at', 'within'))} {place(phraser, obj)}")
    questions = ("What differs between the two pictures?", "Compare the two images.", "How do the pictures differ?")
    question = phraser.pick(questions)
    answer = ". ".join(capital(part) for part in parts) + "."
    return Dialogue(images, [Turn(question, answer)], {"scenes": [[vars(obj)] for obj in pair]})


def generate_bare(phraser: Phraser, split: str) -> Dialogue:
    """Generates one object with the shortest caption; used at the start of training only."""
    obj = palette.draw_objects(phraser, 1)[0]
    image = palette.draw_scene([obj], background(phraser, split), phraser)
    text = f"a {obj.size} {obj.colour} {obj.shape} in the {palette.CELL_WORDS[obj.cell][0]}."
    return Dialogue([image], [Turn("Name it.", capital(text))], {"scenes": [[vars(obj)]]})


# -- signs, charts, videos, text -----------------------------------------------------------------------------------------

DESCRIBE = ("Describe the image.", "Describe the picture in detail.", "What do you see?", "Describe this image.")
Bars = list[tuple[str, int]]


def generate_sign(phraser: Phraser, split: str) -> Dialogue:
    word, number, board = phraser.choice(palette.SIGNS), str(phraser.randint(10, 99)), phraser.choice(list(palette.COLOURS))
    shown = phraser.choice(("word", "word", "number", "both", "both"))
    word, number = ("" if shown == "number" else word), ("" if shown == "word" else number)
    image = palette.draw_sign(word, number, board, background(phraser, split), phraser)
    kinds = phraser.sample(["describe", "read", "board"], 2)
    turns = [_sign_turn(phraser, kind, word, number, board) for kind in kinds]
    return Dialogue([image], turns, {"sign": [text for text in (word, number) if text], "board": board})


def _sign_turn(phraser: Phraser, kind: str, word: str, number: str, board: str) -> Turn:
    texts = [("sign", text) for text in (word, number) if text]
    noun = phraser.pick(("sign", "board", "plate", "panel"), board)
    verb = phraser.pick(("says", "reads", "bears", "carries", "spells"), word[:1])
    clause = f'{verb} "{word}"' if word else f'{verb} "{number}"'
    if word and number:
        under = phraser.pick((" and below it ", ", with below ", " over ", ", and under that ", " above "), word)
        clause += f'{under}"{number}"'
    if kind == "board":
        start = phraser.pick(("it is", "the " + noun + " is", "its colour is", "that " + noun + " is"), board)
        tail = phraser.pick(("", f" and it {clause}", f", and it {clause}", f"; it {clause}"), word)
        return Turn("What colour is the sign?", f"{capital(start)} {board}{tail}.", [("colour", board)])
    if kind == "read":
        questions = ("What does the sign say?", "Read the sign.", "What is written here?", "Which text do you see?")
        question = phraser.pick(questions)
        colour = phraser.pick(("", "", board + " "), word)
        return Turn(question, f"{capital(phraser.pick(('the', 'this', 'that'), board))} {colour}{noun} {clause}.", texts)
    start = phraser.pick(("this is a", "we see a", "there is a", "the picture shows a", "I see a", "here is a"), word)
    bridge = phraser.pick((" that ", ", and it ", " which ", "; it "), board)
    shades = ("dark", "deep", "dim") if board in ("yellow", "pink", "orange") else ("white", "pale", "light")
    letters = phraser.pick(shades, board)
    style = phraser.pick(("", f" in {letters} letters", f", in {letters} print", f", written in {letters}"), word)
    return Turn(phraser.pick(DESCRIBE), f"{capital(start)} {board} {noun}{bridge}{clause}{style}.", [("colour", board), *texts])


def generate_chart(phraser: Phraser, split: str) -> Dialogue:
    count = phraser.randint(3, 5)
    heights = phraser.sample(range(1, palette.MAX_HEIGHT + 1), count)
    bars = list(zip(phraser.sample(list(palette.COLOURS), count), heights, strict=True))
    image = palette.draw_chart(bars, background(phraser, split))
    kinds = phraser.sample(["describe", "highest", "lowest", "value", "value", "more", "count"], 2)
    return Dialogue([image], [_chart_turn(phraser, kind, bars) for kind in kinds], {"bars": dict(bars)})


def _reach(phraser: Phraser, colour: str, height: int) -> str:
    verb = phraser.pick(("reaches", "rises to", "goes up to", "stands at", "measures", "comes to", "is at"), colour)
    return f"{verb} {height}{phraser.pick(('', '', ' units' if height > 1 else ' unit'), colour)}"


def _bar(phraser: Phraser, colour: str, height: int) -> str:
    return f"the {colour} {phraser.pick(('bar', 'column', 'one'), colour)}"


def _chart_turn(phraser: Phraser, kind: str, bars: Bars) -> Turn:
    colour, height = phraser.choice(bars)
    by_height = sorted(bars, key=lambda bar: bar[1])
    if kind == "describe":
        return _describe_chart(phraser, bars)
    if kind == "count":
        start = phraser.pick(("there are", "I count", "we see", "the chart has"), len(bars))
        names = phraser.pick((": ", ", namely ", ", that is "), len(bars)) + ", ".join(colour for colour, _ in bars)
        number = palette.NUMBERS[len(bars)]
        return Turn("How many bars are there?", f"{capital(start)} {number}{names}.", [("count", number)])
    if kind == "value":
        question = phraser.pick((f"How high is the {colour} bar?", f"What is the value of the {colour} bar?"))
        answer = f"{capital(_bar(phraser, colour, height))} {_reach(phraser, colour, height)}."
        return Turn(question, answer, [("height", str(height))])
    if kind == "more":
        other, level = phraser.choice([bar for bar in bars if bar[0] != colour])
        verdict = "Yes" if height > level else "No"
        lead = phraser.pick((", because ", ": ", ", since ", ", as ", ", "), colour)
        bridge = phraser.pick((" and ", ", while ", ", but ", ", whereas "), height)
        clause = f"{_bar(phraser, colour, height)} {_reach(phraser, colour, height)}{bridge}"
        clause += f"{_bar(phraser, other, level)} {_reach(phraser, other, level)}"
        question = f"Is the {colour} bar higher than the {other} bar? Explain."
        return Turn(question, f"{verdict}{lead}{clause}.", [("answer", verdict.lower())])
    return _extreme(phraser, kind, by_height)


def _extreme(phraser: Phraser, kind: str, by_height: Bars) -> Turn:
    (colour, height), (next_colour, next_height) = (by_height[-1], by_height[-2]) if kind == "highest" else by_height[:2]
    words = ("highest", "tallest") if kind == "highest" else ("lowest", "shortest")
    is_it = f"{_bar(phraser, colour, height)} is the {phraser.pick(words, colour)}"
    lead = phraser.pick((": it ", ", because it ", ", as it ", "; it ", ", since it "), next_colour)
    reason = f"{lead}{_reach(phraser, colour, height)}"
    if phraser.is_drawn(0.6):
        bridge = phraser.pick((", while ", ", and next ", " and ", ", but ", ", whereas "), colour)
        reason += f"{bridge}{_bar(phraser, next_colour, next_height)} {_reach(phraser, next_colour, next_height)}"
    question = f"Which bar is the {words[0]}? {phraser.pick(('Explain.', 'Why?'))}"
    return Turn(question, f"{capital(is_it)}{reason}.", [("colour", colour)])


def _describe_chart(phraser: Phraser, bars: Bars) -> Turn:
    first = bars[0]
    chart = phraser.pick(("chart", "bar chart", "diagram", "graph", "plot"), first[0])
    starts = (f"this {chart} has", f"the {chart} shows", f"we see a {chart} with", f"here is a {chart} with")
    start = phraser.pick(starts, len(bars))
    parts = [f"{start} {palette.NUMBERS[len(bars)]} {phraser.pick(('bars', 'columns'), first[0])}"]
    order = bars if phraser.pick(("right", "back"), bars[-1][0]) == "right" else bars[::-1]
    parts[0] += phraser.pick(("", " from left to right" if order is bars else " from right to left"), first[0])
    parts += [f"{_bar(phraser, *bar)} {_reach(phraser, *bar)}" for bar in order]
    return Turn(phraser.pick((*DESCRIBE, "Describe the chart.")), palette.join(phraser, parts))


def generate_video(phraser: Phraser, split: str) -> Dialogue:
    start, end, resting = _path(phraser)
    colours = phraser.sample(list(palette.COLOURS), 2)
    mover = SceneObject(phraser.choice(list(palette.SIZES)), colours[0], phraser.choice(SHAPES), start)
    still = (
        SceneObject(phraser.choice(list(palette.SIZES)), colours[1], phraser.choice(SHAPES), resting)
        if phraser.is_drawn(0.6)
        else None
    )
    frames = palette.draw_video(mover, end, still, background(phraser, split))
    objects = [vars(mover) | {"end": end}] + ([vars(still)] if still else [])
    questions = ("What happens in the video?", "Describe the clip.", "Describe the video.", "What moves, and where to?")
    question = phraser.pick(questions)
    return Dialogue(frames, [Turn(question, _video_text(phraser, mover, end, still))], {"scenes": [objects]}, is_video=True)


def _path(phraser: Phraser) -> tuple[int, int, int]:
    """Returns start and end cell in one row or column, and a cell outside it."""
    line, near, far = phraser.randrange(3), *phraser.choice(((0, 2), (2, 0), (0, 1), (1, 2), (2, 1), (1, 0)))
    along_row = phraser.random() < 0.5
    cells = [line * 3 + k if along_row else k * 3 + line for k in (near, far)]
    off = [c for c in range(9) if (c // 3 if along_row else c % 3) != line]
    return cells[0], cells[1], phraser.choice(off)


def _video_text(phraser: Phraser, mover: SceneObject, end: int, still: SceneObject | None) -> str:
    verb = phraser.pick(("moves", "travels", "goes", "glides", "slides", "drifts", "wanders"), mover.shape)
    goal = SceneObject(mover.size, mover.colour, mover.shape, end)
    pace = phraser.pick(("", "", " slowly", " steadily", " straight", " smoothly"), mover.colour)
    start, target = place(phraser, mover), place(phraser, goal)
    moving = f"{named(phraser, mover)} {verb}{pace} from {start}"
    parts = [f"{moving} {phraser.pick(('to', 'over to', 'towards'), mover.size)} {target}"]
    if still is not None:
        verb = phraser.pick(("stays", "remains", "rests", "keeps still", "waits", "does not move"), still.shape)
        resting = f"{named(phraser, still)} {verb} {phraser.pick(('in', 'at', 'within'), still.cell)} {place(phraser, still)}"
        parts.insert(int(phraser.is_drawn(0.6)), resting)
    if phraser.is_drawn(0.4):
        endings = ("nothing else happens", "the rest is empty", "then the clip ends", "that is all")
        parts.append(phraser.pick(endings, mover.colour))
    return palette.join(phraser, parts)


SIDES = {"circle": "no", "square": "four", "triangle": "three", "star": "ten", "diamond": "four", "cross": "twelve"}
OPPOSITES = {"left": "right", "right": "left", "top": "bottom", "bottom": "top", "large": "small", "small": "large",
             "above": "below", "below": "above", "high": "low", "low": "high"}  # fmt: skip


def generate_text(phraser: Phraser, split: str) -> Dialogue:
    """Generates a conversation without images."""
    makers = phraser.sample((_sides_turn, _opposite_turn, _larger_turn, _name_turn), 3)
    return Dialogue([], [maker(phraser) for maker in makers])


def _sides_turn(phraser: Phraser) -> Turn:
    shape = phraser.choice(SHAPES)
    verb = phraser.pick(("has", "has got", "comes with", "is drawn with"), shape)
    answer = f"A {shape} {verb} {SIDES[shape]} {phraser.pick(('sides', 'edges'), shape)}."
    return Turn(f"How many sides does a {shape} have?", answer)


def _opposite_turn(phraser: Phraser) -> Turn:
    word, other = phraser.choice(list(OPPOSITES.items()))
    form = phraser.pick(("The opposite of {} is {}.", "It is {1}, the reverse of {0}.", "{0} is the contrary of {1}."), word)
    return Turn(f"What is the opposite of {word}?", capital(form.format(word, other)))


def _larger_turn(phraser: Phraser) -> Turn:
    low, high = sorted(phraser.sample(range(10), 2))
    options = f"{low} or {high}" if phraser.is_drawn(0.5) else f"{high} or {low}"
    lead = phraser.pick((", because ", ": ", ", since ", ", as "), low)
    why = phraser.pick(("it exceeds {}", "it comes after {}", "{} is smaller", "{} comes first"), high).format(low)
    start = phraser.pick(("The larger is", "It is", "The larger one is"), low)
    return Turn(f"Which is larger, {options}?", f"{start} {high}{lead}{why}.")


def _name_turn(phraser: Phraser) -> Turn:
    what = phraser.choice(("colours", "shapes"))
    chosen = phraser.sample(list(palette.COLOURS) if what == "colours" else SHAPES, 3)
    start = phraser.pick((f"three {what} are", "for example", "such are", f"some {what} are"), chosen[0])
    return Turn(f"Name three {what}.", f"{capital(start)} {chosen[0]}, {chosen[1]} and {chosen[2]}.")
