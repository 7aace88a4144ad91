"""Prompts of the benchmarks on which the papers measure, from their annotation files or parquet versions.

Adding a benchmark is one function, which turns a row of the published file into a `Question`, one entry in `LAYOUTS`, and its
name in `kinds.KINDS`.

Ref: SpecVLM, arXiv 2509.11815, section 4: with `long_answers`, a request for a detailed explanation replaces the request for a
one-word answer, which leaves nothing to speculate on.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from data_prep.conversation import FOLLOW_UPS, Conversation, Message, Part, Row
from data_prep.sources.base import Source, Split
from data_prep.sources.files import JSON_SUFFIXES, SourceConfig
from data_prep.sources.hub import table_rows
from data_prep.sources.rows import JsonRows, RawRows, RowSource, file_digest

ONE_WORD = "Answer the question using a single word or phrase."
ONE_LETTER = "Answer with the option's letter from the given choices directly."
EXPLAIN = "Please give a detailed and reasonable explanation for the answer."
IMAGE_SUFFIXES = ("", ".jpg", ".png", ".jpeg")
MVBENCH_FRAMES_PER_S = 3.0  # frame rate of its TV episodes, which are published as frames
LETTERS = "ABCDEFGH"


@dataclass(frozen=True)
class Question:
    """One question of a benchmark; `instruction` is its request for a short answer."""

    media: list[Part]
    text: str
    instruction: str
    answer: str | None = None
    follow_ups: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layout:
    """The layout of one benchmark; `family` is the task family of all rows, `family_key` the key of a row's."""

    read: Callable[[Row, MediaFinder], Question]
    select_rows: Callable[[Any], Any] = list  # parsed JSON file -> list of rows
    id_key: str = "id"
    family: str = ""
    family_key: str = ""


class MediaFinder:
    """Locates the files that annotations name: below `root`, in given subfolders, or in any subfolder by file name."""

    def __init__(self, root: str) -> None:
        self.root = root

    def __call__(self, name: str, *folders: str, suffixes: Sequence[str] = ("",)) -> str:
        """Returns the path; `root/name` if there is no such file, so that opening it raises the error."""
        for folder in ("", *folders):
            for suffix in suffixes:
                path = os.path.join(self.root, folder, name + suffix)
                if os.path.exists(path):
                    return path
        paths = (self._path_by_name.get(os.path.basename(name) + suffix) for suffix in suffixes)
        return next((path for path in paths if path), os.path.join(self.root, name + suffixes[0]))

    @cached_property
    def _path_by_name(self) -> dict[str, str]:
        return {
            name: os.path.join(folder, name)
            for folder, folders, files in os.walk(self.root)
            for name in sorted(files + folders)
        }


def textvqa(row: Row, find: MediaFinder) -> Question:
    """TextVQA_0.5.1_val.json: {"data": [{"image_id", "question", "answers": [10 times]}]}, train_images/ID.jpg."""
    media = _embedded(row) or _image(find(row["image_id"], "train_images", "test_images", suffixes=(".jpg", ".png")))
    answers = row.get("answers")
    return Question(media, row["question"], ONE_WORD, Counter(answers).most_common(1)[0][0] if answers else None)


def gqa(row: Row, find: MediaFinder) -> Question:
    """val_balanced_questions.json: {question id: {"imageId", "question", "answer", "fullAnswer"}}, images/ID.jpg."""
    media = _embedded(row) or _image(find(row["imageId"], "images", suffixes=(".jpg",)))
    return Question(media, row["question"], ONE_WORD, row.get("answer"))


def chartqa(row: Row, find: MediaFinder) -> Question:
    """test_human.json: [{"imgname", "query", "label"}], png/IMGNAME."""
    label = row.get("label")
    media = _embedded(row) or _image(find(row["imgname"], "png"))
    return Question(media, row["query"], ONE_WORD, label[0] if isinstance(label, list) else label)


def seed_bench(row: Row, find: MediaFinder) -> Question:
    """SEED-Bench.json: {"questions": [{"data_id", "data_type", "question", "choice_a".."choice_d", "answer"}]}."""
    text = _with_choices(row["question"], [row[f"choice_{letter}"] for letter in "abcd"])
    if embedded := _embedded(row):
        media = embedded
    elif row["data_type"] == "image":
        media = _image(find(row["data_id"], "SEED-Bench-image", suffixes=IMAGE_SUFFIXES))
    else:
        media = _video(find(row["data_id"], suffixes=("", ".mp4", ".webm")), *(row.get("segment") or ()))
    return Question(media, text, ONE_LETTER, row.get("answer"))


