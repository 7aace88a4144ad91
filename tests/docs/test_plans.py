"""The plans quoted in docs/ are those of the planner."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.quoted_plans import BLOCK, pages, with_plans


@pytest.mark.slow
@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_the_quoted_plans_are_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert with_plans(text) == text, "run `make docs`"


@pytest.mark.slow
def test_a_changed_figure_is_renewed() -> None:
    text = next(page for page in pages() if page.name == "troubleshooting.md").read_text(encoding="utf-8")
    verdict = next(block.group() for block in BLOCK.finditer(text) if block[2] == "verdict")
    assert with_plans(verdict.replace(" GB too much", "0 GB too much")) == verdict


def test_plans_are_quoted_on_every_page_that_explains_them() -> None:
    assert {page.name for page in pages()} >= {"training.md", "troubleshooting.md", "exporting.md"}
