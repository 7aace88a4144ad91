"""docs/gpu.md: all findings of the review have a state, and the tests that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (\d+) \|(.*)\|(.*)\|(.*)\|$", re.MULTILINE)
ROWS = {
    int(number): (state.strip(), evidence) for number, _, state, evidence in ROW.findall((ROOT / "docs/gpu.md").read_text())
}


def test_every_finding_has_a_state_and_a_test_or_a_reason() -> None:
    assert list(ROWS) == list(range(1, 31))
    for number, (state, evidence) in ROWS.items():
        assert state and (evidence.strip() or state.startswith("open")), number


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}


@pytest.mark.parametrize("number", ROWS)
def test_the_tests_of_a_finding_exist(number: int, sources: dict[str, str]) -> None:
    for name in re.findall(r"`([\w/.]+)`", ROWS[number][1]):
        if name.endswith(".py"):
            assert Path(name).name in sources, name
        else:
            assert any(re.search(rf"(def|class) (test_)?\w*{name}", source) for source in sources.values()), name
