"""The pages in a real browser: what they show, how they are used, and that no text on them runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import browser as browsers
from support.browser import Browser
from support.data_helpers import assistant, make_image, make_processor, user
from support.reports import example_report
from support.serve_pages import NUM_TOKENS, made_check
from support.traces import HOSTILE, made_trace

from data_prep.chat import build_example
from data_prep.conversation import Conversation
from data_prep.tools.stats import measure, render_html
from sage.bench.measurement import BenchPrompt
from sage.io.page import visible
from sage.replay.trace import Trace
from train.report import plots
from train.validation.traces import PromptTrace
from train.validation.validate import write

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
return [...[...document.querySelectorAll("table")].at(arguments[0]).tBodies[0].rows].map(
  (row) => [...row.cells].map((cell) => cell.textContent)
);
"""
SPANS = """
return [...document.querySelectorAll("#answer > span")].map(
  (one) => [one.textContent, one.className.split(" ")[0], getComputedStyle(one).backgroundColor]
);
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
def check_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a serve check with hostile texts."""
    path = tmp_path_factory.mktemp("check") / "page.html"
    path.write_text(made_check(HOSTILE), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def report_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a validation with plots, prompts and a trace, in which every name and text is hostile."""
    folder = tmp_path_factory.mktemp("report") / "<img src=x onerror='window.hacked = 3'>"
    report, prompts = example_report(), []
    for place, text in enumerate(HOSTILE):
        image = {"type": "image", "image": make_image()}
        talk = [{"role": "user", "content": [image, {"type": "text", "text": text}]}]
        prompts.append(BenchPrompt(name=f"{place} {text}", inputs={}, messages=talk))
    for number, part in enumerate(report["policies"].values()):
        part["per_prompt"] = [
            {"name": prompt.name, "family": HOSTILE[0], "tokens": 9, "tokens_per_target_pass": 1.0 + (place + number) % 4}
            for place, prompt in enumerate(prompts)
        ]
        part["example"]["prompt"] = prompts[2].name
    families = {HOSTILE[1]: report["by_family"]["caption"]}
    report |= {"target": HOSTILE[0], "draft": HOSTILE[1], "command": HOSTILE[0], "by_family": families}
    shown = made_trace(8, 5, HOSTILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "PLOTS", plots.PLOTS[:1])
        write(report, folder, prompts, [PromptTrace(prompt=prompts[0].name, policy="sage", page="traces/1.html", trace=shown)])
    return folder / "report.html"


def tree_of(browser: Browser) -> dict[str, Any]:
    found: dict[str, Any] = browser.run(TREE)
    return found


def test_rounds_are_those_of_the_trace(browser: Browser, trace: Trace, trace_page: Path) -> None:
    browser.open(trace_page)
    for number, (one, accepted) in enumerate(zip(trace.rounds, trace.output.stats.accepted, strict=True), start=1):
        shown = tree_of(browser)
        assert sorted(shown["nodes"]) == list(range(len(one.nodes)))
        assert sorted(shown["accepted"]) == one.path[1 : accepted + 1] and len(shown["accepted"]) == accepted
        assert shown["choices"] == (one.bonus is not None) and shown["edges"] == len(one.nodes) - 1 + shown["choices"]
        assert (shown["slider"], shown["address"]) == (str(number), f"#round-{number}")
        assert shown["summary"].startswith(f"Round {number} of {len(trace.rounds)}: ")
        browser.keys("body", "ArrowRight")
    assert tree_of(browser)["address"] == f"#round-{len(trace.rounds)}"  # the last one stays
    browser.keys("#slider", "Home")
    assert tree_of(browser)["address"] == "#round-1"
    browser.click("#next")
    browser.keys("#slider", "ArrowRight")
    assert tree_of(browser)["address"] == "#round-3"
    browser.open(trace_page, "#round-4")
    assert tree_of(browser)["slider"] == "4"
    browser.click('#answer [data-round="2"]')
    assert tree_of(browser)["address"] == "#round-2"


def test_the_colored_answer_is_the_text(browser: Browser, trace: Trace, trace_page: Path) -> None:
    browser.open(trace_page)
    texts, kinds, colors = zip(*browser.run(SPANS), strict=True)
    assert "".join(texts) == visible(trace.output.text)
    origins = ["p"]
    for one in trace.rounds:
        origins += [f"d{min(depth, 6)}" for depth in range(1, one.num_accepted + 1)] + ["b"] * (one.bonus is not None)
    assert list(kinds) == origins
    by_kind = dict(zip(kinds, colors, strict=True))
    assert len({color for kind, color in by_kind.items() if kind != "p"}) == len(by_kind) - 1  # each depth has its own
    word = trace.output.text.split()[0]
    browser.keys("#search", word)
    assert browser.run("return document.querySelectorAll('#answer .found').length") == trace.output.text.split().count(word)


def test_an_answer_of_one_token_and_a_policy_that_never_drafts(browser: Browser, tmp_path: Path) -> None:
    made_trace(1, 3).save(tmp_path / "one.html")
    browser.open(tmp_path / "one.html")
    assert "there was no round" in browser.text("main") and len(browser.run(SPANS)) == 1
    alone = made_trace(4, 1)
    root: dict[str, Any] = {"parents": [-1], "depths": [0], "draft": [1.0], "calibrated": None}
    alone.rounds = [replace(one, nodes=one.nodes[:1], **root) for one in alone.rounds]
    alone.save(tmp_path / "alone.html")
    browser.open(tmp_path / "alone.html")
    browser.keys("body", "End")
    shown = tree_of(browser)
    assert (shown["nodes"], shown["choices"], shown["address"]) == ([0], 1, "#round-3")
    assert "Nothing was drafted; 0 tokens accepted" in shown["summary"]


def test_tables_of_a_report_sort(browser: Browser, report_page: Path) -> None:
    def column(number: int) -> list[str]:
        return [row[number - 1] for row in browser.run(CELLS, 0)]

    def sort(number: int) -> None:
        browser.click(f"table thead th:nth-child({number}) button")

    browser.open(report_page)
    before = [float(text) for text in column(4)]
    sort(4)
    assert [float(text) for text in column(4)] == sorted(before) != before
    sort(4)
    assert [float(text) for text in column(4)] == sorted(before, reverse=True)
    assert browser.run("return document.querySelector('th:nth-child(4)').ariaSort") == "descending"
    sort(1)
    assert column(1) == sorted(column(1))
    sort(3)
    assert column(3)[-1] == ""  # the baselines have no accepted tokens


def test_the_list_of_prompts_has_pictures_and_traces(browser: Browser, report_page: Path) -> None:
    browser.open(report_page)
    rows = browser.run(CELLS, -1)
    tokens = [float(row[-3]) for row in rows]
    assert len(rows) == len(HOSTILE) and tokens == sorted(tokens, reverse=True)
    assert {row[0] for row in rows} == {visible(f"{place} {text}") for place, text in enumerate(HOSTILE)}
    widths = browser.run("return [...document.querySelectorAll('td img')].map((one) => one.width)")
    assert len(widths) == len(HOSTILE) and all(width > 10 for width in widths)
    assert browser.run("return document.querySelector('.plots img').naturalWidth") > 1000
    browser.click("td a")
    assert browser.text("h1").endswith("sage") and tree_of(browser)["slider"] == "1"


def test_hostile_texts_do_not_run(browser: Browser, tmp_path: Path) -> None:
    made_trace(30, 9, HOSTILE).save(tmp_path / "trace.html")
    processor = make_processor("llava_onevision")
    talk = Conversation(HOSTILE[0], [user(make_image(), HOSTILE[1]), assistant(HOSTILE[0])], HOSTILE[1])
    example = build_example(talk, processor)
    page = render_html(HOSTILE[0], measure([(talk, example)], 1, processor), [(talk, example)], processor)
    (tmp_path / "data.html").write_text(page, encoding="utf-8")
    for name, num_scripts in (("trace", 2), ("data", 1)):
        browser.open(tmp_path / f"{name}.html")
        assert HOSTILE[0] in browser.text("main") and browser.dialog is None
        assert browser.run("return window.hacked") is None
        assert browser.run("return document.scripts.length") == num_scripts
        if name == "trace":
            browser.keys("#search", HOSTILE[0], "Enter")
            browser.keys("body", "End")
            assert browser.run("return window.hacked") is None
    browser.run(INJECT)
    assert any("Content Security Policy" in text for text in browser.problems())  # which would have stopped them, too


def test_a_serve_check_marks_the_rounds_that_differ(browser: Browser, check_page: Path) -> None:
    browser.open(check_page)
    browser.click("#overview a")
    assert browser.run("return location.hash") == "#prompt-1"
    texts = browser.run("return [...document.querySelectorAll('#prompt-1 .lanes .tokens')].map((one) => one.textContent)")
    assert len(texts) == 3 and set(texts) == {visible("".join(HOSTILE[token % len(HOSTILE)] for token in range(30)))}
    assert browser.run("return document.querySelectorAll('#prompt-1 .differs').length") == NUM_TOKENS


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_a_phone_and_have_contrast(
    browser: Browser, trace_page: Path, report_page: Path, check_page: Path, scheme: str
) -> None:
    for page in (trace_page, report_page, check_page):
        browser.look(400, scheme=scheme)
        browser.open(page)
        assert browser.run("return document.documentElement.scrollWidth") <= 400
        ink, back = browser.run("const looks = getComputedStyle(document.body); return [looks.color, looks.backgroundColor]")
        assert abs(luminance(ink) - luminance(back)) > 0.6 and (luminance(ink) < luminance(back)) == (scheme == "light")


def luminance(color: str) -> float:
    """The brightness of "rgb(r, g, b)", between 0 and 1."""
    red, green, blue = (int(part) for part in color.removeprefix("rgb(").removesuffix(")").split(","))
    return (0.21 * red + 0.72 * green + 0.07 * blue) / 255
