"""The messages quoted in docs/troubleshooting.md are those of the sources."""

from __future__ import annotations

import pytest
from support.quoted_messages import BLOCK, PAGE, Part, render_blocks, with_messages


def test_the_quoted_messages_are_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_messages(page) == page, "run `make docs`"


def test_every_message_has_a_block_on_the_page() -> None:
    names = [found.group(2) for found in BLOCK.finditer(PAGE.read_text(encoding="utf-8"))]
    assert sorted(names) == sorted(render_blocks())


def test_a_changed_message_is_noticed() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_messages(page.replace("acceptance rate is near zero", "acceptance is low")) == page


@pytest.mark.parametrize(("fragment", "values"), [("no such text anywhere", ()), ("acceptance rate is near zero", ("1", "2"))])
def test_unknown_messages_and_wrong_values_are_refused(fragment: str, values: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=fragment):
        Part("train/report/warnings.py", fragment, values).render()
