"""The examples and the notebook run; together within three minutes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from support.fork_server import ForkServer
from support.train_helpers import ROOT, environment

EXAMPLES = ROOT / "examples"
SHORTER_NOTEBOOK = {"train.max_steps=40": "train.max_steps=8", "data.num_examples=256": "data.num_examples=64"}
pytestmark = pytest.mark.slow


def execute(commands: ForkServer, folder: Path, script: Path, *arguments: str) -> str:
    """Runs a script in a folder, as `python SCRIPT ARGUMENTS` does; returns its output."""
    command = [*commands.command(str(script)), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def run(commands: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The run folder and the output of train_from_python.py."""
    folder = tmp_path_factory.mktemp("examples") / "run"
    return folder, execute(commands, ROOT, EXAMPLES / "train_from_python.py", str(folder), "12")


def test_train_from_python(run: tuple[Path, str]) -> None:
    folder, output = run
    assert "step 10: loss" in output and "sage: " in output and "2/2 texts identical" in output
    assert (folder / "draft" / "model.safetensors").is_file()


def test_custom_policy(commands: ForkServer, run: tuple[Path, str]) -> None:
    output = execute(commands, ROOT, EXAMPLES / "custom_policy.py", str(run[0] / "draft"))
    assert output.count("confident: ") == 2


def test_custom_source(commands: ForkServer, tmp_path: Path) -> None:
    assert "texts identical" in execute(commands, ROOT, EXAMPLES / "custom_source.py", str(tmp_path / "run"))


def test_notebook(commands: ForkServer, tmp_path: Path) -> None:
    cells = json.loads((EXAMPLES / "pocket_pipeline.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    text = "\n\n".join(code)
    for given, shorter in SHORTER_NOTEBOOK.items():
        assert given in text
        text = text.replace(given, shorter)
    (tmp_path / "notebook.py").write_text(text, encoding="utf-8")
    output = execute(commands, tmp_path, tmp_path / "notebook.py")
    assert "tokens per target pass" in output and (tmp_path / "runs/notebook/draft").is_dir()


def test_every_example_is_listed_and_tested() -> None:
    page, tests = (EXAMPLES / "README.md").read_text(encoding="utf-8"), Path(__file__).read_text(encoding="utf-8")
    for path in EXAMPLES.iterdir():
        if path.suffix in (".py", ".ipynb"):
            assert f"({path.name})" in page and path.name in tests
