"""Fixtures of the tests of training."""

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Prepares this process for a run of one rank; restores the random generators."""
    from support.train_helpers import single_process

    with single_process(monkeypatch):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    """Runs and the cache of their data, beside a link to the target."""
    where = tmp_path_factory.mktemp("runs")
    (where / target.name).symlink_to(target)
    return where
