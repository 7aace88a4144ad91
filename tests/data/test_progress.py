"""Progress bars: shown on a terminal only."""

from __future__ import annotations

import io
import sys

import pytest

from sage.io.progress import progress_bar, progress_callback


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("is_terminal", "is_shown", "is_disabled"), [(True, True, False), (True, False, True), (False, True, True)]
)
def test_bar_is_disabled_without_a_terminal_or_on_request(
    is_terminal: bool, is_shown: bool, is_disabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal() if is_terminal else io.StringIO())
    bar = progress_bar(iter("abc"), "reading", total=5, initial=2, is_shown=is_shown)
    assert bool(bar.disable) == is_disabled
    assert list(bar) == ["a", "b", "c"]


def test_callback_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    update = progress_callback("measuring")
    for done in (1, 2):
        update(done, 2)
    assert capsys.readouterr().err == ""


def test_callback_draws_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("sage.io.progress.DELAY_S", 0.0)
    update = progress_callback("measuring")
    update(2, 2)
    assert "measuring" in terminal.getvalue() and "2/2" in terminal.getvalue()
