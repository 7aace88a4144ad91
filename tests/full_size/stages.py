"""Steps of tests/full_size/check.py without a command: data, logits beside transformers', a run beside its plan, a request."""

from __future__ import annotations

import base64
import json
import random
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from statistics import median
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors import safe_open
from transformers import AutoModelForImageTextToText

import sage
from benchmarks.published import conversation, write_image
from checkpoints.run_folder import read_run_config, state_folder
from data_prep.build import build_dataset
from data_prep.conversation import media_parts
from sage.io.dtypes import torch_dtype
from sage.targets.loading import load_processor
from train.config.resuming import with_types
from train.plan.memory import build_on_meta
from train.state.resume import STATE_BYTES

FULL_HD, PHONE, FRAMES = (1920, 1080), (4000, 3000), 32
PUBLISHED_BYTES = 2  # per parameter, in half precision


def data(work: str, trained: str) -> None:
    """Writes conversations: all of them, those to train on, and one to validate."""
    folder, rng = Path(work), random.Random(0)
    frames = [_photo(folder, f"frame_{number:02d}", (224, 224)) for number in range(FRAMES)]
    parts: dict[str, list[dict[str, Any]]] = {
        "large": [_image(_photo(folder, "large", FULL_HD))],
        "video": [{"type": "video", "video": frames}],
        "several": [_image(_photo(folder, f"several_{number}", (336, 224))) for number in range(3)],
        "photo": [_image(_photo(folder, "photo", (320, 240)))],
        "phone": [_image(_photo(folder, "phone", PHONE))],
    }
    rows = {name: conversation(rng, part, turns=2) for name, part in parts.items()}
    held = conversation(rng, [_image(_photo(folder, "held", (240, 320)))])
    files = {"all": [*rows.values()], "train": [rows[name] for name in trained.split(",")], "held": [held]}
    for name, kept in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))


def _photo(folder: Path, name: str, size: tuple[int, int]) -> str:
    return str(write_image(folder / "media" / f"{name}.jpg", size))


def _image(path: str) -> dict[str, str]:
    return {"type": "image", "image": path}


@torch.inference_mode()
def logits(folder: str, held: str, dtype: str) -> None:
    """Compares the logits of a conversation with those of transformers, loaded after our target is gone."""
    messages = json.loads(Path(held).read_text())["messages"]
    target = sage.load_target(folder, dtype=torch_dtype(dtype), device="cpu")
    inputs = target.prepare(messages[:1])
    ours = target.lm_head(target.features(target.embed(inputs)).last).float()
    del target
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch_dtype(dtype))
    theirs = model(**inputs).logits.float()
    difference = float((ours - theirs).abs().max())
    print(f"{ours.shape[1]} tokens, largest difference {difference:.3g} of logits up to {float(theirs.abs().max()):.1f}")
    assert difference <= (1e-3 if dtype == "fp32" else 0.05) * float(theirs.abs().max())


def compared(run: str, target: str, plan_log: str) -> None:
    """Compares parameters of target and draft, bytes of a state, and seconds per image of a run with those of its plan."""
    config: Any = OmegaConf.to_object(with_types(read_run_config(Path(run))))
    planned = build_on_meta(config)
    state = max(state_folder(run).glob("step_*"))
    weights = [sum(_sizes(file).values()) for file in Path(target).glob("*.safetensors")]
    first, second, kept = (_sizes(state / f"{name}.safetensors") for name in ("exp_avg", "exp_avg_sq", "weight"))
    assert sum(weights) == PUBLISHED_BYTES * planned.target_parameters, (sum(weights), planned.target_parameters)
    assert first == second == {name: kept[name] for name in first}, "weights and moments"
    assert 3 * sum(first.values()) == STATE_BYTES * planned.trained_parameters, (
        sum(first.values()),
        planned.trained_parameters,
    )
    dataset = build_dataset(config.data, load_processor(target), "train")
    images = sum(1 for row in range(len(dataset)) for _ in media_parts(dataset.conversation(row).messages))
    seconds = list[float]()
    for _ in range(4):  # the first time imports modules
        start_s = time.process_time()
        assert all(dataset[row] for row in range(len(dataset)))
        seconds.append((time.process_time() - start_s) / images)
    estimate = re.search(r"\d+ ms of a core", Path(plan_log).read_text())
    assert estimate is not None
    print(f"exact; an image takes {1e3 * median(seconds[1:]):.0f} ms, planned {estimate[0]}")


def _sizes(path: Path) -> dict[str, int]:
    """Returns the bytes of each tensor of a file."""
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118


def serve(draft: str, image: str, dtype: str) -> None:
    """Starts the server with passes that need no compilation, asks about an image, and stops it."""
    words = f"-m sage.serving --draft {draft} --policy chain --port 0 --dtype {dtype} --device cpu --passes eager"
    with subprocess.Popen([sys.executable, *words.split()], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            address = next(found[1] for line in server.stdout if (found := re.search(r"(http://\S+)/v1 ", line)))
            print(_answer(address, Path(image).read_bytes()))
        finally:
            server.terminate()


def _answer(address: str, image: bytes) -> str:
    url = {"url": f"data:image/jpeg;base64,{base64.b64encode(image).decode()}"}
    content = [{"type": "image_url", "image_url": url}, {"type": "text", "text": "What is this?"}]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": content}], "max_tokens": 6}
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        usage = json.load(response)["usage"]
    return f"{usage['prompt_tokens']} tokens read, {usage['completion_tokens']} answered"


if __name__ == "__main__":
    {"data": data, "logits": logits, "compared": compared, "serve": serve}[sys.argv[1]](*sys.argv[2:])
