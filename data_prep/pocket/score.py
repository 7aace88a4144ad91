"""`python -m data_prep.pocket.score --target DIR`: scores the answers of a pocket target about held-out images.

Answers are decoded greedily for prompts of the test split. A sentence names objects (`a tiny red circle`, `the red circle`) and
places, bars (a colour followed by a number), quoted signs, and a leading yes or no; every fact is right or wrong. An answer is
finished if it ends with an end-of-sequence token within `MAX_NEW_TOKENS`.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

import sage
from data_prep.pocket import world
from data_prep.pocket.palette import CELL_WORDS, COLOURS, SHAPES, SIZE_WORDS
from sage.commands import cli
from sage.io.tables import text_table

KINDS = ("colour", "shape", "size", "position", "sign", "height")
MAX_NEW_TOKENS = 200
Score = Counter[tuple[str, bool]]  # (kind of fact, is right) -> count
SIZE_OF = {word: size for size, words in SIZE_WORDS.items() for word in words}
CELL_OF = {word: cell for cell, words in enumerate(CELL_WORDS) for word in words}


def _any(words: Iterable[str]) -> str:
    return "|".join(sorted(map(re.escape, words), key=len, reverse=True))


MENTION = re.compile(
    rf"(?P<no>\bno )?(?:\b(?P<size>{_any(SIZE_OF)}) )?\b(?P<colour>{_any(COLOURS)}) (?P<shape>{_any(SHAPES)})\b"
)
PLACE = re.compile(rf"\b(?:{_any(CELL_OF)})\b")
BAR = re.compile(rf"\b({_any(COLOURS)})\b(?:(?!{_any(COLOURS)}|\d).)*?(\d+)")
QUOTED = re.compile(r'"([^"]*)"')


def score_target(target: sage.Target, count: int = 60) -> dict[str, Any]:
    """Returns the share of right facts (`right`) and the number of facts (`words`) by kind, and the share of finished answers.

    `count` held-out prompts of each task family are asked; the questions of a conversation in turn.
    """
    score: Score = Counter()
    num_finished = 0
    for conversation in (world.sample("test", index, [name]) for name in world.FAMILIES for index in range(count)):
        turn = int(conversation.id.split("-")[-1]) % (len(conversation.messages) // 2)
        inputs = target.prepare(conversation.messages[: 2 * turn + 1])
        out = sage.generate(target, None, inputs, policy="autoregressive", max_new_tokens=MAX_NEW_TOKENS)
        score += score_answer(out.text, conversation.meta["truth"], conversation.meta["expect"][turn])
        num_finished += int(out.tokens[-1]) in target.eos_token_ids
    words = {kind: score[kind, True] + score[kind, False] for kind in (*KINDS, *sorted({kind for kind, _ in score} - {*KINDS}))}
    return {
        "right": {kind: round(score[kind, True] / number, 4) for kind, number in words.items() if number},
        "words": {kind: number for kind, number in words.items() if number},
        "finished": num_finished / (count * len(world.FAMILIES)),
    }


def score_table(result: dict[str, Any]) -> str:
    rows = [[kind, f"{100 * share:.1f}%", str(result["words"][kind])] for kind, share in result["right"].items()]
    rows.append(["finished", f"{100 * result['finished']:.1f}%", ""])
    return text_table(("kind", "right", "words"), rows, ruled=False)


def score_answer(text: str, truth: dict[str, Any], expected: list[tuple[str, str]]) -> Score:
    """Scores all facts of one answer, by kind: those that the question requests, and what it says about the image."""
    score: Score = Counter((kind, word in _stated(kind, text)) for kind, word in expected)
    for sentence in filter(None, re.split(r"[.;]\s*", text)):
        if scenes := truth.get("scenes"):
            objects = scenes[1 if len(scenes) > 1 and "second" in sentence else 0]
            score.update(fact for words, cells in _mentions(sentence) for fact in _object_facts(words, cells, objects))
        if bars := truth.get("bars"):
            score.update(("height", bars.get(colour) == int(number)) for colour, number in BAR.findall(sentence))
    signs = zip(QUOTED.findall(text), truth.get("sign", ()), strict=False)
    score.update({("sign", read == shown) for read, shown in signs})
    return score


def _stated(kind: str, text: str) -> set[str]:
    words = re.findall(r"[a-z]+|\d+", text.lower())
    if kind == "answer":
        return set(words[:1])
    if kind == "size":
        return {SIZE_OF[word] for word in re.findall(_any(SIZE_OF), text)}
    if kind == "position":
        return {str(CELL_OF[words]) for words in PLACE.findall(text)}
    return set(QUOTED.findall(text) if kind == "sign" else words)


def _mentions(sentence: str) -> list[tuple[dict[str, str], list[int]]]:
    """Returns the objects of a sentence with their cells: a cell belongs to the object before it, or to the first object."""
    marks = [(m.start(), m.groupdict()) for m in MENTION.finditer(sentence) if not m["no"]]
    spots = [(m.start(), CELL_OF[m.group()]) for m in PLACE.finditer(sentence)]
    starts = [start for start, _ in marks]
    if spots and marks and spots[0][0] < starts[0]:
        starts[0] = 0
    ends = [*(start for start, _ in marks[1:]), len(sentence)]
    return [
        (words, [cell for position, cell in spots if start <= position < end])
        for (_, words), start, end in zip(marks, starts, ends, strict=False)
    ]


def _object_facts(words: dict[str, str], cells: list[int], objects: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """Compares an object that an answer names with the one in the image that is most like it."""
    size = SIZE_OF.get(words["size"])

    def facts(obj: dict[str, Any]) -> list[tuple[str, bool]]:
        named = [("colour", words["colour"] == obj["colour"]), ("shape", words["shape"] == obj["shape"])]
        named += [("size", size == obj["size"])] if size else []
        ends = (obj["cell"], obj.get("end", obj["cell"]))
        return named + [("position", cell == end) for cell, end in zip(cells, ends, strict=False)]

    def likeness(obj: dict[str, Any]) -> int:
        num_named = 3 if size else 2
        return sum(is_right for _, is_right in facts(obj)[: num_named + 1])

    return facts(max(objects, key=likeness)) if objects else []


def main() -> int:
    parser = cli.new_parser("python -m data_prep.pocket.score", description=__doc__)
    parser.add_argument("--target", required=True, help="a pocket target's folder")
    parser.add_argument("--prompts", type=int, default=60, help="held-out prompts per family")
    options = parser.parse_args()
    result = score_target(sage.load_target(options.target), options.prompts)
    print(score_table(result))
    return 0 if min(result["right"].get(kind, 0.0) for kind in KINDS) >= 0.95 and result["finished"] == 1 else 1


if __name__ == "__main__":
    sys.exit(cli.run(main))
