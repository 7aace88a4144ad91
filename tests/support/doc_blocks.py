"""The fenced blocks and code spans of the documentation pages, and the commands in them.

A page marks every block by its language. Blocks of `bash` and `python` are

    ```bash                 executed by tests/docs/test_commands.py, in the order of the page
    ```bash norun: REASON   only checked: options, configuration keys, files

and everything that a command prints is `text`.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMANDS = ("sage-train", "sage-validate", "sage-generate", "sage-data", "sage-export", "python", "make", "pip")
LAUNCHERS = ("deepspeed", "srun", "scontrol", "vllm")
LANGUAGES = {"bash", "text", "python", "yaml", "mermaid", "packages", "sage", "train"}
FENCE = re.compile(r"^```(\S*) ?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
NORUN = "norun: "


@dataclass(frozen=True)
class Block:
    """A fenced block. `line` is that of its first line of content; `reason` is set if it is not to be executed."""

    page: str
    line: int
    language: str
    reason: str | None
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """Returns the documentation pages, README.md first, then in the order in which its last section lists them."""
    listed = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Documentation")[2]
    linked = re.findall(r"\]\(([\w/.]+\.md)\)", listed)
    names = [
        "README.md",
        "examples/README.md",
        *linked,
        *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
    ]
    return list(dict.fromkeys(names))


def blocks(page: str) -> list[Block]:
    """Returns the blocks of a page.

    Raises:
        ValueError: a fence has no or an unknown language, or an unknown attribute.
    """
    text, found = (ROOT / page).read_text(encoding="utf-8"), []
    for fence in FENCE.finditer(text):
        language, attribute, content = fence.groups()
        line = text[: fence.start()].count("\n") + 2
        if language not in LANGUAGES:
            raise ValueError(f"{page}:{line}: language {language!r}; mark commands as bash, output as text")
        if attribute and not (language in ("bash", "python") and re.fullmatch(f"{NORUN}.+", attribute)):
            raise ValueError(f"{page}:{line}: {attribute!r}; only `norun: REASON` is known, after bash or python")
        found.append(Block(page, line, language, attribute.removeprefix(NORUN) or None, content))
    return found


def spans(page: str) -> Iterator[tuple[int, str]]:
    """Yields the code spans of a page, outside of its blocks, with their lines."""
    text = FENCE.sub(lambda fence: "\n" * fence.group().count("\n"), (ROOT / page).read_text(encoding="utf-8"))
    for number, line in enumerate(text.splitlines(), start=1):
        for span in SPAN.finditer(line):
            yield number, span.group(1)


def command_lines(script: str, folder: Path) -> list[list[str]]:
    """Returns the arguments of every command that bash would call for `script`, by running it with recorders in their place.

    Args:
        folder: an empty folder for the recorders.

    Raises:
        AssertionError: bash calls anything else, or does not understand the script.
    """
    record = folder / "record"
    recorder = f'#!/bin/bash\nprintf "%s\\0" "${{0##*/}}" "$@" >> {record}; printf "\\n\\0" >> {record}\n'
    tools = make_tools(folder / "bin", dict.fromkeys((*COMMANDS, *LAUNCHERS, "which"), recorder))
    (tools / "which").unlink()
    record.write_text("", encoding="utf-8")
    environment = {"PATH": f"{tools}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True)
    assert not done.stderr, f"{done.stderr.strip()}\n{script}"
    calls: list[list[str]] = [[]]
    for word in record.read_text(encoding="utf-8").split("\0")[:-1]:
        if word == "\n":
            calls.append([])
        else:
            calls[-1].append(Path(word).name if not calls[-1] or word.startswith(str(tools)) else word)
    return calls[:-1]


def make_tools(folder: Path, scripts: dict[str, str]) -> Path:
    """Writes executable scripts into a folder for PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, script in scripts.items():
        path = folder / name
        path.write_text(script, encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return folder


def given(arguments: Sequence[str]) -> set[str]:
    """Returns the keys of `key=value` arguments."""
    return {argument.partition("=")[0] for argument in arguments if "=" in argument}


def tracked_files() -> list[str]:
    """Returns the files that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return [name for name in listed if name and os.path.isfile(ROOT / name)]
