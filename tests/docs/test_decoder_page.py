"""docs/decoder.md names every policy with all of its options, at their defaults."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

import sage
from sage.trees import Policy
from sage.trees.static import STATIC_TREE

PAGE = Path(__file__).parents[2] / "docs" / "decoder.md"


def row(name: str) -> str:
    """The policy's line of the table."""
    [line] = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| `{name}` |")]
    return line


def written(value: object) -> str:
    """A default as the page writes it."""
    if value is STATIC_TREE:
        return ": the nodes"
    if value is None or isinstance(value, bool):
        return f" {json.dumps(value)}"
    return f" {value:g}" if isinstance(value, (int, float)) else f" {value}"


@pytest.mark.parametrize("name", sage.POLICIES)
def test_every_option_is_documented_with_its_default(name: str) -> None:
    kind: type[Policy] = type(sage.policy(name))
    if kind.__init__ is object.__init__:
        assert row(name)
        return
    for option, parameter in inspect.signature(kind).parameters.items():
        assert f"`{option}`{written(parameter.default)}" in row(name), option
