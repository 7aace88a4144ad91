"""The examples and the notebook run; together within three minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.slow


def execute(folder: Path, *command: str) -> str:
    """Runs a Python command of the examples in the checkout; returns its output."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{EXAMPLES}", "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environment.pop(name, None)
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The run folder and the output of train_from_python.py."""
    folder = tmp_path_factory.mktemp("examples") / "run"
    return folder, execute(ROOT, "examples/train_from_python.py", str(folder), "12")


def test_train_from_python(run: tuple[Path, str]) -> None:
    folder, output = run
    assert "step 10: loss" in output and "sage: " in output and "2/2 texts identical" in output
    assert (folder / "draft" / "model.safetensors").is_file()


def test_custom_policy(run: tuple[Path, str]) -> None:
    output = execute(ROOT, "examples/custom_policy.py", str(run[0] / "draft"))
    assert output.count("confident: ") == 2


def test_custom_source(tmp_path: Path) -> None:
    assert "texts identical" in execute(ROOT, "examples/custom_source.py", str(tmp_path / "run"))


def test_notebook(tmp_path: Path) -> None:
    cells = json.loads((EXAMPLES / "pocket_pipeline.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (tmp_path / "notebook.py").write_text("\n\n".join(code), encoding="utf-8")
    output = execute(tmp_path, "notebook.py")
    assert "tokens per target pass" in output and (tmp_path / "runs/notebook/draft").is_dir()


def test_every_example_is_listed_and_tested() -> None:
    page, tests = (EXAMPLES / "README.md").read_text(encoding="utf-8"), Path(__file__).read_text(encoding="utf-8")
    for path in EXAMPLES.iterdir():
        if path.suffix in (".py", ".ipynb"):
            assert f"({path.name})" in page and path.name in tests
