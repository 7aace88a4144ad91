"""Generated conversations before they are rendered as chat messages, and their wording: many paraphrases of one fact.

A `Phraser` selects paraphrases, half of them at random and half by a checksum of the described object. A model that sees the
image can therefore predict the wording better than at random, and a small draft predicts it less well than the target. Facts
are never varied.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from data_prep.pocket.palette import SceneObject

CHECKSUM_SHARE = 0.5  # of the choices
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
PLACE_VERBS = ("sits", "lies", "rests", "stands", "appears", "is placed", "is drawn", "can be seen", "is found", "shows up")
HOLD_VERBS = ("holds", "contains", "shows", "has", "displays", "features")
AREAS = (" area", "", " part", " region", " section", " of the frame", " of the scene", " zone")
LINKS = ("", "", "Next, ", "Then ", "Also, ", "Besides, ", "Moreover, ", "Further, ", "In addition, ", "Here ")
SCENES = ("picture", "image", "scene", "drawing", "view")


@dataclass
class Turn:
    """A question, its answer, and the facts (kind, word) that a correct answer must contain."""

    question: str
    answer: str
    expect: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class Dialogue:
    """Images (or the frames of one video), the turns about them, and the depicted facts, by which answers are scored."""

    images: list[Image.Image]
    turns: list[Turn]
    truth: dict[str, Any] = field(default_factory=dict)
    is_video: bool = False


class Phraser(random.Random):
    """Draws everything in an image, and selects paraphrases, at random or by a checksum."""

    def is_drawn(self, share: float) -> bool:
        """Returns True with probability `share`."""
        return self.random() < share

    def pick(self, options: Sequence[str], about: object = None) -> str:
        """Returns one of `options` at random, or half of the time the one given by the checksum of `about`, if it is given."""
        if about is not None and self.is_drawn(CHECKSUM_SHARE):
            return options[zlib.crc32(repr((*options, about)).encode()) % len(options)]
        return options[int(self.random() * len(options))]


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def named(phraser: Phraser, obj: SceneObject, lead: str = "a") -> str:
    """Returns `a tiny red circle`; with lead `the`, without the size."""
    if lead == "the":
        return f"the {obj.colour} {obj.shape}"
    size = phraser.pick(SIZE_WORDS[obj.size], obj.colour)
    return f"{'an' if size[0] in 'aeiou' else 'a'} {size} {obj.colour} {obj.shape}"


def place(phraser: Phraser, obj: SceneObject) -> str:
    """Returns `the upper left region`."""
    words = phraser.pick(CELL_WORDS[obj.cell], obj.shape)
    return f"the {words}{phraser.pick(AREAS, '')}"


def statement(phraser: Phraser, obj: SceneObject) -> str:
    """Returns a clause that names an object and its place."""
    form = phraser.pick(("thing", "place", "there", "area"), obj.shape)
    if form == "thing":
        verb = phraser.pick(PLACE_VERBS, obj.colour)
        return f"{named(phraser, obj)} {verb} {_in(phraser, obj)} {place(phraser, obj)}"
    if form == "place":
        spot = f"{_in(phraser, obj)} {place(phraser, obj)}"
        return f"{spot} {phraser.pick(PLACE_VERBS + ('there is', 'we find', 'one sees'), obj.cell)} {named(phraser, obj)}"
    if form == "there":
        start = phraser.pick(("there is", "we see", "one finds", "I notice", "you can spot"), obj.size)
        return f"{start} {named(phraser, obj)} {_in(phraser, obj)} {place(phraser, obj)}"
    return f"{place(phraser, obj)} {phraser.pick(HOLD_VERBS, obj.shape)} {named(phraser, obj)}"


def _in(phraser: Phraser, obj: SceneObject) -> str:
    return phraser.pick(("in", "at", "within", "inside"), "")


def relation(one: SceneObject, other: SceneObject, sideways: bool) -> str:
    """Returns the position of `one` relative to `other` along one axis; empty if they are level."""
    if sideways:
        return "" if one.column == other.column else "left" if one.column < other.column else "right"
    return "" if one.row == other.row else "above" if one.row < other.row else "below"


def beside(phraser: Phraser, obj: SceneObject, other: SceneObject) -> str:
    """Returns a clause that relates an object to the one named before it."""
    way = relation(obj, other, phraser.is_drawn(0.5)) or relation(obj, other, True) or relation(obj, other, False)
    lead = phraser.pick((", ", ", so it is ", ", that is ", ", which is "), other.shape)
    return f"{lead}{phraser.pick(RELATIONS[way], obj.colour)} {named(phraser, other, 'the')}"


def join(phraser: Phraser, parts: list[str]) -> str:
    """Joins clauses into sentences, with conjunctions and occasional semicolons."""
    text = ""
    for number, part in enumerate(parts):
        if not number:
            text = capital(part)
        elif phraser.pick((". ", ". ", ". ", "; "), number) == "; ":
            text += "; " + part
        else:
            text += ". " + capital(phraser.pick(LINKS, number) + part)
    return text + "."
