"""The README's section on one's own data, followed literally: 24 rows, nothing but the paths, fewer steps and policies.

tests/docs/test_commands.py runs the lines of the first layout; here its rows are checked, and those of the second one are
followed to an export.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from PIL import Image, ImageDraw
from support.fork_server import ForkServer
from support.messages import refused
from support.train_helpers import ROOT, environment, metrics

from data_prep.conversation import BadItem
from train.config.hydra_app import compose
from train.config.schema import Config
from train.job import build
from train.launch.ranks import Ranks

SECTION = re.search(r"## Your own data\n(.*?)\n## ", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
assert SECTION is not None
TEXT, MESSAGES, LLAVA = re.findall(r"```[^\n]*\n(.*?)```", SECTION.group(1), re.DOTALL)
ROWS = [json.loads(line) for line in TEXT.splitlines()]
MODULES = {
    "sage-data": "train.cli.data",
    "sage-train": "train.cli.train",
    "sage-validate": "train.cli.validate",
    "sage-export": "train.cli.export",
}
DECODING = ("decode.policies=[autoregressive,sage]", "decode.baselines=[]", "decode.repeats=1", "decode.max_new_tokens=16")
SHORTER = {"sage-train": ("train.max_steps=4", *DECODING), "sage-validate": DECODING}
NUM_ROWS = 24
COLOURS, SHAPES = ("red", "green", "blue", "yellow", "purple", "orange"), ("square", "circle", "bar", "frame")


def draw(path: Path, colour: str, shape: str) -> None:
    image = Image.new("RGB", (96, 96), "white")
    pen, box = ImageDraw.Draw(image), (20, 20, 76, 76)
    if shape == "circle":
        pen.ellipse(box, fill=colour)
    else:
        pen.rectangle((40, 10, 56, 86) if shape == "bar" else box, None if shape == "frame" else colour, colour, 6)
    path.parent.mkdir(exist_ok=True)
    image.save(path)


def filled(row: Any, name: str, answer: str) -> Any:
    """Returns the README's row with another image and another answer."""
    return json.loads(
        json.dumps(row).replace("01.png", name).replace('"01"', f'"{Path(name).stem}"').replace("A red square.", answer)
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with 24 drawn images and both files."""
    chats, llava = [], []
    for i in range(NUM_ROWS):
        name, colour, shape = f"{i + 1:02}.png", COLOURS[i % 6], SHAPES[i // 6]
        draw(tmp_path / "images" / name, colour, shape)
        chats.append(filled(ROWS[0], name, f"A {colour} {shape}."))
        llava.append(filled(ROWS[1], name, f"A {colour} {shape}."))
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    (tmp_path / "llava.json").write_text(json.dumps(llava, indent=1))
    return tmp_path


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory, commands: ForkServer) -> dict[str, str]:
    """The environment of a user with an empty home and our commands in PATH."""
    home, tools = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("tools")
    made = environment() | {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache"), "PATH": f"{tools}:{os.environ['PATH']}"}
    commands.install(tools, MODULES)
    return made


def execute(folder: Path, line: str, variables: dict[str, str]) -> str:
    """Runs a line of the README in a folder; returns its output and its log."""
    command, *words = shlex.split(line, comments=True)
    words += SHORTER.get(command, ())
    tool = shutil.which(command, path=variables["PATH"])
    assert tool is not None
    done = subprocess.run([tool, *words], cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)  # half a minute of a core; much longer on a busy machine
def test_the_lines_of_the_readme(folder: Path, variables: dict[str, str]) -> None:
    chats = execute(folder, MESSAGES.splitlines()[0], variables)
    data, train, validate, export = [execute(folder, line, variables) for line in LLAVA.splitlines()]
    for text in (chats, data):
        assert "20 examples, 20 measured" in text and "0 invalid items skipped" in text and "own answers: " in text
    assert "\nverdict: " in train and "\nnext: sage-" in train and "\nverdict: " in validate
    assert "the longest of 20 examples" in data and "the longest of 20 examples" in train
    assert "4 held-out prompt(s)" in train and "4 prompts, 1 run each" in train and "4 prompts, 1 run each" in validate
    run = folder / "runs" / "pocket_qwen2_5_vl-eagle3-llava"
    assert metrics(run)[-1]["step"] == 4
    (report,) = (run / "validation").glob("*/report.json")
    assert all(found["match"] == found["total"] for found in json.loads(report.read_text())["policies"].values())
    assert "report: " in validate and list((run / "checks").iterdir())
    assert (folder / "exports" / "llava" / "model.safetensors").is_file()
    card = (folder / "exports" / "llava" / "README.md").read_text()
    assert "pocket_qwen2_5_vl" in card and "trained for 4 steps" in card and "4 prompts, 1 run each" in card, export


def test_invalid_rows_are_found_before_the_target_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "What?"}]}) + "\n")
    words = [
        "target=pocket_qwen2_5_vl",
        "data=messages",
        f"data.path={tmp_path}/chats.jsonl",
        f"data.cache_dir={tmp_path}/cache",
    ]
    config: Config = compose("config", words, Config)
    monkeypatch.setattr(build, "build_target", None)
    with refused("chats.jsonl: item 0", "'user'", error=BadItem):
        build.build_inputs(config, cast(Ranks, SimpleNamespace(world_size=1)))
