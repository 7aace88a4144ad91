"""Time to index rows in the layout of LLaVA-1.5's mix and to measure their lengths, in a temporary folder.

Images are files of the sizes of COCO's; more than one row in two has an image of its own, as in the mix.
"""

from __future__ import annotations

import io
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from data_prep.build import build_dataset
from data_prep.config import DataConfig
from data_prep.sources import SourceConfig
from data_prep.workers import MIN_PARALLEL, mapped, num_processes
from sage.io.tables import text_table
from sage.targets.loading import load_processor

ROWS_OF_THE_MIX = 665_298
IMAGES_PER_ROW = 0.55
SIZES = [(640, 480), (480, 640), (640, 427), (500, 375), (427, 640), (612, 612), (1024, 768), (336, 500)]
WORDS = [
    "the",
    "of",
    "on",
    "in",
    "is",
    "two",
    "white",
    "large",
    "person",
    "street",
    "table",
    "right",
    "what",
    "color",
    "holding",
]


def measure(num_rows: int, target: str) -> str:
    """Returns the seconds of the index and of the lengths, and those of the mix at the same rate, as the text to print."""
    processor = load_processor(target)
    with tempfile.TemporaryDirectory(prefix="length-bench-") as folder:
        write_rows(Path(folder), num_rows)
        source = SourceConfig(kind="llava_json", path=f"{folder}/rows.json")
        config = DataConfig(sources={"mix": source}, cache_dir=f"{folder}/cache", max_length=4096, holdout=0.0)
        begin = time.perf_counter()
        list(mapped(abs, range(num_processes()), num_rows))
        start = time.perf_counter()
        dataset = build_dataset(config, processor)
        indexed = time.perf_counter()
        lengths = dataset.lengths
        measured = time.perf_counter()
        positions = np.random.default_rng(0).integers(0, len(dataset), 50)
        wrong = sum(len(dataset[int(position)]["input_ids"]) != lengths[position] for position in positions)
    scale = ROWS_OF_THE_MIX / num_rows
    parts = (("index", indexed - start), ("lengths", measured - indexed))
    rows = [("start of processes", f"{start - begin:.1f} s", "", f"{(start - begin) / 60:.1f} min")]
    for name, time_s in parts:
        rows.append((name, f"{time_s:.1f} s", f"{1e3 * time_s / num_rows:.3f} ms", f"{scale * time_s / 60:.1f} min"))
    total_s = start - begin + scale * (measured - start)
    rows.append(("together", f"{measured - begin:.1f} s", "", f"{total_s / 60:.1f} min"))
    processes = num_processes() if num_rows >= MIN_PARALLEL else 1
    return "\n".join(
        (
            f"{num_rows} rows, {int(IMAGES_PER_ROW * num_rows)} images, {lengths.min()} to {lengths.max()} tokens, "
            f"{processes} process(es)",
            text_table(("", "time", "per row", f"{ROWS_OF_THE_MIX} rows"), rows, "<>>>"),
            f"{wrong} of {len(positions)} lengths differ from those of the built examples",
        )
    )


def write_rows(folder: Path, number: int) -> None:
    """Writes rows.json and the images, in the shares of `benchmarks.training.batches.image_lengths`."""
    draw = random.Random(0)
    files = [_jpeg(size) for size in SIZES]
    (folder / "images").mkdir()
    num_images = max(1, int(IMAGES_PER_ROW * number))
    for i in range(num_images):
        (folder / "images" / f"{i:07}.jpg").write_bytes(files[i % len(files)])
    rows = [_row(draw, i, f"images/{draw.randrange(num_images):07}.jpg") for i in range(number)]
    (folder / "rows.json").write_text(json.dumps(rows))


def _row(draw: random.Random, number: int, image: str) -> dict[str, Any]:
    kind = draw.choices(("short", "long", "text"), (0.70, 0.24, 0.06))[0]
    if kind == "short":
        pairs = [(_text(draw, 12), _text(draw, 2)) for _ in range(draw.randint(1, 12))]
    elif kind == "long":
        pairs = [(_text(draw, 12), _text(draw, int(draw.lognormvariate(4.8, 0.45))))]
    else:
        pairs = [(_text(draw, 60), _text(draw, int(draw.lognormvariate(5.2, 0.6)))) for _ in range(4)]
    turns = [{"from": speaker, "value": text} for pair in pairs for speaker, text in zip(("human", "gpt"), pair, strict=True)]
    if kind == "text":
        return {"id": str(number), "conversations": turns}
    turns[0]["value"] = f"<image>\n{turns[0]['value']}"
    return {"id": str(number), "image": image, "conversations": turns}


def _text(draw: random.Random, words: int) -> str:
    return " ".join(draw.choices(WORDS, k=max(1, words)))


def _jpeg(size: tuple[int, int]) -> bytes:
    stream = io.BytesIO()
    Image.effect_noise(size, 60).convert("RGB").save(stream, "JPEG")
    return stream.getvalue()
