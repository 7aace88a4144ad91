"""The pages in a real browser: what they show, how they are used, and that no text on them runs."""

from pathlib import Path

import pytest
from support import browser
from support.browser import run_on
from support.made_pages import hostile_pages
from support.traces import HOSTILE, made_trace

pytestmark = pytest.mark.slow
ROUNDS = """
const marks = (selector, name) => [...document.querySelectorAll(selector)].map((mark) => mark.getAttribute(name));
const shown = () => ({
  nodes: marks("#tree .node", "data-node").map(Number), accepted: marks("#tree .node.accepted", "data-node").map(Number),
  edges: marks("#tree .edge", "d").length, choices: marks("#tree .choice", "class").length, address: window.location.hash,
  slider: document.getElementById("slider").value, summary: document.getElementById("summary").textContent,
});
const rounds = Array.from({length: %d}, () => { const now = shown(); press("ArrowRight", document.body); return now; });
const addresses = [window.location.hash];
const after = (use) => { use(); addresses.push(window.location.hash); };
after(() => press("Home", document.body));
after(() => document.getElementById("next").click());
after(() => type("5", document.getElementById("slider")));
after(() => document.querySelector('#answer [data-round="2"]').click());
return [rounds, addresses];
"""
SORT = """
const column = (number) => [...document.querySelector("table").tBodies[0].rows].map((row) => row.cells[number].textContent);
const sort = (number) => { document.querySelectorAll("table thead button")[number].click(); return column(number); };
return [column(3), sort(3), sort(3), document.querySelectorAll("th")[3].ariaSort, sort(0), sort(2)];
"""
INJECT = """
const one = document.createElement("script");
one.textContent = "window.hacked = 4";
document.body.append(one);
press("End", document.body);
return document.querySelector("main").textContent;
"""
LOOKS = """
const looks = window.getComputedStyle(document.body);
return [document.documentElement.scrollWidth, looks.color, looks.backgroundColor];
"""


@pytest.fixture(autouse=True)
def needs_browser() -> None:
    if why := browser.missing():
        pytest.skip(why)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return hostile_pages(tmp_path_factory.mktemp("hostile"))


def test_rounds_are_those_of_the_trace(tmp_path: Path) -> None:
    trace, page = made_trace(24, 9), tmp_path / "page.html"
    trace.save(page)
    (rounds, addresses), console = run_on(page, ROUNDS % len(trace.rounds))
    for number, (one, accepted, shown) in enumerate(
        zip(trace.rounds, trace.output.stats.accepted, rounds, strict=True), start=1
    ):
        assert sorted(shown["nodes"]) == list(range(len(one.nodes)))
        assert sorted(shown["accepted"]) == one.path[1 : accepted + 1] and len(shown["accepted"]) == accepted
        assert shown["choices"] == (one.bonus is not None) and shown["edges"] == len(one.nodes) - 1 + shown["choices"]
        assert (shown["slider"], shown["address"]) == (str(number), f"#round-{number}")
        assert shown["summary"].startswith(f"Round {number} of {len(trace.rounds)}: ")
    assert addresses == [f"#round-{number}" for number in (len(rounds), 1, 2, 5, 2)]  # the last round stays
    assert console == []
    found, _ = run_on(page, "return document.getElementById('slider').value", fragment="#round-4")
    assert found == "4"


def test_tables_of_a_report_sort(hostile: dict[str, Path]) -> None:
    (before, ascending, descending, state, names, accepted), console = run_on(hostile["report"], SORT)
    assert ascending == sorted(before, key=float) != before
    assert (descending, state) == (ascending[::-1], "descending")
    assert names == sorted(names) and accepted[-1] == ""  # the baselines have no accepted tokens
    assert console == []


@pytest.mark.parametrize("kind", ["trace", "check", "data", "report"])
def test_hostile_texts_do_not_run(hostile: dict[str, Path], kind: str) -> None:
    """Nor would a script that they got into the page: the security policy stops it."""
    text, console = run_on(hostile[kind], INJECT)
    assert HOSTILE[0] in text
    assert len(console) == 1 and "Content Security Policy" in console[0]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_a_phone_and_have_contrast(hostile: dict[str, Path], scheme: str) -> None:
    for page in hostile.values():
        (width, *colors), _ = run_on(page, LOOKS, width=400, scheme=scheme)
        parts = [map(int, color.removeprefix("rgb(").removesuffix(")").split(",")) for color in colors]
        ink, back = ((0.21 * red + 0.72 * green + 0.07 * blue) / 255 for red, green, blue in parts)  # luminance
        assert width <= 400 and abs(ink - back) > 0.6 and (ink < back) == (scheme == "light")
