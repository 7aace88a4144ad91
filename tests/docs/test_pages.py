"""Links and files named by the pages exist, and the runs that they launch compose."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.doc_pages import ROOT, commands, pages, read, spans, tracked_files

import train

PAGES = pages()
TOPS = {name.split("/")[0] for name in tracked_files() if "/" in name}
EXAMPLE_FILE = re.compile(r"NAME|(llava|llava_7b)\.(py|yaml)$|^conf/data/mine")  # files that a reader may add


def missing_links(page: str) -> list[str]:
    """Returns the links of a page that lead to a missing file or section."""
    missing = []
    for link in re.findall(r"\]\(([^)\s]+)\)", read(page)):
        path, _, anchor = link.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        if not path.startswith("http") and not (file.exists() and (not anchor or anchor in anchors(file))):
            missing.append(link)
    return missing


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub names them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def missing_files(page: str) -> list[str]:
    """Returns the code spans of a page that name a missing file of the checkout."""
    paths = [span for _, span in spans(page) if re.fullmatch(r"[\w.-]+(/[\w.-]+)+/?", span) and span.split("/")[0] in TOPS]
    return [path for path in paths if not EXAMPLE_FILE.search(path) and not (ROOT / path).exists()]


@pytest.mark.parametrize("missing", [missing_links, missing_files])
def test_what_the_pages_name_exists(missing: Callable[[str], list[str]]) -> None:
    assert {page: names for page in PAGES if page != "CHANGELOG.md" and (names := missing(page))} == {}


@pytest.mark.slow
def test_documented_runs_compose() -> None:
    calls = [words for page in PAGES for words in commands(page, "sage-train")]
    runs = [words for words in calls if all(re.match(r"[+~]?[\w./@]+=[^$]", word) for word in words)]
    assert len(runs) >= 10, "the commands of the pages are not recognized"
    for words in runs:
        train.compose(*words)
