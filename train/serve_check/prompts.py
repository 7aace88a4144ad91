"""Held-out prompts, and the token ids and image files as which our decoder and an engine read them alike."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from checkpoints.run_folder import read_run_config
from data_prep import pocket
from data_prep.build import prompts as held_out
from data_prep.config import DataConfig, data_config
from data_prep.conversation import Conversation, media_parts
from data_prep.splits import Split
from sage.bench.measurement import BenchPrompt
from sage.inputs.media import open_image, source_of
from sage.io.files import write_text
from sage.targets import Target

PROMPTS_FILE = "prompts.json"
NUM_READ = 4  # times the prompts needed, since those with videos are left out


def prompt_data(run: Path | None, target: str) -> DataConfig:
    """Returns the data whose held-out prompts are asked.

    Args:
        run: the draft's run; None if its draft was copied out of it.
        target: folder of the target.

    Raises:
        ValueError: the run's settings cannot be read; no run, and the target is no pocket target.
    """
    if run is not None:
        return data_config(read_run_config(run).get("data") or {})
    if Path(target).resolve().is_relative_to(Path(pocket.__file__).parent / "targets"):
        return DataConfig()
    raise ValueError("RUN: its prompts are those of a run's data.validation; give a run, RUN/draft or RUN/draft_best")


def validation_prompts(data: DataConfig, count: int) -> list[Conversation]:
    """Returns up to `count` first questions without videos.

    Raises:
        ValueError: the data cannot be read, or hold no such prompt.
    """
    found = held_out(data, Split.validation, NUM_READ * count)
    usable = [one for one in found if not any(part["type"] == "video" for part in media_parts(one.messages))]
    if not usable:
        raise ValueError(f"data.validation: its first {len(found)} prompts all have videos; the check needs images or text")
    return usable[:count]


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
        assert target.processor is not None, "it prepared the inputs"
        rows.append({"ids": target.processor.prompt_ids(messages), "images": images})
        prompts.append(BenchPrompt(name=str(conversation.id), family=conversation.family, inputs=inputs, messages=messages))
    file = folder / PROMPTS_FILE
    write_text(file, json.dumps(rows))
    return prompts, file


def save_images(messages: Sequence[Any], folder: Path, number: int) -> list[str]:
    """Saves the images of a conversation as PNG, without loss; returns their paths."""
    parts = [part for message in messages for part in message["content"] if part["type"] == "image"]
    paths = [folder / f"{number}-{place}.png" for place in range(len(parts))]
    for part, path in zip(parts, paths, strict=True):
        open_image(source_of(part, "image")).save(path)
    return [str(path) for path in paths]
