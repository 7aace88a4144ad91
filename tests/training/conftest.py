"""Fixtures of the tests of training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Prepares this process for a run of one rank; restores the random generators."""
    from support.train_helpers import single_process

    with single_process(monkeypatch):
        yield
