"""Fixtures of the tests of exports."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import sage


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, sage.Target]:
    """Tiny targets of both families, saved; shared by all tests, not to be changed."""
    from support.export_helpers import save_target

    return {
        family: save_target(tmp_path_factory.mktemp(family) / "target", family) for family in ("qwen2_5_vl", "llava_onevision")
    }
