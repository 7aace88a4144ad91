"""Prompts that our decoder and an engine read alike: token ids and image files."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from sage.bench.measurement import BenchPrompt
from sage.inputs.media import open_image, source_of
from sage.io.files import write_text
from sage.targets import Target

PROMPTS_FILE = "prompts.json"


def write_prompts(target: Target, conversations: Iterable[Any], folder: Path) -> tuple[list[BenchPrompt], Path]:
    """Writes the ids and images of prompts below `folder`; returns our inputs and the file that engines read.

    Args:
        conversations: with `id`, `family`, and `messages` that end with a question; without videos.

    Raises:
        ValueError: names the prompt that cannot be prepared.
    """
    prompts, rows = [], []
    for number, conversation in enumerate(conversations):
        messages = conversation.messages
        try:
            inputs, images = target.prepare(messages), save_images(messages, folder, number)
        except ValueError as error:
            raise ValueError(f"prompt {conversation.id}: {error}") from error
        ids = inputs["input_ids"][0].tolist()
        rows.append({"ids": collapsed(ids, target.family.slots.values()), "images": images})
        prompts.append(BenchPrompt(name=str(conversation.id), family=conversation.family, inputs=inputs))
    file = folder / PROMPTS_FILE
    write_text(file, json.dumps(rows))
    return prompts, file


def collapsed(ids: Sequence[int], placeholders: Collection[int]) -> list[int]:
    """Returns the ids with one placeholder per image, which the engine expands itself: 5 9 9 9 6 becomes 5 9 6."""
    runs = ((token, list(run)) for token, run in groupby(ids))
    return [token for one, run in runs for token in ([one] if one in placeholders else run)]


def save_images(messages: Sequence[Any], folder: Path, number: int) -> list[str]:
    """Saves the images of a conversation as PNG, without loss; returns their paths."""
    parts = [part for message in messages for part in message["content"] if part["type"] == "image"]
    paths = [folder / f"{number}-{place}.png" for place in range(len(parts))]
    for part, path in zip(parts, paths, strict=True):
        open_image(source_of(part, "image")).save(path)
    return [str(path) for path in paths]
