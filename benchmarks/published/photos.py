"""Conversations about generated images, in the layout of `data=messages`."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from PIL import Image

SIZES = ((640, 480), (480, 640), (512, 512), (800, 600), (1024, 768), (336, 336))
WORDS = "the a cat street red two people near small building sky water holding on of with and bright old wooden"


def write_photos(folder: Path, count: int) -> None:
    """Writes `photos.jsonl`: conversations of two turns, about images of usual sizes."""
    rng, rows = random.Random(0), []
    for number in range(count):
        image = write_image(folder / "photos" / f"{number:03d}.jpg", SIZES[number % len(SIZES)])
        rows.append(conversation(rng, [{"type": "image", "image": str(image.relative_to(folder))}], turns=2))
    (folder / "photos.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_image(path: Path, size: tuple[int, int]) -> Path:
    """Writes coarse noise, which compresses as photographs do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    small = (max(size[0] // 8, 1), max(size[1] // 8, 1))
    Image.effect_noise(small, 90).resize(size).convert("RGB").save(path, quality=90)
    return path


def conversation(rng: random.Random, parts: list[dict[str, Any]], turns: int = 1) -> dict[str, Any]:
    """Returns a conversation whose first question has these images and videos, and whose answers are random words."""
    messages: list[dict[str, Any]] = []
    for turn in range(turns):
        text = {"type": "text", "text": "Say more." if turn else "What is this?"}
        answer = " ".join(rng.choice(WORDS.split()) for _ in range(rng.randint(20, 160)))
        messages.append({"role": "user", "content": [text] if turn else [*parts, text]})
        messages.append({"role": "assistant", "content": [{"type": "text", "text": f"{answer}."}]})
    return {"messages": messages}
