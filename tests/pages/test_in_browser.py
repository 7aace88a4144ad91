"""The pages in a real browser: what they show, how they are used, and that no text on them runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import browser as browsers
from support.browser import Browser
from support.made_pages import hostile_pages
from support.traces import HOSTILE, made_trace

from sage.replay.trace_page import Trace

pytestmark = pytest.mark.slow
TREE = """
const marks = (selector, name) => [...document.querySelectorAll(selector)].map((mark) => mark.getAttribute(name));
return {
  nodes: marks("#tree .node", "data-node").map(Number), accepted: marks("#tree .node.accepted", "data-node").map(Number),
  edges: marks("#tree .edge", "d").length, choices: marks("#tree .choice", "class").length, address: location.hash,
  slider: document.getElementById("slider").value, summary: document.getElementById("summary").textContent,
};
"""
CELLS = """
return [...document.querySelector("table").tBodies[0].rows].map((row) => [...row.cells].map((cell) => cell.textContent));
"""
INJECT = """
const one = document.createElement("script");
one.textContent = "window.hacked = 4";
document.body.append(one);
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One session for all tests of the file."""
    if why := browsers.missing():
        pytest.skip(why)
    session = Browser()
    yield session
    session.close()


@pytest.fixture(autouse=True)
def no_problems(browser: Browser) -> Iterator[None]:
    """No page opens a dialog, runs a text, or leaves an error in the console."""
    browser.look(1400)
    yield
    assert browser.dialog is None
    assert browser.run("return window.hacked") is None
    assert browser.problems() == []


@pytest.fixture(scope="module")
def trace() -> Trace:
    return made_trace(24, 9)


@pytest.fixture(scope="module")
def trace_page(trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "page.html"
    trace.save(path)
    return path


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return hostile_pages(tmp_path_factory.mktemp("hostile"))


def test_rounds_are_those_of_the_trace(browser: Browser, trace: Trace, trace_page: Path) -> None:
    browser.open(trace_page)
    for number, (one, accepted) in enumerate(zip(trace.rounds, trace.output.stats.accepted, strict=True), start=1):
        shown = browser.run(TREE)
        assert sorted(shown["nodes"]) == list(range(len(one.nodes)))
        assert sorted(shown["accepted"]) == one.path[1 : accepted + 1] and len(shown["accepted"]) == accepted
        assert shown["choices"] == (one.bonus is not None) and shown["edges"] == len(one.nodes) - 1 + shown["choices"]
        assert (shown["slider"], shown["address"]) == (str(number), f"#round-{number}")
        assert shown["summary"].startswith(f"Round {number} of {len(trace.rounds)}: ")
        browser.keys("body", "ArrowRight")
    assert browser.run(TREE)["address"] == f"#round-{len(trace.rounds)}"  # the last one stays
    browser.keys("#slider", "Home")
    assert browser.run(TREE)["address"] == "#round-1"
    browser.click("#next")
    browser.keys("#slider", "ArrowRight")
    assert browser.run(TREE)["address"] == "#round-3"
    browser.open(trace_page, "#round-4")
    assert browser.run(TREE)["slider"] == "4"
    browser.click('#answer [data-round="2"]')
    assert browser.run(TREE)["address"] == "#round-2"


def test_search_marks_the_words_of_the_answer(browser: Browser, trace: Trace, trace_page: Path) -> None:
    browser.open(trace_page)
    word = trace.output.text.split()[0]
    browser.keys("#search", word)
    assert browser.run("return document.querySelectorAll('#answer .found').length") == trace.output.text.split().count(word)


def test_tables_of_a_report_sort(browser: Browser, hostile: dict[str, Path]) -> None:
    def sorted_by(number: int) -> list[str]:
        browser.click(f"table thead th:nth-child({number}) button")
        return column(number)

    def column(number: int) -> list[str]:
        return [row[number - 1] for row in browser.run(CELLS)]

    browser.open(hostile["report"])
    before = column(4)
    ascending = sorted(before, key=float)
    assert sorted_by(4) == ascending != before
    assert sorted_by(4) == ascending[::-1]
    assert browser.run("return document.querySelector('th:nth-child(4)').ariaSort") == "descending"
    names = sorted_by(1)
    assert names == sorted(names)
    assert sorted_by(3)[-1] == ""  # the baselines have no accepted tokens


def test_hostile_texts_do_not_run(browser: Browser, hostile: dict[str, Path]) -> None:
    for name, page in hostile.items():
        browser.open(page)
        assert HOSTILE[0] in browser.text("main") and browser.dialog is None
        if name == "trace":
            browser.keys("#search", HOSTILE[0], "Enter")
            browser.keys("body", "End")
        assert browser.run("return window.hacked") is None
    browser.run(INJECT)
    assert any("Content Security Policy" in text for text in browser.problems())  # which would have stopped them, too


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_a_phone_and_have_contrast(browser: Browser, hostile: dict[str, Path], scheme: str) -> None:
    for page in hostile.values():
        browser.look(400, scheme=scheme)
        browser.open(page)
        assert browser.run("return document.documentElement.scrollWidth") <= 400
        colors = browser.run("const looks = getComputedStyle(document.body); return [looks.color, looks.backgroundColor]")
        parts = [map(int, color.removeprefix("rgb(").removesuffix(")").split(",")) for color in colors]
        ink, back = ((0.21 * red + 0.72 * green + 0.07 * blue) / 255 for red, green, blue in parts)  # luminance
        assert abs(ink - back) > 0.6 and (ink < back) == (scheme == "light")
