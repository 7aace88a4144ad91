"""Fixtures of the tests of passes."""

import pytest

from sage.runtime import package_folder


@pytest.fixture(autouse=True)
def fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets every test see the warnings that are shown once per process."""
    monkeypatch.setattr(package_folder, "_SHOWN", set())