def mvbench(row: Row, find: MediaFinder) -> Question:
    """json/TASK.json: [{"video", "question", "candidates", "answer", "start"?, "end"?}], videos below video/."""
    text = _with_choices(row["question"], row["candidates"])
    path = find(row["video"], "video")
    segment = (row["start"], row["end"]) if "start" in row and "end" in row else ()
    media = _video(path, *segment)
    if os.path.isdir(path):
        media[0]["fps"] = float(row.get("fps") or MVBENCH_FRAMES_PER_S)
    answer = row.get("answer")
    letter = LETTERS[row["candidates"].index(answer)] if answer in row["candidates"] else answer
    return Question(media, text, ONE_LETTER, letter)


def video_detail_caption(row: Row, find: MediaFinder) -> Question:
    """The hub's parquet (or JSON) rows {"video_name", "question", "answer"}, Test_Videos/VIDEO_NAME.mp4."""
    path = find(str(row["video_name"]), "Test_Videos", suffixes=(".mp4", ".mkv", ".webm", ".avi", ""))
    return Question(_video(path), row["question"], "", row.get("answer"))


def mmspec(row: Row, find: MediaFinder) -> Question:
    """mmspec.jsonl: {"id", "image", "turns": [question, ...], "category", "topic"}, images/IMAGE."""
    media = _embedded(row) or _image(find(row["image"], "images"))
    first, *later = row["turns"]
    return Question(media, first, "", follow_ups=tuple(later))


LAYOUTS = {
    "textvqa": Layout(textvqa, lambda file: file["data"], id_key="question_id", family="text_vqa"),
    "gqa": Layout(gqa, lambda file: [{"id": key, **row} for key, row in file.items()], family="general_vqa"),
    "chartqa": Layout(chartqa, family="chart_vqa"),
    "seed_bench": Layout(seed_bench, lambda file: file["questions"], id_key="question_id", family_key="data_type"),
    "mvbench": Layout(mvbench, family="video_choice"),
    "video_detail_caption": Layout(video_detail_caption, family="video_caption"),
    "mmspec": Layout(mmspec, family_key="topic"),
}


def _embedded(row: Row) -> list[Part]:
    """Returns the images within the row, as in the hub's parquet versions."""
    value = row.get("image")
    values = value if isinstance(value, list) else [value]
    return [{"type": "image", "image": item["bytes"]} for item in values if isinstance(item, dict) and item.get("bytes")]


def _image(path: str) -> list[Part]:
    return [{"type": "image", "image": path}]


def _video(path: str, *segment: float) -> list[Part]:
    times = {"start": float(segment[0]), "end": float(segment[1])} if len(segment) == 2 else {}
    return [{"type": "video", "video": path, **times}]


def _with_choices(question: str, choices: list[str]) -> str:
    return "\n".join([question, *(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False))])


class PromptSource(RowSource):
    """The rows of one benchmark; `long_answers` requests a detailed explanation in place of a one-word answer."""

    def __init__(self, rows: RawRows, kind: str, find: MediaFinder, long_answers: bool) -> None:
        layout = self.layout = LAYOUTS[kind]
        self.find, self.long_answers = find, long_answers
        settings = (kind, find.root, long_answers)
        super().__init__(rows, self._messages, settings, layout.id_key, layout.family, layout.family_key)

    def _messages(self, row: Row) -> list[Message]:
        question = self.layout.read(row, self.find)
        text = _lines(question.text, EXPLAIN if self.long_answers else question.instruction)
        messages: list[Message] = [{"role": "user", "content": [*question.media, {"type": "text", "text": text}]}]
        if question.answer is not None:
            messages.append({"role": "assistant", "content": [{"type": "text", "text": str(question.answer)}]})
        return messages

    def conversation(self, index: int) -> Conversation:
        conversation = super().conversation(index)
        ending = EXPLAIN if self.long_answers else ""
        later = [_lines(text, ending) for text in self.layout.read(self.rows[index], self.find).follow_ups]
        return replace(conversation, meta=conversation.meta | {FOLLOW_UPS: later}) if later else conversation


def _lines(question: str, ending: str) -> str:
    return "\n".join(filter(None, (question.strip(), ending)))


def open_source(label: str, config: SourceConfig, split: Split, cache_dir: str) -> Source:
    """Opens the annotation file or the parquet version; other images and videos are located below `media_root`."""
    path = config.path
    is_json = path.endswith(JSON_SUFFIXES)
    if (config.subset or config.split) and is_json:
        raise ValueError(f"{path}: a JSON file has no subset ({config.subset!r}) and no split ({config.split!r})")
    if path.endswith(".json"):
        try:
            content = LAYOUTS[config.kind].select_rows(json.loads(Path(path).read_bytes()))
            rows = RawRows(path, file_digest(Path(path)), list(content))
        except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: not in the layout of the source's kind ({error})") from error
    else:
        rows = JsonRows(path, cache_dir) if is_json else table_rows(path, config.subset, config.split or "test", cache_dir)
    return PromptSource(rows, config.kind, MediaFinder(config.media_root or os.path.dirname(path)), config.long_answers)
