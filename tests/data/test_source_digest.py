"""Digests of source code: which changes change them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.messages import refused

from sage.io import source
from sage.io.source import source_digest


def test_any_file_of_a_package_or_module_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "verses" / "inner").mkdir(parents=True)
    (tmp_path / "verses" / "__init__.py").touch()
    inner, alone = tmp_path / "verses" / "inner" / "rhyme.py", tmp_path / "poem.py"
    found = []
    for first, second in (("1", "1"), ("2", "1"), ("2", "2"), ("2", "2")):
        inner.write_text(first)
        alone.write_text(second)
        source_digest.cache_clear()  # as in a new process
        found.append(source_digest("verses", "poem"))
    assert len({*found[:3]}) == 3 and found[3] == found[2] == source_digest("poem", "verses", "verses.inner.rhyme")
    with refused("no_such_module: no module of this name"):
        source_digest("no_such_module")


def test_packages_of_this_project_are_found() -> None:
    names = {path.name for path in source._files("sage.targets")}
    assert {"tree_passes.py", "qwen2_5_vl.py"} <= names
