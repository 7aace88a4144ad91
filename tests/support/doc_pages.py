"""The documentation pages: their fenced blocks, code spans and links, and the checks that need nothing else.

A page marks every block by its language. Blocks of `bash` and `python` are

    ```bash                 executed by tests/docs/test_commands.py, in the order of the page
    ```bash norun: REASON   only checked: options, configuration keys, files

and everything that a command prints is `text`. A page is given by its path relative to the checkout.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LANGUAGES = {"bash", "text", "python", "yaml", "mermaid", "packages", "sage", "train"}
FENCE = re.compile(r"^```(\S*) ?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
NORUN = re.compile(r"norun: (.+)")
EXAMPLE_FILE = re.compile(r"NAME|messages\.json|(llava|llava_7b)\.(py|yaml)$|^conf/data/mine")  # files that a reader may add
REVIEW = re.compile(r"^\| # \| finding \|.*\n((?:\|.*\n?)+)", re.MULTILINE)
REVIEW_ROW = re.compile(r"^\| (\d+) \|.*\|(.*)\|(.*)\|$", re.MULTILINE)


class Block(NamedTuple):
    """A fenced block: `place` is its page and first line, `reason` is set if it is not to be executed."""

    place: str
    language: str
    reason: str | None
    text: str


@cache
def tracked_files() -> list[str]:
    """Returns the files that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in listed if os.path.isfile(ROOT / name)]


def pages() -> list[str]:
    """Returns the documentation pages, README.md first; the templates of the benchmarks are none."""
    found = [name for name in tracked_files() if name.endswith(".md") and not name.startswith("benchmarks/")]
    return sorted(found, key=lambda name: name != "README.md")


def read(page: str) -> str:
    """Returns the text of a page."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    """Returns the blocks of a page.

    Raises:
        ValueError: a fence has no or an unknown language, or an unknown attribute.
    """
    text, found = read(page), []
    for fence in FENCE.finditer(text):
        language, attribute, content = fence.groups()
        place, reason = f"{page}:{text.count(chr(10), 0, fence.start()) + 2}", NORUN.fullmatch(attribute)
        if language not in LANGUAGES:
            raise ValueError(f"{place}: language {language!r}; mark commands as bash, output as text")
        if attribute and not (reason and language in ("bash", "python")):
            raise ValueError(f"{place}: {attribute!r}; only `norun: REASON` is known, after bash or python")
        found.append(Block(place, language, reason and reason[1], content))
    return found


def spans(page: str) -> Iterator[tuple[str, str]]:
    """Yields the code spans of a page, outside of its blocks, with their places."""
    text = FENCE.sub(lambda fence: "\n" * fence.group().count("\n"), read(page))
    for number, line in enumerate(text.splitlines(), start=1):
        for span in SPAN.findall(line):
            yield f"{page}:{number}: `{span}`", span


def check_links(page: str) -> None:
    """Raises AssertionError if a link leads to a missing file or section."""
    for link in re.findall(r"\]\(([^)\s]+)\)", read(page)):
        path, _, anchor = link.partition("#")
        if not path.startswith("http"):
            file = (ROOT / page).parent / path if path else ROOT / page
            assert file.exists(), f"{page}: {link}: no such file"
            assert not anchor or anchor in _anchors(file), f"{page}: {link}: no such section"


def _anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub names them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def check_files(page: str) -> None:
    """Raises AssertionError if a code span names a missing file of the checkout."""
    tops = {name.split("/")[0] for name in tracked_files() if "/" in name}
    for place, span in spans(page):
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)+/?", span) and span.split("/")[0] in tops and not EXAMPLE_FILE.search(span):
            assert (ROOT / span).exists(), f"{place}: no such file"


def check_review(page: str) -> None:
    """Raises AssertionError if a numbered finding has no state, or neither a test nor a reason, or names a missing test."""
    for number, (row, state, evidence) in enumerate(REVIEW_ROW.findall("".join(REVIEW.findall(read(page)))), start=1):
        assert int(row) == number, f"{page}: finding {row} follows {number - 1}"
        assert state.strip() and (evidence.strip() or state.startswith(" open")), f"{page}: finding {row}: no state or evidence"
        for name in re.findall(r"`([\w/.]+)`", evidence):
            pattern = re.escape(Path(name).name) if name.endswith(".py") else rf"(def|class) (test_)?\w*{name}"
            assert re.search(pattern, _tests()), f"{page}: finding {row}: `{name}`: no such test"


@cache
def _tests() -> str:
    """Returns the names and texts of all test modules."""
    return "\n".join(f"{path.name}\n{path.read_text(encoding='utf-8')}" for path in (ROOT / "tests").rglob("test_*.py"))
