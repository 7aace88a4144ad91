"""A copy of the checkout in which the blocks of the documentation are executed, with a reader's own files beside it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from support.doc_blocks import ROOT, Block, make_tools, tracked_files
from support.fork_server import ForkServer

from data_prep.pocket import world

ENTRY_POINTS = {
    "sage-train": "train.cli.train",
    "sage-validate": "train.cli.validate",
    "sage-data": "train.cli.data",
    "sage-generate": "sage.commands.generate",
    "sage-export": "train.cli.export",
}
# Appended to a command for every key that its line leaves open: the same steps on less data.
SHORTER_DECODING = {
    "decode.num_prompts": "1",
    "decode.max_new_tokens": "16",
    "decode.repeats": "1",
    "decode.baselines": "[]",
}
SHORTER_TRAINING = {
    "train.max_steps": "2",
    "train.epochs": "null",
    "train.global_batch_size": "8",
    "train.micro_batch_size": "4",
    "data.num_examples": "16",
    "data.num_workers": "0",  # processes that import torch
    "decode.policies": "[autoregressive,sage]",
    "launch.ranks": "1",
}
SHORTER = {"sage-train": SHORTER_TRAINING | SHORTER_DECODING, "sage-validate": SHORTER_DECODING}
SCRIPT = """\
import sys
from {module} import main
if __name__ == "__main__":
    given = {{word.partition("=")[0] for word in sys.argv}}
    if not given & {{"--help", "--resume", "--compare", "launch.plan"}}:
        sys.argv += [f"{{key}}={{value}}" for key, value in {settings}.items() if key not in given]
    sys.exit(main())
"""


class Workspace:
    """Executes blocks in a copy of the checkout.

    Args:
        folder: where to make it; must not exist.

    Attributes:
        output: of the demo.
    """

    output: str

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in tracked_files():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
        (folder / "train" / "_conf").symlink_to(folder / "conf")  # as in an installed package
        self._tools, scripts = folder / ".venv" / "bin", folder / ".venv" / "scripts"
        self.commands = ForkServer(self._environment())
        for name, module in ENTRY_POINTS.items():
            path = scripts / f"{name}.py"
            make_tools(scripts, {path.name: SCRIPT.format(module=module, settings=SHORTER.get(name, {}))})
            make_tools(self._tools, {name: self.commands.script(str(path))})
        make_tools(self._tools, {"python": self.commands.script(None)})
        (folder / ".venv" / "installed").touch()
        _write_own_files(folder)

    def run(self, block: Block, substitutions: Mapping[str, str]) -> str:
        """Executes a block with bash, or a block of Python; returns its output.

        Raises:
            AssertionError: it fails.
        """
        text = block.text
        for placeholder, value in substitutions.items():
            text = text.replace(placeholder, value)
        if block.language == "bash":
            return self.shell(text, block.place)
        script = self.folder / "block.py"
        script.write_text(text, encoding="utf-8")
        return self._call(self.commands.command(str(script)), block.place)

    def shell(self, script: str, name: str = "") -> str:
        """Executes a script with bash, up to its first error; returns its output."""
        return self._call(["bash", "-euxo", "pipefail", "-c", script], name or script)

    def _call(self, command: list[str], name: str) -> str:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, cwd=self.folder, env=self._environment(), **streams)
        assert done.returncode == 0, f"{name}: exit code {done.returncode}\n{done.stdout[-4000:]}"
        return done.stdout

    def _environment(self) -> dict[str, str]:
        outside = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTEST_CURRENT_TEST"}
        return {name: value for name, value in os.environ.items() if name not in outside} | {
            "PATH": f"{self._tools}:{os.environ['PATH']}",
            "PYTHONPATH": str(self.folder),
            "XDG_CACHE_HOME": str(self.folder / ".cache"),
            "HF_HUB_OFFLINE": "1",
            "WANDB_MODE": "offline",
            "OMP_NUM_THREADS": "1",
        }


def _write_own_files(folder: Path) -> None:
    """Writes photo.jpg, and chats.jsonl with 24 rows about images in images/."""
    (folder / "images").mkdir()
    rows = []
    for number in range(24):
        question, answer = world.sample("train", number, ["caption"]).messages[:2]
        image, text = (part for part in question["content"])
        path = folder / "images" / f"{number}.jpg"
        image["image"].save(path)
        content = [{"type": "image", "image": f"images/{path.name}"}, {"type": "text", "text": text["text"]}]
        rows.append({"messages": [{"role": "user", "content": content}, answer]})
    (folder / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    shutil.copy(folder / "images" / "0.jpg", folder / "photo.jpg")
