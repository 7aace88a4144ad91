"""Digests of source code: which changes of which modules change them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sage.io import source

MODULES = {
    "sage/__init__.py": "from sage.unrelated import nothing\n",
    "sage/io/__init__.py": "",
    "sage/io/lowest.py": '"""Counts."""\n\n\ndef count() -> int:\n    """Returns a number."""\n    return 1  # one\n',
    "sage/unrelated.py": "nothing = 0\n",
    "sage/types.py": "Number = int\n",
    "data_prep/__init__.py": "from data_prep.other import CONSTANT\n",
    "data_prep/other.py": "CONSTANT = 3\n",
    "data_prep/middle.py": "import torch\n\n\ndef use():\n    from sage.io import lowest\n\n    return lowest.count()\n",
    "data_prep/top.py": (
        "from typing import TYPE_CHECKING\n\nfrom .middle import use\n\nif TYPE_CHECKING:\n    from sage.types import Number\n"
    ),
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(source, "ROOT", tmp_path)
    for name, text in MODULES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def digest(*modules: str) -> str:
    """The digest in a new process."""
    source._read_source.cache_clear()
    return source.source_digest(*modules)


def change(project: Path, name: str, old: str, new: str) -> None:
    text = (project / name).read_text()
    assert text.count(old) == 1
    (project / name).write_text(text.replace(old, new))


def test_imports_are_followed_also_inside_functions(project: Path) -> None:
    assert set(source.source_files("data_prep.top")) == {"data_prep.top", "data_prep.middle", "sage.io.lowest"}


def test_a_name_of_a_package_is_in_its_own_file(project: Path) -> None:
    change(project, "data_prep/top.py", "from .middle import use", "from data_prep import CONSTANT")
    assert set(source.source_files("data_prep.top")) == {"data_prep.top", "data_prep", "data_prep.other"}


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("sage/io/lowest.py", "  # one", "  # a number"),
        ("sage/io/lowest.py", "Counts.", "Counts numbers."),
        ("sage/io/lowest.py", "Returns a number.", "Returns one."),
        ("sage/io/lowest.py", '    """Returns a number."""\n', ""),
        ("sage/io/lowest.py", "return 1  # one", "return (\n        1\n    )"),
        ("sage/unrelated.py", "0", "1"),
        ("sage/types.py", "int", "float"),
        ("data_prep/other.py", "3", "4"),
    ],
)
def test_comments_docstrings_formatting_and_other_modules_change_nothing(project: Path, name: str, old: str, new: str) -> None:
    before = digest("data_prep.top")
    change(project, name, old, new)
    assert digest("data_prep.top") == before


def test_a_line_of_a_module_that_is_imported_by_others_changes_it(project: Path) -> None:
    before = digest("data_prep.top")
    change(project, "sage/io/lowest.py", "return 1", "return 2")
    assert digest("data_prep.top") != before


def test_a_module_that_is_imported_anew_counts(project: Path) -> None:
    before = digest("data_prep.top")
    change(project, "data_prep/middle.py", "import torch", "import sage.unrelated")
    imported = digest("data_prep.top")
    change(project, "sage/unrelated.py", "0", "1")
    assert len({before, imported, digest("data_prep.top")}) == 3


def test_a_name_that_becomes_a_module_counts(project: Path) -> None:
    (project / "data_prep" / "CONSTANT.py").write_text("")
    change(project, "data_prep/top.py", "from .middle import use", "from data_prep import CONSTANT")
    assert set(source.source_files("data_prep.top")) == {"data_prep.top", "data_prep.CONSTANT"}


def test_several_modules_in_any_order(project: Path) -> None:
    assert digest("data_prep.top", "sage.unrelated") == digest("sage.unrelated", "data_prep.top", "data_prep.middle")
    assert digest("data_prep.top", "sage.unrelated") != digest("data_prep.top")


def test_a_module_outside_the_project(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "poems.py").write_text("from data_prep.middle import use\n")
    assert set(source.source_files("poems")) == {"poems", "data_prep.middle", "sage.io.lowest"}
    with pytest.raises(ValueError, match="data_prep.absent: no module of this name"):
        source.source_digest("data_prep.absent")


def test_files_of_this_project_are_found() -> None:
    found = source.source_files("data_prep.chat")
    assert {"data_prep.chat", "data_prep.conversation", "sage.inputs.processing"} <= found.keys()
    assert not any(name.startswith("data_prep.pocket") for name in found)
