"""The rooms of data_prep import only those below them."""

from __future__ import annotations

import ast
from pathlib import Path

import data_prep

ROOT = Path(data_prep.__file__).parent
ORDER = ("tools", "server", "batching", "dataset", "sources", "pocket")  # highest first


def imported_rooms(path: Path) -> set[str]:
    modules = {node.module or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)}
    return {module.split(".")[1] for module in modules if module.startswith("data_prep.")} & set(ORDER)


def test_imports_between_rooms_point_down() -> None:
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == set(ORDER)
    for position, room in enumerate(ORDER):
        for path in (ROOT / room).rglob("*.py"):
            assert imported_rooms(path) <= set(ORDER[position:]), path


def test_shared_modules_import_no_room() -> None:
    """Except `build`, which connects the rooms, and `config`, which reads the registry of sources."""
    found = {path.stem: rooms for path in ROOT.glob("*.py") if (rooms := imported_rooms(path))}
    assert found.keys() == {"build", "config"}
    assert found["config"] == {"sources"}


def test_sources_do_not_import_the_settings_of_a_run() -> None:
    """They have settings of their own, `SourceConfig`, which `config` imports."""
    found = [path for path in (ROOT / "sources").glob("*.py") if "data_prep.config" in path.read_text()]
    assert found == [] and "data_prep.sources" in (ROOT / "config.py").read_text()
