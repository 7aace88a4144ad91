"""Meanings of settings, read from the docstrings of their dataclasses: help texts of all commands. Imports no torch."""

from __future__ import annotations

import inspect
import re

SECTION = re.compile(r"(Attributes|Args):")
ENTRY = re.compile(r"    (\w+(?:, \w+)*): (.+)")


def key_meanings(schema: type) -> dict[str, str]:
    """Returns the meaning of every described field of a dataclass, inherited fields included."""
    found: dict[str, str] = {}
    for base in reversed(schema.__mro__):
        found |= parse_section(base.__doc__ or "")
    return found


def parse_section(doc: str) -> dict[str, str]:
    """Parses the entries `name: text` or `name, name: text` of a docstring's `Attributes:` or `Args:`."""
    lines = iter(inspect.cleandoc(doc).splitlines())
    found: dict[str, str] = {}
    names: list[str] = []
    for line in lines:
        if SECTION.fullmatch(line):
            break
    for line in lines:
        if line and not line.startswith("    "):
            break
        if entry := ENTRY.fullmatch(line):
            names = entry.group(1).split(", ")
            found |= dict.fromkeys(names, entry.group(2))
        else:
            found |= {name: f"{found[name]} {line.strip()}".strip() for name in names}
    return found


def first_sentence(doc: str | None) -> str:
    """Returns the first sentence of a docstring without its full stop."""
    return re.split(r"\.(?=\s|$)", " ".join((doc or "").split()), maxsplit=1)[0]
