"""Reads answers of the pocket world back into facts and holds them against what the pictures show.

The grammar is small: a sentence mentions things (`a tiny red circle`, `the red circle`) and places, bars (a colour
followed by a number), quoted signs, and a leading yes or no. Every asserted word of a kind is one right or wrong.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from data_prep.pocket.palette import COLOURS, SHAPES
from data_prep.pocket.phrases import CELL_WORDS, NUMBERS, SIZE_WORDS

Score = Counter[tuple[str, bool]]  # (kind of word, right) -> how many

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
    return [part for part in re.split(r"[.;]\s*", text) if part]


def _pairs(sentence: str) -> list[tuple[dict[str, str], list[int]]]:
    """Things of a sentence with their places: what follows a thing belongs to it, what leads belongs to the first."""
    marks = [(m.start(), m.groupdict()) for m in MENTION.finditer(sentence) if not m["no"]]
    spots = [(m.start(), CELL_OF[m.group()]) for m in PLACE.finditer(sentence)]
    places_first = bool(spots and marks and spots[0][0] < marks[0][0])
    found: list[tuple[dict[str, str], list[int]]] = []
    for number, (start, words) in enumerate(marks):
        until = marks[number + 1][0] if number + 1 < len(marks) else len(sentence)
        low = 0 if places_first and not number else start
        found.append((words, [cell for at, cell in spots if low <= at < until]))
    return found


def _score_thing(words: dict[str, str], cells: list[int], things: list[dict[str, Any]]) -> Score:
    score: Score = Counter()
    if not things:
        return score

    def agreement(thing: dict[str, Any]) -> int:
        size = words["size"] is not None and SIZE_OF[words["size"]] == thing["size"]
        spot = bool(cells) and cells[0] == thing["cell"]
        return (words["colour"] == thing["colour"]) + (words["shape"] == thing["shape"]) + size + spot

    thing = max(things, key=agreement)
    score["colour", words["colour"] == thing["colour"]] += 1
    score["shape", words["shape"] == thing["shape"]] += 1
    if words["size"] is not None:
        score["size", SIZE_OF[words["size"]] == thing["size"]] += 1
    for cell, truth in zip(cells, (thing["cell"], thing.get("end", thing["cell"])), strict=False):
        score["position", cell == truth] += 1
    return score


def score_scenes(text: str, scenes: list[list[dict[str, Any]]]) -> Score:
    """Things and places of a caption; a sentence that says `second` is about the second picture."""
    score: Score = Counter()
    for sentence in sentences(text):
        number = 1 if len(scenes) > 1 and "second" in sentence else 0
        for words, cells in _pairs(sentence):
            score += _score_thing(words, cells, scenes[number])
    return score


def score_chart(text: str, bars: dict[str, int]) -> Score:
    score: Score = Counter()
    for sentence in sentences(text):
        for colour, number in BAR.findall(sentence):
            score["height", bars.get(colour) == int(number)] += 1
    return score


def score_sign(text: str, sign: list[str]) -> Score:
    return Counter({("sign", read == shown): 1 for read, shown in zip(QUOTED.findall(text), sign, strict=False)})


def _said(kind: str, text: str) -> set[str]:
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
    """The single facts that the question asked for."""
    score: Score = Counter()
    for kind, word in expected:
        score[kind, word in _said(kind, text)] += 1
    return score


def score_answer(text: str, truth: dict[str, Any], expected: list[tuple[str, str]]) -> Score:
    """All facts of one answer, right and wrong, by kind."""
    score = score_expected(text, expected)
    if "scenes" in truth:
        score += score_scenes(text, truth["scenes"])
    if "bars" in truth:
        score += score_chart(text, truth["bars"])
    if "sign" in truth:
        score += score_sign(text, truth["sign"])
    return score


__all__ = ["NUMBERS", "Score", "score_answer"]
