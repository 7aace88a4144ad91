"""A policy is one class in one module: adding the file is enough for the API, the configuration and --help."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sage

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
MODULE = '''
from dataclasses import dataclass
from typing import Annotated

from sage.io.ranges import Range
from sage.planning.base import Policy
from sage.planning.tree import Frontier, NextLevel


@dataclass(eq=False, kw_only=True)
class Pair(Policy):
    """The two most probable tokens at level 1."""

    name = "pair"
    num_candidates = 2

    depth: Annotated[int, Range(ge=1, le=1)] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tree_capacity = 3

    def next_level(self, frontier: Frontier) -> NextLevel[list[int]]:
        return NextLevel([0, 1], [])
'''
COMPOSE = """
import json, sage
from train.config.hydra_app import compose
from train.config.schema import Config
decode = compose("config", ["decode/policy=[pair,chain]", "decode.options.pair.depth=1", "score.policy=pair"], Config).decode
print(json.dumps([sage.POLICIES, decode.policies, decode.options, type(sage.policy("pair")).__name__]))
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages and the configuration, with one module more."""
    copy = tmp_path_factory.mktemp("checkout")
    for folder in ("sage", "data_prep", "checkpoints", "train", "conf"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    (copy / "sage" / "trees" / "pair.py").write_text(MODULE)
    return copy


def python(checkout: Path, *arguments: str) -> str:
    """Runs Python with the packages of the copy; returns what it prints."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "HYDRA_FULL_ERROR": "1"}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=checkout, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_in_the_api_and_in_the_configuration(checkout: Path) -> None:
    names, policies, options, kind = json.loads(python(checkout, "-c", COMPOSE))
    assert set(names) == {*sage.POLICIES, "pair"}
    assert policies == ["pair", "chain"] and options == {"pair": {"depth": 1}, "chain": {}}
    assert kind == "Pair"


def test_it_is_in_the_help_of_the_commands(checkout: Path) -> None:
    choices = python(checkout, "-m", "train.cli.train", "--help", "decode").split("  decode/policy=\n")[1].split("\n\n")[0]
    assert re.search(r"^ +pair +The two most probable tokens at level 1$", choices, re.MULTILINE)
    printed = python(checkout, "-c", "from sage.bench.__main__ import main; main(['policies']); main(['--help'])")
    assert "| `pair` | The two most probable tokens at level 1 | `depth` 1 |" in printed
    assert "pair" in printed.split("--policies A,B")[-1]
