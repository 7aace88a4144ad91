"""Prompts with one image that our decoder and an engine read alike: token ids and an image file."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from data_prep.pocket import world
from sage.bench.measurement import BenchPrompt
from sage.files import write_text
from sage.targets import Target

FAMILIES = ("caption", "question", "sign", "chart")  # one image each


def write_prompts(target: Target, count: int, folder: Path, split: str = "test") -> tuple[list[BenchPrompt], Path]:
    """Writes `count` prompts, the families in turns, below `folder`; returns our inputs and the file that engines read."""
    prompts, rows = [], []
    for number in range(count):
        family = FAMILIES[number % len(FAMILIES)]
        talk = world.sample(split, number // len(FAMILIES), [family])
        messages = talk.messages[:1]
        inputs = target.prepare(messages)
        ids = inputs["input_ids"][0].tolist()
        short = collapsed(ids, target.family.placeholder_ids.values())
        rows.append({"ids": short, "images": save_images(messages, folder, number)})
        prompts.append(BenchPrompt(name=f"{talk.id}-{family}", family=family, inputs=inputs))
    file = folder / "prompts.json"
    write_text(file, json.dumps(rows))
    return prompts, file


def collapsed(ids: Sequence[int], placeholders: Collection[int]) -> list[int]:
    """Returns the ids with one placeholder per image, which the engine expands itself: 5 9 9 9 6 becomes 5 9 6."""
    runs = ((token, list(run)) for token, run in groupby(ids))
    return [token for one, run in runs for token in ([one] if one in placeholders else run)]


def save_images(messages: Sequence[Any], folder: Path, number: int) -> list[str]:
    """Saves the images of a conversation as PNG, without loss; returns their paths."""
    images = [part["image"] for message in messages for part in message["content"] if part["type"] == "image"]
    paths = [folder / f"{number}-{place}.png" for place in range(len(images))]
    for image, path in zip(images, paths, strict=True):
        image.save(path)
    return [str(path) for path in paths]
