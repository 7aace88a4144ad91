"""The table of policies in the documentation, generated from their classes: `sage-bench policies --write FILE`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from sage.commands.cli import new_parser
from sage.io.tables import markdown_table
from sage.planning.base import defaults
from sage.trees import POLICIES, policy_class

START, END = "<!-- policies: written by `sage-bench policies --write FILE` -->", "<!-- end of policies -->"


def run(arguments: Sequence[str]) -> None:
    """Prints the table, or writes it to a file between `START` and `END`."""
    parser = new_parser("sage-bench policies", description=__doc__)
    parser.add_argument("--write", metavar="FILE", type=Path, help="replace the table in FILE")
    file = parser.parse_args(arguments).write
    if file is None:
        print(policy_table())
    else:
        file.write_text(with_table(file.read_text(encoding="utf-8")), encoding="utf-8")


def with_table(page: str) -> str:
    """Returns the page with a current table between `START` and `END`; raises ValueError if one is missing."""
    if START not in page or END not in page:
        raise ValueError(f"--write: the file has no lines {START!r} and {END!r}; add them")
    before, rest = page.split(START, 1)
    return f"{before}{START}\n{policy_table()}\n{END}{rest.split(END, 1)[1]}"


def policy_table() -> str:
    """Returns a row per policy: name, first line of its docstring, options with defaults."""
    rows = []
    for name in POLICIES:
        kind = policy_class(name)
        rule = (kind.__doc__ or "").strip().splitlines()[0].rstrip(".")
        options = (f"`{option}` {_written(value)}" for option, value in defaults(kind).items())
        rows.append([f"`{name}`", rule, ", ".join(options)])
    return markdown_table(["policy", "rule", "options and defaults"], rows, "<")


def _written(default: Any) -> str:
    if isinstance(default, StrEnum):
        return " or ".join([default, *(other for other in type(default) if other != default)])
    if isinstance(default, Sequence):
        return f"({len(default)} paths of child ranks)"
    return f"{default:g}" if isinstance(default, float) else json.dumps(default)
