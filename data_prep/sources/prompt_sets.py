"""Questions in the layouts of the benchmarks the papers measure on.

Ref: SpecVLM, arXiv 2509.11815, section 4 (one-word instructions are replaced by a request to explain, because one-word
answers leave nothing to speculate on): `long_answers`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from data_prep.config import SourceConfig, Split
from data_prep.conversation import Conversation, Message, Part
from data_prep.multi_turn import LATER
from data_prep.sources.base import Source
from data_prep.sources.json_rows import JsonRows
from data_prep.sources.rows import ListRows, MediaFinder, Row, Rows, RowSource, need_path

ONE_WORD = "Answer the question using a single word or phrase."
ONE_LETTER = "Answer with the option's letter from the given choices directly."
EXPLAIN = "Please give a detailed and reasonable explanation for the answer."
PICTURE_SUFFIXES = ("", ".jpg", ".png", ".jpeg")
MVBENCH_FRAMES_PER_S = 3.0  # its TV episodes come as frames at this rate


@dataclass(frozen=True)
class Asked:
    """One question as a layout has it: what is shown, the question, how to answer it shortly, the answer if known, and the
    questions that are asked after it."""

    shown: list[Part]
    question: str
    short: str
    answer: str | None = None
    later: tuple[str, ...] = ()


def textvqa(row: Row, find: MediaFinder) -> Asked:
    """TextVQA_0.5.1_val.json: {"data": [{"image_id", "question", "answers": [10 times]}]}, train_images/ID.jpg."""
    shown = _embedded(row) or _image(find(row["image_id"], "train_images", "test_images", suffixes=(".jpg", ".png")))
    answers = row.get("answers")
    return Asked(shown, row["question"], ONE_WORD, Counter(answers).most_common(1)[0][0] if answers else None)


def gqa(row: Row, find: MediaFinder) -> Asked:
    """val_balanced_questions.json: {question id: {"imageId", "question", "answer", "fullAnswer"}}, images/ID.jpg."""
    shown = _embedded(row) or _image(find(row["imageId"], "images", suffixes=(".jpg",)))
    return Asked(shown, row["question"], ONE_WORD, row.get("answer"))


def chartqa(row: Row, find: MediaFinder) -> Asked:
    """test_human.json: [{"imgname", "query", "label"}], png/IMGNAME."""
    label = row.get("label")
    shown = _embedded(row) or _image(find(row["imgname"], "png"))
    return Asked(shown, row["query"], ONE_WORD, label[0] if isinstance(label, list) else label)


def seed_bench(row: Row, find: MediaFinder) -> Asked:
    """SEED-Bench.json: {"questions": [{"data_id", "data_type", "question", "choice_a".."choice_d", "answer"}]}."""
    question = _with_choices(row["question"], [row[f"choice_{letter}"] for letter in "abcd"])
    if embedded := _embedded(row):
        shown = embedded
    elif row["data_type"] == "image":
        shown = _image(find(row["data_id"], "SEED-Bench-image", suffixes=PICTURE_SUFFIXES))
    else:
        shown = _video(find(row["data_id"], suffixes=("", ".mp4", ".webm")), *(row.get("segment") or ()))
    return Asked(shown, question, ONE_LETTER, row.get("answer"))


def mvbench(row: Row, find: MediaFinder) -> Asked:
    """json/TASK.json: [{"video", "question", "candidates", "answer", "start"?, "end"?}], videos below video/."""
    question = _with_choices(row["question"], row["candidates"])
    path = find(row["video"], "video")
    segment = (row["start"], row["end"]) if "start" in row and "end" in row else ()
    shown = _video(path, *segment)
    if os.path.isdir(path):
        shown[0]["fps"] = float(row.get("fps") or MVBENCH_FRAMES_PER_S)
    answer = row.get("answer")
    letter = "ABCDEFGH"[row["candidates"].index(answer)] if answer in row["candidates"] else answer
    return Asked(shown, question, ONE_LETTER, letter)


def video_detail_caption(row: Row, find: MediaFinder) -> Asked:
    """The hub's parquet (or JSON) rows {"video_name", "question", "answer"}, Test_Videos/VIDEO_NAME.mp4."""
    path = find(str(row["video_name"]), "Test_Videos", suffixes=(".mp4", ".mkv", ".webm", ".avi", ""))
    return Asked(_video(path), row["question"], "", row.get("answer"))


def mmspec(row: Row, find: MediaFinder) -> Asked:
    """mmspec.jsonl: {"id", "image", "turns": [question, ...], "category", "topic"}, images/IMAGE."""
    shown = _embedded(row) or _image(find(row["image"], "images"))
    first, *later = row["turns"]
    return Asked(shown, first, "", later=tuple(later))


