"""The elements of pocket images (colours, shapes, sizes, places), their drawing, and their wording: many paraphrases of a fact.

A `Phraser` selects paraphrases, half of them at random and half by a checksum of the described object. A model that sees the
image can therefore predict the wording better than at random, and a small draft predicts it less well than the target. Facts
are never varied.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from PIL import Image, ImageDraw, ImageFont

SIDE = 112  # pixels
CELL = SIDE / 3  # side of one of the nine places of a scene, in pixels
UNIT = 12  # height of a unit of a bar, in pixels
MAX_HEIGHT = 8  # of a bar, in units
RGB = tuple[int, int, int]
font_of = cache(ImageFont.load_default)  # of a size in pixels

COLOURS: dict[str, RGB] = {
    "red": (220, 30, 30),
    "green": (30, 150, 50),
    "blue": (40, 70, 220),
    "yellow": (245, 215, 0),
    "purple": (130, 40, 160),
    "orange": (250, 130, 10),
    "pink": (255, 140, 190),
    "black": (20, 20, 20),
}
SHAPES = ("circle", "square", "triangle", "star", "diamond", "cross")
SIZES: dict[str, int] = {"small": 9, "medium": 13, "large": 17}  # half the width in pixels
SIGNS = (
    *("STOP", "OPEN", "EXIT", "TAXI", "CAFE", "BANK", "PARK", "SLOW", "PUSH", "PULL"),
    *("MENU", "SALE", "FREE", "BUS", "ZOO", "GYM", "ICE", "TEA", "SPA", "KEY"),
)


@dataclass(frozen=True)
class SceneObject:
    """One shape of a scene; `cell` counts the nine places row by row from the top left."""

    size: str
    colour: str
    shape: str
    cell: int

    @property
    def row(self) -> int:
        return self.cell // 3

    @property
    def column(self) -> int:
        return self.cell % 3


# split -> residues of its background colours, see `background`
SPLITS = {"train": range(0, 8), "validation": range(8, 9), "test": range(9, 10)}


def background(rng: random.Random, split: str) -> RGB:
    """Draws a pale colour of a split, which a residue of the channels determines: images of two splits are never equal."""
    while True:
        rgb = (rng.randrange(205, 256), rng.randrange(205, 256), rng.randrange(205, 256))
        if (rgb[0] + 3 * rgb[1] + 7 * rgb[2]) % 10 in SPLITS[split]:
            return rgb


def centre_of(cell: int) -> tuple[float, float]:
    return (cell % 3 + 0.5) * CELL, (cell // 3 + 0.5) * CELL


def _points(shape: str, x: float, y: float, r: float) -> list[tuple[float, float]]:
    if shape == "square":
        r *= 0.88
        return [(x - r, y - r), (x + r, y - r), (x + r, y + r), (x - r, y + r)]
    if shape == "triangle":
        return [(x, y - r), (x + r, y + r * 0.85), (x - r, y + r * 0.85)]
    if shape == "diamond":
        return [(x, y - r), (x + r * 0.75, y), (x, y + r), (x - r * 0.75, y)]
    if shape == "cross":
        t = r * 0.34
        right = [(x + t, y - r), (x + t, y - t), (x + r, y - t), (x + r, y + t), (x + t, y + t), (x + t, y + r)]
        return right + [(2 * x - px, 2 * y - py) for px, py in right]
    turns = [(k * math.pi / 5 - math.pi / 2, r if k % 2 == 0 else r * 0.42) for k in range(10)]
    return [(x + q * math.cos(a), y + q * math.sin(a)) for a, q in turns]


def draw_shape(draw: ImageDraw.ImageDraw, obj: SceneObject, x: float, y: float) -> None:
    r, fill = SIZES[obj.size], COLOURS[obj.colour]
    if obj.shape == "circle":
        draw.ellipse((x - r, y - r, x + r, y + r), fill=fill)
    else:
        draw.polygon(_points(obj.shape, x, y, r), fill=fill)


def _jitter(rng: random.Random) -> float:
    return rng.random() * 2 - 1


def draw_scene(objects: list[SceneObject], ground: RGB, rng: random.Random) -> Image.Image:
    """Draws the objects in their places, each moved by at most one pixel."""
    image = Image.new("RGB", (SIDE, SIDE), ground)
    draw = ImageDraw.Draw(image)
    for obj in objects:
        x, y = centre_of(obj.cell)
        draw_shape(draw, obj, x + _jitter(rng), y + _jitter(rng))
    return image


def draw_video(mover: SceneObject, end: int, still: SceneObject | None, ground: RGB, num_frames: int = 4) -> list[Image.Image]:
    """Draws `num_frames` frames in which `mover` moves on a straight line from its cell to the cell `end`."""
    (x0, y0), (x1, y1) = centre_of(mover.cell), centre_of(end)
    images = []
    for step in range(num_frames):
        image = Image.new("RGB", (SIDE, SIDE), ground)
        draw = ImageDraw.Draw(image)
        if still is not None:
            draw_shape(draw, still, *centre_of(still.cell))
        share = step / (num_frames - 1)
        draw_shape(draw, mover, x0 + share * (x1 - x0), y0 + share * (y1 - y0))
        images.append(image)
    return images


def draw_sign(word: str, number: str, board: str, ground: RGB, rng: random.Random) -> Image.Image:
    """Draws a coloured board with a word and, below it, a number (either may be empty)."""
    image = Image.new("RGB", (SIDE, SIDE), ground)
    draw = ImageDraw.Draw(image)
    draw.rectangle((5, 12, 106, 100), fill=COLOURS[board], outline=(60, 60, 60), width=2)
    ink = (20, 20, 20) if board in ("yellow", "pink", "orange") else (255, 255, 255)
    lines = [(text, size) for text, size in ((word, 32), (number, 36)) if text]
    for place, (text, size) in enumerate(lines):
        y = 56 if len(lines) == 1 else (36, 76)[place]
        draw.text((56 + _jitter(rng), y + _jitter(rng)), text, fill=ink, font=font_of(size), anchor="mm")
    return image


def draw_chart(bars: list[tuple[str, int]], ground: RGB) -> Image.Image:
    """Draws bars (colour, height in units) from left to right over a grid with one line per unit."""
    image = Image.new("RGB", (SIDE, SIDE), ground)
    draw = ImageDraw.Draw(image)
    for unit in range(MAX_HEIGHT + 1):
        y = 106 - unit * UNIT
        draw.line((4, y, 108, y), fill=(170, 170, 170) if unit % 4 else (90, 90, 90))
    step = 104 / len(bars)
    for place, (colour, height) in enumerate(bars):
        x = 4 + step * (place + 0.5)
        draw.rectangle((x - step * 0.33, 106 - height * UNIT, x + step * 0.33, 106), fill=COLOURS[colour])
    return image


def draw_objects(rng: random.Random, count: int) -> list[SceneObject]:
    """Draws `count` objects in different cells and colours."""
    cells, colours = rng.sample(range(9), count), rng.sample(list(COLOURS), count)
    return [
        SceneObject(rng.choice(list(SIZES)), colour, rng.choice(SHAPES), cell)
        for cell, colour in zip(cells, colours, strict=True)
    ]


# -- wording -------------------------------------------------------------------------------------------------------------

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
INSIDE = ("in", "at", "within", "inside")
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
        return f"{named(phraser, obj)} {verb} {phraser.pick(INSIDE, '')} {place(phraser, obj)}"
    if form == "place":
        spot = f"{phraser.pick(INSIDE, '')} {place(phraser, obj)}"
        return f"{spot} {phraser.pick(PLACE_VERBS + ('there is', 'we find', 'one sees'), obj.cell)} {named(phraser, obj)}"
    if form == "there":
        start = phraser.pick(("there is", "we see", "one finds", "I notice", "you can spot"), obj.size)
        return f"{start} {named(phraser, obj)} {phraser.pick(INSIDE, '')} {place(phraser, obj)}"
    return f"{place(phraser, obj)} {phraser.pick(HOLD_VERBS, obj.shape)} {named(phraser, obj)}"


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
