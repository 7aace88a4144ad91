"""Parses answers about pocket images into facts and compares these with the content of the images.

A sentence names objects (`a tiny red circle`, `the red circle`) and places, bars (a colour followed by a number), quoted
signs, and a leading yes or no. Every fact is scored as right or wrong.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from data_prep.pocket.palette import COLOURS, SHAPES
from data_prep.pocket.phrases import CELL_WORDS, SIZE_WORDS

Score = Counter[tuple[str, bool]]  # (kind of fact, is right) -> count

SIZE_OF = {word: size for size, words in SIZE_WORDS.items() for word in words}
CELL_OF = {word: cell for cell, words in enumerate(CELL_WORDS) for word in words}


def _any(words: Any) -> str:
    return "|".join(sorted(map(re.escape, words), key=len, reverse=True))


MENTION = re.compile(
    rf"(?P<no>\bno )?(?:\b(?P<size>{_any(SIZE_OF)}) )?\b(?P<colour>{_any(COLOURS)}) (?P<shape>{_any(SHAPES)})\b"
)
PLACE = re.compile(rf"\b(?:{_any(CELL_OF)})\b")
BAR = re.compile(rf"\b({_any(COLOURS)})\b(?:(?!{_any(COLOURS)}|\d).)*?(\d+)")
QUOTED = re.compile(r'"([^"]*)"')


def sentences(text: str) -> list[str]:
    """Splits a text into sentences."""
    return [part for part in re.split(r"[.;]\s*", text) if part]


def _pairs(sentence: str) -> list[tuple[dict[str, str], list[int]]]:
    """Returns the objects of a sentence with their places: a place belongs to the object before it, or to the first object."""
    marks = [(m.start(), m.groupdict()) for m in MENTION.finditer(sentence) if not m["no"]]
    spots = [(m.start(), CELL_OF[m.group()]) for m in PLACE.finditer(sentence)]
    places_first = bool(spots and marks and spots[0][0] < marks[0][0])
    found: list[tuple[dict[str, str], list[int]]] = []
    for number, (start, words) in enumerate(marks):
        until = marks[number + 1][0] if number + 1 < len(marks) else len(sentence)
        low = 0 if places_first and not number else start
        found.append((words, [cell for at, cell in spots if low <= at < until]))
    return found


def _score_object(words: dict[str, str], cells: list[int], objects: list[dict[str, Any]]) -> Score:
    score: Score = Counter()
    if not objects:
        return score

    def agreement(obj: dict[str, Any]) -> int:
        size = words["size"] is not None and SIZE_OF[words["size"]] == obj["size"]
        spot = bool(cells) and cells[0] == obj["cell"]
        return (words["colour"] == obj["colour"]) + (words["shape"] == obj["shape"]) + size + spot

    obj = max(objects, key=agreement)
    score["colour", words["colour"] == obj["colour"]] += 1
    score["shape", words["shape"] == obj["shape"]] += 1
    if words["size"] is not None:
        score["size", SIZE_OF[words["size"]] == obj["size"]] += 1
    for cell, truth in zip(cells, (obj["cell"], obj.get("end", obj["cell"])), strict=False):
        score["position", cell == truth] += 1
    return score


def score_scenes(text: str, scenes: list[list[dict[str, Any]]]) -> Score:
    """Scores objects and places of a caption; a sentence with `second` refers to the second image."""
    score: Score = Counter()
    for sentence in sentences(text):
        number = 1 if len(scenes) > 1 and "second" in sentence else 0
        for words, cells in _pairs(sentence):
            score += _score_object(words, cells, scenes[number])
    return score


def score_chart(text: str, bars: dict[str, int]) -> Score:
    """Scores the heights of bars."""
    found = (pair for sentence in sentences(text) for pair in BAR.findall(sentence))
    return Counter(("height", bars.get(colour) == int(number)) for colour, number in found)


def score_sign(text: str, sign: list[str]) -> Score:
    """Scores the quoted texts of a sign."""
    return Counter({("sign", read == shown): 1 for read, shown in zip(QUOTED.findall(text), sign, strict=False)})


def _stated(kind: str, text: str) -> set[str]:
    words = re.findall(r"[a-z]+|\d+", text.lower())
    if kind == "answer":
        return set(words[:1])
    if kind == "size":
        return {SIZE_OF[found] for found in re.findall(_any(SIZE_OF), text)}
    if kind == "position":
        return {str(CELL_OF[found]) for found in PLACE.findall(text)}
    if kind == "sign":
        return set(QUOTED.findall(text))
    return set(words)


def score_expected(text: str, expected: list[tuple[str, str]]) -> Score:
    """Scores the facts that a question requests."""
    return Counter((kind, word in _stated(kind, text)) for kind, word in expected)


def score_answer(text: str, truth: dict[str, Any], expected: list[tuple[str, str]]) -> Score:
    """Scores all facts of one answer, by kind."""
    score = score_expected(text, expected)
    if "scenes" in truth:
        score += score_scenes(text, truth["scenes"])
    if "bars" in truth:
        score += score_chart(text, truth["bars"])
    if "sign" in truth:
        score += score_sign(text, truth["sign"])
    return score
