"""Mistakes on the command line: one line with the nearest name, before torch is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.messages import check_message, exit_code
from support.train_helpers import environment

from sage.bench import options
from sage.commands.cli import run
from sage.commands.generate import main as sage_generate
from sage.io.names import did_you_mean
from sage.serving.command import main as sage_serve
from train.cli.data import main as sage_data
from train.cli.export import main as sage_export
from train.cli.train import main as sage_train
from train.cli.validate import main as sage_validate
from train.report.__main__ import main as report

TARGET = "--target pocket_qwen3_vl"
REFUSED = {  # module:function -> lines
    "sage.commands.generate:main": [
        f"{TARGET} --prompt Hi --policy sgae",
        TARGET,
        f"{TARGET} --prompt Hi",
        f"{TARGET} --prompt Hi --policy autoregressive --temperature -1",
        f"{TARGET} --prompt Hi --policy autoregressive --image gone.png",
        "--target pocket_qwen3_v --prompt Hi --policy autoregressive",
        "--prompt Hi --draft gone",
        "--promt Hi",
        "--prune-method all",
        "--dtype fp23",
    ],
    "train.cli.export:main": ["gone --format eagle3 --out x", "--import gone", "--check gone", "--formt eagle3", "--out x"],
    "sage.bench.__main__:main": [
        f"{TARGET} --polcies chain",
        f"{TARGET} --policies sgae",
        f"{TARGET} --policy sgae:depth=1",
        TARGET,
        f"{TARGET} --policies autoregressive --baselines vllm",
        f"{TARGET} --policies autoregressive --max-new-tokens 1",
    ],
    "train.cli.train:main": ["--res runs/x", "target=pocket_qwen2_5_vl optim.learning_rate=1"],
    "train.cli.validate:main": ["--compar runs/x", "chekpoint=x"],
    "train.cli.data:main": ["--hepl", "data=mesages"],
    "train.report.__main__:main": ["--ouut x"],
}
COMMANDS = """
import json, pkgutil, sys
from sage.commands.cli import new_parser, run
codes = []
for home, lines in json.loads(sys.argv[1]).items():
    main = pkgutil.resolve_name(home)
    for line in lines:
        sys.argv = ["command", *line.split()]
        try:
            codes.append(run(main))
        except SystemExit as ended:
            codes.append(ended.code)
print(json.dumps([codes, [name for name in ("torch", "transformers") if name in sys.modules]]))
"""


@pytest.mark.slow
def test_mistakes_are_found_without_torch(tmp_path: Path) -> None:
    """All commands in one process; a time limit would fail on a busy machine."""
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(REFUSED)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    number = sum(map(len, REFUSED.values()))
    assert json.loads(done.stdout) == [[2] * number, []], done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == number and all(line.startswith("error: ") for line in lines), done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("main", "words", "parts"),
    [
        (sage_train, ["--res", "runs/x"], ["--res:", "did you mean --resume?"]),
        (sage_train, ["target=pocket_qwen2_5_vl", "optim.learning_rate=1"], ["optim.learning_rate:", "did you mean optim.lr?"]),
        (sage_train, ["target=pocket_qwen2_5_vl", "train.lr=1"], ["train.lr:", "did you mean optim.lr?"]),
        (sage_validate, ["--resume", "runs/x"], ["--resume: unknown option"]),
        (sage_validate, ["--compar", "runs/x"], ["--compar:", "did you mean --compare?"]),
        (sage_validate, ["seed=1", "--compare", "runs/x"], ["--compare:", "first word"]),
        (sage_data, ["--hepl"], ["--hepl:", "did you mean --help?"]),
        (sage_generate, ["--promt=Hi"], ["--promt:", "did you mean --prompt?"]),
        (sage_generate, ["photo.jpg"], ["photo.jpg: unexpected argument"]),
        (sage_generate, ["--policy", "sgae"], ["'sgae'", "did you mean sage?"]),
        (sage_export, ["--formt", "eagle3"], ["--formt:", "did you mean --format?"]),
        (lambda: options.compare_parser().parse_args(), ["--polcy", "chain"], ["--polcy:", "did you mean --policy?"]),
        (lambda: sys.exit(run(report)), ["--ouut", "x", "y"], ["--ouut:", "did you mean --out?"]),
        (sage_validate, ["--compare", "--ouut", "x", "y"], ["--ouut:", "did you mean --out?"]),
        (sage_serve, ["--max-reqests=2"], ["--max-reqests:", "did you mean --max-requests?"]),
        (sage_generate, ["--trace", "/proc/nowhere/a.html"], ["/proc/nowhere/a.html", "could not be written"]),
        (sage_generate, ["--trace", "a.txt"], ["--trace a.txt: is no name of a page; give FILE.html"]),
        (sage_generate, ["--trace", "a.html", "--check-device"], ["--trace: has no effect with --check-device"]),
    ],
)
def test_the_nearest_name_is_given(main: Any, words: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(main, *words) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and shown.count("\n") == 1
    check_message(shown, *parts)


def test_no_name_is_given_if_none_is_near() -> None:
    assert did_you_mean("xyzzy", ["--image", "--prompt"]) == ""


def test_the_beginning_of_a_name_stands_for_it() -> None:
    assert (
        did_you_mean("pocket", ["llama3_1_8b", "pocket_qwen2_5_vl"], "target=") == " (did you mean target=pocket_qwen2_5_vl?)"
    )
    assert did_you_mean("x", ["xyzzy_and_more"]) == ""
