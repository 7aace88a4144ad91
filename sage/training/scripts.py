"""The console scripts of the packages above `sage`, which start in any working directory: see sage.training."""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module

from sage.commands.cli import EXIT_USER, report_interrupt

FUNCTIONS = {
    "sage-train": "train.cli.train:main",
    "sage-validate": "train.cli.validate:main",
    "sage-data": "train.cli.data:main",
    "sage-export": "train.cli.export:main",
    "sage-report": "train.report.__main__:console",
}
PREFIX = "sage-"


def run_script(name: str) -> None:
    """Runs a command with the arguments of this process; the command exits."""
    module, _, function = FUNCTIONS[name].partition(":")
    try:
        getattr(import_module(module), function)()
    except KeyboardInterrupt:  # during the imports; the command handles it from then on
        sys.exit(report_interrupt())


train = partial(run_script, "sage-train")
validate = partial(run_script, "sage-validate")
data = partial(run_script, "sage-data")
export = partial(run_script, "sage-export")
report = partial(run_script, "sage-report")


def main() -> None:
    """`python -m sage.training COMMAND ...` is `sage-COMMAND ...`."""
    name = PREFIX + "".join(sys.argv[1:2])
    if name not in FUNCTIONS:
        choices = "|".join(known.removeprefix(PREFIX) for known in FUNCTIONS)
        print(f"error: give a command: python -m sage.training {choices} ...", file=sys.stderr)
        sys.exit(EXIT_USER)
    sys.argv = [name, *sys.argv[2:]]
    run_script(name)
