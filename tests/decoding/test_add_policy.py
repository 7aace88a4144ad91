"""A policy is one class in one module: adding the file is enough for the API, the configuration and --help."""

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
PROGRAM = """
import json, sys
import sage
from contextlib import suppress
from sage.bench.__main__ import main as bench
from train.cli.train import main as train
from train.config.hydra_app import compose
from train.config.schema import Config
decode = compose("config", ["decode/policy=[pair,chain]", "decode.options.pair.depth=1", "score.policy=pair"], Config).decode
print(json.dumps([sage.POLICIES, decode.policies, decode.options, type(sage.policy("pair")).__name__]))
sys.argv = ["sage-train", "--help", "decode"]
with suppress(SystemExit):
    train()
bench(["policies"])
bench(["--help"])
"""


def test_it_is_in_the_api_the_configuration_and_the_help_of_the_commands(tmp_path: Path) -> None:
    """In a copy of the packages and the configuration, with one module more."""
    for folder in ("sage", "data_prep", "checkpoints", "train", "conf"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    (tmp_path / "sage" / "trees" / "pair.py").write_text(MODULE)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "HYDRA_FULL_ERROR": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    composed, _, printed = done.stdout.partition("\n")
    names, policies, options, kind = json.loads(composed)
    assert set(names) == {*sage.POLICIES, "pair"} and kind == "Pair"
    assert policies == ["pair", "chain"] and options == {"pair": {"depth": 1}, "chain": {}}
    choices = printed.split("  decode/policy=\n")[1].split("\n\n")[0]
    assert re.search(r"^ +pair +The two most probable tokens at level 1$", choices, re.MULTILINE)
    assert "| `pair` | The two most probable tokens at level 1 | `depth` 1 |" in printed
    assert "pair" in printed.split("--policies A,B")[-1]
