"""Digests of source code, for the keys of results that are kept on disk.

A kept result is valid as long as the code that computed it is the same. `source_digest("data_prep.chat")` covers the module and
every module of the project that it imports, directly or through others:

    data_prep.chat -> data_prep.conversation -> sage.inputs.video

Imports are read from the source with `ast`; nothing is imported. Comments, docstrings and formatting do not count. An import
inside a function counts, an import under `TYPE_CHECKING` does not. A module that is imported by a computed name
(`importlib.import_module`) has to be given by the caller. Does not own: versions of other packages and the processor
(sage.io.machine).
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from functools import cache
from pathlib import Path

from sage.io.files import json_digest

PACKAGES = ("benchmarks", "checkpoints", "data_prep", "sage", "train")  # imports of other packages are not followed
ROOT = Path(__file__).resolve().parents[2]  # the folder of the packages


def source_digest(*modules: str) -> str:
    """Returns a digest of the source of `modules` and of all modules of the project that they import, 32 hexadecimal digits.

    Files are read once per process. `__init__.py` of a package counts where a name is imported from the package itself.
    ValueError if there is no such module.
    """
    return json_digest({name: _read_source(path)[0] for name, path in source_files(*modules).items()})


def source_files(*modules: str) -> dict[str, Path]:
    """Returns the files that `source_digest` covers, by module."""
    found: dict[str, Path] = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = _file_of(name)
            waiting += _project_imports(name, found[name])
    return found


def _file_of(module: str) -> Path:
    path = _project_file(module)
    if path is None:  # given by the caller, such as a source of data outside the project
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            raise ValueError(f"{module}: no module of this name")
        path = Path(spec.origin)
    return path


def _project_file(module: str) -> Path | None:
    if module.partition(".")[0] not in PACKAGES:
        return None
    path = ROOT.joinpath(*module.split("."))
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


def _project_imports(module: str, path: Path) -> list[str]:
    """Returns the modules of the project that a module imports; `from A import B` is A.B if that is a module, otherwise A."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = []
    for origin, name in _read_source(path)[1]:
        base = importlib.util.resolve_name(origin, package)
        found.append(f"{base}.{name}" if name and _project_file(f"{base}.{name}") else base)
    return [name for name in found if _project_file(name)]


@cache
def _read_source(path: Path) -> tuple[str, list[tuple[str, str]]]:
    """Returns the digest of a file and its imports: (module, name imported from it; empty for `import module`)."""
    tree = _WithoutDocstrings().visit(ast.parse(path.read_bytes()))
    imports: list[tuple[str, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imports += [("." * node.level + (node.module or ""), alias.name) for alias in node.names]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest(), imports


class _WithoutDocstrings(ast.NodeTransformer):
    """Removes docstrings, other strings that are statements, and the blocks of `if TYPE_CHECKING`."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else node

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        is_for_types = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        return node.orelse if is_for_types else node
