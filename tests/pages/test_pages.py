"""Every page is one safe file: texts are text, nothing comes from elsewhere, and the security policy names what is inline."""

import re
from pathlib import Path

import pytest
from support.made_pages import hostile_pages
from support.traces import HOSTILE, Page

from sage.io.page import security, visible

SCRIPTS = {"trace": 2}  # with its data; the other pages have one


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return hostile_pages(tmp_path_factory.mktemp("pages"))


@pytest.mark.parametrize("kind", ["trace", "check", "data", "report"])
def test_hostile_texts_are_text(pages: dict[str, Path], kind: str) -> None:
    text = pages[kind].read_text(encoding="utf-8")
    page = Page(text)
    assert visible(HOSTILE[0]) in page.text and visible(HOSTILE[1]) in page.text
    assert [tag for tag, _ in page.tags].count("script") == SCRIPTS.get(kind, 1)
    assert not any(name.startswith("on") or name == "style" for _, attributes in page.tags for name in attributes)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]", text)
    for tag, attributes in page.tags:
        for name in ("src", "href"):
            link = attributes.get(name) or ""
            assert ":" not in link or (tag == "img" and link.startswith("data:image/"))
    [policy] = [attributes["content"] for _, attributes in page.tags if attributes.get("http-equiv")]
    assert policy == security(page.raw["style"][0], page.raw["script"][-1])
    assert str(policy).startswith("default-src 'none';") and "unsafe" not in str(policy)


def test_a_page_lists_every_prompt_with_picture_and_trace(pages: dict[str, Path]) -> None:
    page = Page(pages["report"].read_text(encoding="utf-8"))
    assert all(visible(f"{place} {text}") in page.text for place, text in enumerate(HOSTILE))
    assert sum(tag == "img" and attributes.get("class") == "small" for tag, attributes in page.tags) == len(HOSTILE)
    assert [attributes["href"] for tag, attributes in page.tags if tag == "a"][-1] == "traces/01_sage.html"
