"""The documentation pages: their fenced blocks and code spans. A page is given by its path relative to the checkout.

Blocks of `bash` and `python` in README.md and examples/README.md are executed by tests/docs/test_commands.py, unless they are
marked as `bash norun: REASON`; everything that a command prints is `text`.
"""

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\S*) ?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


class Block(NamedTuple):
    """A fenced block: `place` is its page and first line; not executed if it is marked by `norun`."""

    place: str
    language: str
    is_executed: bool
    text: str


@cache
def tracked_files() -> list[str]:
    """Returns the files that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in listed if os.path.isfile(ROOT / name)]


def pages() -> list[str]:
    pages = [name for name in tracked_files() if name.endswith(".md") and not name.startswith("benchmarks/")]
    return sorted(pages, key=lambda name: name != "README.md")


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    text = read(page)
    fences = [(f"{page}:{text.count(chr(10), 0, fence.start()) + 2}", *fence.groups()) for fence in FENCE.finditer(text)]
    return [
        Block(place, language, language in ("bash", "python") and not attribute.startswith("norun:"), content)
        for place, language, attribute, content in fences
    ]


def spans(page: str) -> list[tuple[str, str]]:
    """Returns the code spans of a page outside of its blocks, each with its place."""
    text = FENCE.sub(lambda fence: "\n" * fence.group().count("\n"), read(page))
    lines = enumerate(text.splitlines(), start=1)
    return [(f"{page}:{number}: `{span}`", span) for number, line in lines for span in SPAN.findall(line)]


def commands(page: str, name: str) -> Iterator[list[str]]:
    """Yields the arguments of every call of a command in the blocks of a page, without those that stand for others (`...`)."""
    for block in blocks(page):
        if block.language == "bash":
            for line in block.text.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == [name]:
                    yield [word for word in words[1:] if "..." not in word and word not in ("&", ";")]
