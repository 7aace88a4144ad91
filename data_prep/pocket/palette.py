"""The elements of pocket images (colours, shapes, sizes, places) and their drawing."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import lru_cache

from PIL import Image, ImageDraw, ImageFont

SIDE = 112  # pixels
CELL = SIDE / 3  # side of one of the nine places of a scene, in pixels
UNIT = 12  # height of a unit of a bar, in pixels
MAX_HEIGHT = 8  # of a bar, in units
RGB = tuple[int, int, int]

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
    """Returns the centre of a place, in pixels."""
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


@lru_cache(maxsize=8)
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size=size)


def draw_sign(word: str, number: str, board: str, ground: RGB, rng: random.Random) -> Image.Image:
    """Draws a coloured board with a word and, below it, a number (either may be empty)."""
    image = Image.new("RGB", (SIDE, SIDE), ground)
    draw = ImageDraw.Draw(image)
    draw.rectangle((5, 12, 106, 100), fill=COLOURS[board], outline=(60, 60, 60), width=2)
    ink = (20, 20, 20) if board in ("yellow", "pink", "orange") else (255, 255, 255)
    lines = [(text, size) for text, size in ((word, 32), (number, 36)) if text]
    for place, (text, size) in enumerate(lines):
        y = 56 if len(lines) == 1 else (36, 76)[place]
        draw.text((56 + _jitter(rng), y + _jitter(rng)), text, fill=ink, font=_font(size), anchor="mm")
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
