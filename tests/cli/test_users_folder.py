"""A folder with a user's own `train.py`, `data_prep.py` and `checkpoints.py`: every command and the Python API run there."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from support.messages import refused
from support.train_helpers import ROOT, command, environment, make_target

from sage.io.files import import_installed
from sage.training import PACKAGES

SCRIPTS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
LINES = {  # in this order, after a run from Python
    "sage-train": "--resume runs/a",
    "sage-validate": "checkpoint=runs/a decode.baselines=[]",
    "sage-data": "target.path={target} data=pocket data.num_examples=4 data.cache_dir=cache own=2",
    "sage-export": "runs/a --format eagle3 --out exported",
    "sage-report": "runs/a",
    "sage-generate": "--draft exported --prompt Hi --max-new-tokens 2",
    "sage-serve": "--help",  # it would run until it is stopped
    "sage-bench": "--draft exported --policies chain --max-new-tokens 2 --num-prompts 1 --repeats 1 --warmup 0 --out bench",
}
RUN = [
    *("draft=eagle3", "draft.feature_levels=[0,1,2]", "train.max_steps=1"),
    *("decode.policies=[chain]", "decode.baselines=[]", "launch.device=cpu"),
]
PROGRAM = """
import json, multiprocessing, sys
from pkgutil import resolve_name
from sage.io.target_paths import path_of_target
from sage.training import call, compose, run
is_same = compose("target=pocket_qwen3_vl", "data=pocket").target.path == path_of_target("pocket_qwen3_vl")
heavy = [name for name in ("torch", "deepspeed") if name in sys.modules]
arguments, lines = json.loads(sys.argv[1])
work = resolve_name("sage.commands.cli:message_of")
rank = multiprocessing.get_context("spawn").Process(target=call, args=(work, KeyError()))
rank.start(), rank.join()
report = run(compose(*arguments))
codes = {}
for name, (entry, words) in lines.items():
    sys.argv = [name, *words.split()]
    try:
        resolve_name(entry)()
    except SystemExit as ended:
        codes[name] = ended.code
print(json.dumps([is_same, heavy, rank.exitcode, report["prompts"], codes]))
"""


@pytest.mark.slow
def test_every_command_and_the_python_api(tmp_path: Path) -> None:
    """In one process, which takes seconds; the folder is on PYTHONPATH as well, where DeepSpeed's launcher puts it.

    Before torch is imported, a process is started as ranks are.
    """
    target = make_target(tmp_path, layers=4)
    folder = tmp_path / "user"
    folder.mkdir()
    for name in PACKAGES:
        (folder / f"{name}.py").write_text("raise SystemExit('the file of the user')")
    lines = {name: (SCRIPTS[name], words.format(target=target)) for name, words in LINES.items()}
    assert lines.keys() == SCRIPTS.keys()
    arguments = [*command(target, Path("runs/a"), *RUN), "data.cache_dir=cache"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([arguments, lines])],
        cwd=folder,
        env=environment() | {"PYTHONPATH": f"{folder}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [True, [], 0, 1, dict.fromkeys(SCRIPTS, 0)], done.stderr


def test_a_module_that_is_in_the_way_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = ModuleType("train")
    mine.__file__ = "mine/train.py"
    monkeypatch.setitem(sys.modules, "train", mine)
    with refused("mine/train.py", "import sage.training first", error=ImportError):
        import_installed("train")
