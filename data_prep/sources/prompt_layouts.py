"""Row layouts of the benchmarks on which the papers measure: a row of the published file -> a `Question`.

Adding a benchmark is one function and one entry in `LAYOUTS`. Imports nothing heavy, because the registry of sources reads the
names.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from data_prep.conversation import Part, Row

ONE_WORD = "Answer the question using a single word or phrase."
ONE_LETTER = "Answer with the option's letter from the given choices directly."
IMAGE_SUFFIXES = ("", ".jpg", ".png", ".jpeg")
MVBENCH_FRAMES_PER_S = 3.0  # frame rate of its TV episodes, which are published as frames
LETTERS = "ABCDEFGH"


@dataclass(frozen=True)
class Question:
    """One question of a benchmark.

    Attributes:
        media: image and video parts.
        text: the question.
        instruction: the benchmark's request for a short answer; "" for none.
        answer: the reference answer, if known.
        follow_ups: later questions of the same conversation.
    """

    media: list[Part]
    text: str
    instruction: str
    answer: str | None = None
    follow_ups: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layout:
    """The layout of one benchmark.

    Attributes:
        read: row -> question.
        select_rows: parsed JSON file -> list of rows.
        id_key: key of the row's id.
        family, family_key: task family of all rows, or the key of a row's family.
    """

    read: Callable[[Row, MediaFinder], Question]
    select_rows: Callable[[Any], Any]
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
        found = (self._path_by_name.get(os.path.basename(name) + suffix) for suffix in suffixes)
        return next((path for path in found if path), os.path.join(self.root, name + suffixes[0]))

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
    "chartqa": Layout(chartqa, list, family="chart_vqa"),
    "seed_bench": Layout(seed_bench, lambda file: file["questions"], id_key="question_id", family_key="data_type"),
    "mvbench": Layout(mvbench, list, family="video_choice"),
    "video_detail_caption": Layout(video_detail_caption, list, family="video_caption"),
    "mmspec": Layout(mmspec, list, family_key="topic"),
}


def _embedded(row: Row) -> list[Part]:
    """Returns the images within the row, as in the hub's parquet versions."""
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
    listed = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False)]
    return "\n".join([question, *listed])