@dataclass(frozen=True)
class Layout:
    """How a layout's file holds its rows, and how a row asks."""

    ask: Callable[[Row, MediaFinder], Asked]
    pick: Callable[[Any], Any]
    id_key: str = "id"
    family: str = ""
    family_key: str = ""


LAYOUTS = {
    "textvqa": Layout(textvqa, lambda file: file["data"], id_key="question_id", family="text_vqa"),
    "gqa": Layout(gqa, lambda file: [{"id": key, **row} for key, row in file.items()], family="general_vqa"),
    "chartqa": Layout(chartqa, list, family="chart_vqa"),
    "seed_bench": Layout(seed_bench, lambda file: file["questions"], id_key="question_id", family_key="data_type"),
    "mvbench": Layout(mvbench, list, family="video_choice"),
    "video_detail_caption": Layout(video_detail_caption, list, family="video_caption"),
    "mmspec": Layout(mmspec, list, family_key="topic"),
}


class PromptSource(RowSource):
    """The rows of one prompt set.

    Args:
        find: where its pictures and clips are.
        long_answers: ask for a detailed explanation where the layout wants one word.
    """

    def __init__(self, rows: Rows, kind: str, find: MediaFinder, long_answers: bool) -> None:
        self.layout, self.find, self.long_answers = LAYOUTS[kind], find, long_answers
        layout = self.layout
        settings = (kind, find.root, long_answers)
        super().__init__(rows, self._messages, settings, layout.id_key, layout.family, layout.family_key)

    def _messages(self, row: Row) -> list[Message]:
        return to_messages(self.layout.ask(row, self.find), self.long_answers)

    def conversation(self, index: int) -> Conversation:
        found = super().conversation(index)
        later = self.layout.ask(self.rows.row(index), self.find).later
        if not later:
            return found
        ending = EXPLAIN if self.long_answers else ""
        return replace(found, meta=found.meta | {LATER: [_joined(question, ending) for question in later]})


def to_messages(asked: Asked, long_answers: bool) -> list[Message]:
    """What is shown, then the question and how to answer it; the known answer as the assistant's turn."""
    text = _joined(asked.question, EXPLAIN if long_answers else asked.short)
    messages: list[Message] = [{"role": "user", "content": [*asked.shown, {"type": "text", "text": text}]}]
    if asked.answer is not None:
        messages.append({"role": "assistant", "content": [{"type": "text", "text": str(asked.answer)}]})
    return messages


def _joined(question: str, ending: str) -> str:
    return "\n".join(part for part in (question.strip(), ending) if part)


def _embedded(row: Row) -> list[Part]:
    """Pictures the row itself holds, as the hub's parquet versions of these sets do."""
    value = row.get("image")
    values = value if isinstance(value, list) else [value]
    return [{"type": "image", "image": item["bytes"]} for item in values if isinstance(item, dict) and item.get("bytes")]


def _image(path: str) -> list[Part]:
    return [{"type": "image", "image": path}]


def _video(path: str, *segment: float) -> list[Part]:
    part: Part = {"type": "video", "video": path}
    if len(segment) == 2:
        part |= {"start": float(segment[0]), "end": float(segment[1])}
    return [part]


def _with_choices(question: str, choices: list[str]) -> str:
    listed = [f"{letter}. {choice}" for letter, choice in zip("ABCDEFGH", choices, strict=False)]
    return "\n".join([question, *listed])


def _rows(config: SourceConfig, path: str, layout: Layout, cache_dir: str) -> Rows:
    is_json = path.endswith((".json", ".jsonl", ".ndjson"))
    if (config.subset or config.split) and is_json:
        raise ValueError(f"{path}: a JSON file has no subset ({config.subset!r}) and no split ({config.split!r})")
    if path.endswith((".jsonl", ".ndjson")):
        return JsonRows(path, cache_dir)
    if is_json:
        return ListRows(path, layout.pick)
    from data_prep.sources.hub import TableRows

    return TableRows(path, config.subset, config.split or "test", cache_dir)


def open_source(label: str, config: SourceConfig, split: Split, cache_dir: str) -> Source:
    """One annotation file, or the set's parquet version; other pictures and videos are looked for below `media_root`."""
    path = need_path(label, config.path, f"the annotation file of {config.kind}")
    find = MediaFinder(config.media_root or os.path.dirname(path))
    rows = _rows(config, path, LAYOUTS[config.kind], cache_dir)
    return PromptSource(rows, config.kind, find, config.long_answers)
