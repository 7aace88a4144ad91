"""A copy of the checkout in which the blocks of the documentation are executed, with a reader's own files beside it."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

from support.doc_pages import ROOT, blocks, read, tracked_files
from support.fork_server import ForkServer
from support.train_helpers import environment

from data_prep.pocket import world
from sage.training.scripts import FUNCTIONS

SCRIPTS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
ENTRY_POINTS = {name: FUNCTIONS.get(name, entry).partition(":")[0] for name, entry in SCRIPTS.items()}  # their modules
POCKET, DEMO = "data_prep/pocket/targets/pocket_qwen2_5_vl", "runs/demo_pocket_qwen2_5_vl"
# The same steps on less data: given before the arguments of a command or of `train.compose`, which count where both have a key.
DECODING = "decode.num_prompts=1 decode.max_new_tokens=8 decode.repeats=1 decode.warmup=0 decode.baselines=[]"
TRAINING = (
    "train.max_steps=2 train.epochs=null train.global_batch_size=2 train.micro_batch_size=1 data.num_examples=24"
    f" data.num_workers=0 decode.policies=[autoregressive,sage] launch.ranks=1 {DECODING}"
)
SUBSTITUTIONS = {  # in the Makefile, every block and every program, in this order
    '"Qwen/Qwen2.5-VL-7B-Instruct", dtype=torch.bfloat16, device="cuda"': f'"{POCKET}"',
    '"runs/x"': f'"{DEMO}"',
    'steps: str = "60"': 'steps: str = "10"',
    "--num-prompts 4": "--num-prompts 1 --max-new-tokens 8 --repeats 1",
    r"num_examples=\d\d+": "num_examples=24",
    r"global_batch_size=\d+": "global_batch_size=2",
    r"micro_batch_size=\d+": "micro_batch_size=1",
    r"max_steps=\d\d\b": "max_steps=2",
    r"max_steps=\d\d\d\b": "max_steps=4",
    r"(sage-train (?:-m )?)(?![-.]|.*launch\.plan)": rf"\1{TRAINING} ",
    r"(sage-validate )(?!-)": rf"\1{DECODING} ",
    r"(train|training)\.compose\(": rf"\1.compose(*{TRAINING.split()}, ",
}


class Workspace:
    """Executes the blocks of pages in a copy of the checkout, where RUN and TARGET lead to a run and a target.

    Args:
        folder: where to make it; must not exist.
        commands: executes Python.
    """

    def __init__(self, folder: Path, commands: ForkServer) -> None:
        self.folder, self._commands = folder, commands
        self._outputs: dict[str, list[str]] = {}
        for name in tracked_files():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
        for program in (folder / "Makefile", *(folder / "examples").glob("*.py")):
            program.write_text(shorter(program.read_text(encoding="utf-8")), encoding="utf-8")
        commands.install(folder / ".venv/bin", ENTRY_POINTS | {"python": None})
        (folder / ".venv/installed").touch()
        (folder / "RUN").symlink_to("runs/pocket_qwen2_5_vl-eagle3-chats")  # trained by README.md
        (folder / "TARGET").symlink_to(POCKET)
        _write_own_files(folder)

    def execute(self, page: str) -> list[str]:
        """Executes, once, the blocks of a page that carry no reason against it; returns what they print.

        Raises:
            AssertionError: one fails.
        """
        if page not in self._outputs:
            executed = [block for block in blocks(page) if block.is_executed]
            self._outputs[page] = [self.run(block.language, block.text, block.place) for block in executed]
        return self._outputs[page]

    def run(self, language: str, text: str, name: str) -> str:
        """Executes a script of bash, up to its first error, or of Python; returns its output."""
        command = ["bash", "-euxo", "pipefail", "-c", shorter(text)]
        if language == "python":
            (self.folder / "block.py").write_text(shorter(text), encoding="utf-8")
            command = self._commands.command(str(self.folder / "block.py"))
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, cwd=self.folder, env=self._environment(), **streams)
        assert done.returncode == 0, f"{name}: exit code {done.returncode}\n{done.stdout[-4000:]}"
        return done.stdout

    def _environment(self) -> dict[str, str]:
        return environment() | {
            "PATH": f"{self.folder / '.venv/bin'}:{os.environ['PATH']}",
            "XDG_CACHE_HOME": str(self.folder / ".cache"),
            "WANDB_MODE": "offline",
        }


def shorter(text: str) -> str:
    """Returns a block or a program with smaller figures, and with what exists in place of what it stands for."""
    for pattern, value in SUBSTITUTIONS.items():
        text = re.sub(pattern, value, text)
    return text


def _write_own_files(folder: Path) -> None:
    """Writes photo.jpg, and 24 rows about images in images/ in each of the two layouts of README.md, from its rows."""
    (folder / "images").mkdir()
    rows = re.findall(r"^\{.*\}$", read("README.md"), re.MULTILINE)
    found: tuple[list[str], list[str]] = ([], [])
    for number in range(24):
        question, answer = world.sample("train", number, ["caption"]).messages[:2]
        name = f"{number:02}.jpg"
        question["content"][0]["image"].save(folder / "images" / name)
        for row, filled in zip(rows, found, strict=True):
            text = row.replace("01.png", name).replace('"01"', f'"{number:02}"')
            filled.append(text.replace("A red square.", answer["content"][0]["text"]))
    chats, llava = found
    (folder / "chats.jsonl").write_text("\n".join(chats), encoding="utf-8")
    (folder / "llava.json").write_text(f"[{', '.join(llava)}]", encoding="utf-8")
    shutil.copy(folder / "images" / name, folder / "photo.jpg")
