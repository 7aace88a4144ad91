"""How the pocket world speaks: many near-equal ways to say one fact.

A `Pen` chooses between wordings. Half of its choices are free, half follow a fixed but intricate taste (a
checksum of what is being described), so that a reader who sees the picture can guess better than chance and a
small draft model can not guess as well as the target. Facts themselves are never varied.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence

from data_prep.pocket.palette import Thing

TASTE = 0.5  # share of choices that follow the checksum
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")

SIZE_WORDS = {
    "small": ("small", "little", "tiny"),
    "medium": ("medium", "mid-sized", "middling"),
    "large": ("large", "big", "huge"),
}
CELL_WORDS: tuple[tuple[str, ...], ...] = (
    ("top left", "upper left"),
    ("top centre", "upper centre"),
    ("top right", "upper right"),
    ("middle left", "centre left"),
    ("exact middle", "very centre"),
    ("middle right", "centre right"),
    ("bottom left", "lower left"),
    ("bottom centre", "lower centre"),
    ("bottom right", "lower right"),
)
RELATIONS = {
    "left": ("left of", "to the left of", "on the left of"),
    "right": ("right of", "to the right of", "on the right of"),
    "above": ("above", "higher than", "further up than"),
    "below": ("below", "lower than", "further down than"),
}
KINDS = ("objects", "shapes", "things", "figures")
PLACES = ("sits", "lies", "rests", "stands", "appears", "is placed", "is drawn", "can be seen", "is found", "shows up")
HOLDS = ("holds", "contains", "shows", "has", "displays", "features")
AREAS = (" area", "", " part", " region", " section", " of the frame", " of the scene", " zone")
LINKS = ("", "", "Next, ", "Then ", "Also, ", "Besides, ", "Moreover, ", "Further, ", "In addition, ", "Here ")
SCENES = ("picture", "image", "scene", "drawing", "view")


class Pen:
    """Chooses wordings from a random stream and a taste."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def pick(self, options: Sequence[str], *about: object) -> str:
        """One of `options`: the one that taste prefers for what is told (the first of `about`; an empty one
        stands for a habit that is always the same), or any of them."""
        if about and self.chance(TASTE):
            return options[zlib.crc32(repr((*options, about[0])).encode()) % len(options)]
        return options[int(self.rng.random() * len(options))]


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def named(pen: Pen, thing: Thing, lead: str = "a") -> str:
    """`a tiny red circle`; with lead `the` the size is left out."""
    if lead == "the":
        return f"the {thing.colour} {thing.shape}"
    size = pen.pick(SIZE_WORDS[thing.size], thing.colour, thing.cell)
    return f"{article(size)} {size} {thing.colour} {thing.shape}"


def place(pen: Pen, thing: Thing) -> str:
    """`the upper left region`."""
    words = pen.pick(CELL_WORDS[thing.cell], thing.shape, thing.size)
    return f"the {words}{pen.pick(AREAS, '')}"


def statement(pen: Pen, thing: Thing) -> str:
    """One sentence, without a full stop, that says what is where."""
    form = pen.pick(("thing", "place", "there", "area"), thing.shape, thing.cell)
    if form == "thing":
        verb = pen.pick(PLACES, thing.colour, thing.size)
        return f"{named(pen, thing)} {verb} {_in(pen, thing)} {place(pen, thing)}"
    if form == "place":
        spot = f"{_in(pen, thing)} {place(pen, thing)}"
        return f"{spot} {pen.pick(PLACES + ('there is', 'we find', 'one sees'), thing.cell)} {named(pen, thing)}"
    if form == "there":
        start = pen.pick(("there is", "we see", "one finds", "I notice", "you can spot"), thing.size, thing.colour)
        return f"{start} {named(pen, thing)} {_in(pen, thing)} {place(pen, thing)}"
    return f"{place(pen, thing)} {pen.pick(HOLDS, thing.shape, thing.colour)} {named(pen, thing)}"


def _in(pen: Pen, thing: Thing) -> str:
    return pen.pick(("in", "at", "within", "inside"), "")


def relation(one: Thing, other: Thing, sideways: bool) -> str:
    """How `one` lies with respect to `other` along one axis; empty if they are level."""
    if sideways:
        return "" if one.column == other.column else "left" if one.column < other.column else "right"
    return "" if one.row == other.row else "above" if one.row < other.row else "below"


def beside(pen: Pen, thing: Thing, other: Thing) -> str:
    """An optional clause that relates a thing to the one told before it."""
    way = relation(thing, other, pen.chance(0.5)) or relation(thing, other, True) or relation(thing, other, False)
    lead = pen.pick((", ", ", so it is ", ", that is ", ", which is "), other.shape, thing.cell)
    return f"{lead}{pen.pick(RELATIONS[way], thing.colour, other.cell)} {named(pen, other, 'the')}"


def join(pen: Pen, parts: list[str]) -> str:
    """Sentences from clauses, with links and now and then a semicolon."""
    text = ""
    for number, part in enumerate(parts):
        if not number:
            text = capital(part)
        elif pen.pick((". ", ". ", ". ", "; "), number) == "; ":
            text += "; " + part
        else:
            text += ". " + capital(pen.pick(LINKS, number) + part)
    return text + "."
