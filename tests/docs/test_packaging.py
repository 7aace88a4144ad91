"""The wheel holds what the tree holds, and works from an empty folder."""

import os
import subprocess
import sys
import tomllib
import zipfile
from itertools import chain
from pathlib import Path

import pytest
from packaging.version import Version
from support.doc_pages import ROOT, tracked_files

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = {"sage": "sage", "train": "train", "data_prep": "data_prep", "checkpoints": "checkpoints", "conf": "train/_conf"}
DATA = {".yaml", ".json", ".safetensors", ".jinja", ".html", ".css", ".js", ".cpp", ".h"}


def test_the_oldest_versions_are_those_that_make_test_oldest_installs() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    groups = (extras[name] for name in extras["dev"][0].partition("[")[2].rstrip("]").split(","))
    allowed = [*PROJECT["project"]["dependencies"], *chain.from_iterable(groups)]
    floors = dict(each.split(">=") for each in allowed if ">=" in each)
    lines = (ROOT / "tests/oldest/requirements.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    wrong = {name: floor for name, floor in floors.items() if name != "torch" and Version(floor) != Version(pins[name])}
    assert not wrong


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy so that nothing is left in the tree."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in tracked_files():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return next(out.glob("*.whl"))


@pytest.mark.slow
def test_wheel_holds_the_tree(wheel: Path) -> None:
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = set()
    for name in tracked_files():
        top, _, rest = name.partition("/")
        if top in FOLDERS and (Path(name).suffix in {".py", *DATA} or name.endswith("py.typed")):
            expected.add(f"{FOLDERS[top]}/{rest}")
    assert inside == expected


@pytest.mark.slow
def test_wheel_runs_from_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    installed, empty = tmp_path / "installed", tmp_path / "empty"
    empty.mkdir()
    zipfile.ZipFile(wheel).extractall(installed)
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    code = (
        "import train, sys; print(train.__file__); from train.cli.train import main; sys.argv[1:] = ['--help', 'all']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=empty, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith(str(installed))
    assert "  experiment=\n    debug  " in done.stdout and "decode.num_prompts=32" in done.stdout
    assert list(empty.iterdir()) == []
