"""The commands of README.md and docs/: every block is executed, or checked where its page marks it as `norun: REASON`."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from support.doc_blocks import COMMANDS, ROOT, Block, blocks, command_lines, pages, spans, tracked_files
from support.doc_checks import check_call, check_settings, make_placeholders

PAGES = pages()
EXAMPLE = re.compile(r"NAME|messages\.json|(llava|llava_7b)\.(py|yaml)$|^conf/data/mine")  # files that a reader may add
WITH_VALUE = ("--draft", "--inspect")  # options that the text names without their value
SETTING = re.compile(r"\+?[a-z_]+([./@][a-z_0-9]+)*=\S*")


@pytest.fixture
def placeholders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_placeholders(tmp_path)
    monkeypatch.chdir(tmp_path)


def bash_blocks(page: str) -> list[Block]:
    return [block for block in blocks(page) if block.language == "bash"]


@pytest.mark.slow
@pytest.mark.usefixtures("placeholders")
@pytest.mark.parametrize("page", PAGES)
def test_every_block_calls_commands_with_existing_options(page: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    for block in bash_blocks(page):
        calls = command_lines(block.text, tmp_path_factory.mktemp("recorders"))
        assert calls, f"{block.place}: no command"
        for call in calls:
            try:
                check_call(call)
            except (Exception, SystemExit) as error:
                raise AssertionError(f"{block.place}: {shlex.join(call)}: {error!r}") from error


@pytest.mark.slow
@pytest.mark.usefixtures("placeholders")
@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])  # which names what was removed
def test_commands_and_settings_in_the_text_exist(page: str) -> None:
    for line, span in spans(page):
        words = shlex.split(re.sub(r"\[(--[^]]*)\]", r"\1", span)) if span.count("'") % 2 == 0 else []
        try:
            if words and words[0] in COMMANDS:
                check_call(words if words[-1] not in WITH_VALUE else [*words, "DIR"])
            elif words and all(is_setting(word) for word in words):
                check_settings(words)
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{page}:{line}: `{span}`: {error!r}") from error


def is_setting(word: str) -> bool:
    """Whether a word is an override, not a Python argument: its key is dotted or a group of choices."""
    key = word.lstrip("+").split("=")[0]
    return bool(SETTING.fullmatch(word)) and ("." in key or "/" in key or (ROOT / "conf" / key).is_dir())


@pytest.mark.parametrize("page", PAGES)
def test_links_and_files_exist(page: str) -> None:
    home, text = (ROOT / page).parent, (ROOT / page).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        if path.startswith("http"):
            continue
        file = (home / path) if path else ROOT / page
        assert file.exists(), f"{page}: {link}"
        assert not anchor or anchor in anchors(file), f"{page}: {link}: no such section"
    tops = {name.split("/")[0] for name in tracked_files() if "/" in name}
    for line, span in spans(page):
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)+/?", span) and span.split("/")[0] in tops and not EXAMPLE.search(span):
            assert (ROOT / span).exists(), f"{page}:{line}: `{span}`: no such file"


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub names them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
