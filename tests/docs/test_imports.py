"""Who may import whom, read off the source; and what `import sage` pulls in."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORBIDDEN = {
    "sage": {"hydra", "omegaconf", "deepspeed", "datasets", "wandb", "matplotlib", "rich", "train", "data_prep", "checkpoints"},
    "data_prep": {"hydra", "omegaconf", "deepspeed", "wandb", "train", "checkpoints"},
    "checkpoints": {"hydra", "omegaconf", "deepspeed", "wandb", "train", "data_prep"},
    "train": set(),
}
ONLY_IN = {"deepspeed": "train/engine/engine.py", "wandb": "train/monitor/sinks.py"}


def imports(source: str) -> set[str]:
    """Top-level packages a module imports anywhere, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def wrong_arrows(path: str, source: str) -> set[str]:
    """Imports of one file that point the wrong way."""
    package = path.split("/")[0]
    used = imports(source)
    return used & FORBIDDEN[package] | {name for name, home in ONLY_IN.items() if name in used and path != home}


MODULES = [path.relative_to(ROOT).as_posix() for package in FORBIDDEN for path in sorted((ROOT / package).rglob("*.py"))]


@pytest.mark.parametrize("path", MODULES)
def test_arrows_point_downwards(path: str) -> None:
    assert wrong_arrows(path, (ROOT / path).read_text()) == set()


def test_negative_control_wrong_arrows_are_found() -> None:
    assert wrong_arrows("sage/x.py", "def f():\n    from train.run.loop import fit") == {"train"}
    assert wrong_arrows("train/run/loop.py", "import deepspeed.runtime") == {"deepspeed"}


@pytest.mark.slow
def test_import_sage_is_light() -> None:
    heavy = ["hydra", "omegaconf", "deepspeed", "wandb", "datasets"]
    code = (
        "import sys, sage; sage.generate; sage.load_target; sage.trees.sage.confidence;"
        f"print([m for m in {heavy!r} if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
