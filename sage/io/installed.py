"""Packages of this project that lie beside `sage`, whatever modules of the same names the working directory contains."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from sage.io.files import PACKAGES_DIR


def import_installed(name: str) -> None:
    """Imports a package from the folder that contains `sage`, before any module of that name elsewhere.

    Raises:
        ImportError: another module of that name is imported already; names its file.
    """
    path = PACKAGES_DIR / name / "__init__.py"
    found = sys.modules.get(name)
    if found is not None:
        other = getattr(found, "__file__", None)
        if other is None or Path(other).resolve() != path:
            raise ImportError(
                f"{other or name}: this module is imported in place of sage-draft's package {name}; "
                f"import sage.training first, or rename the file"
            )
        return
    spec = spec_from_file_location(name, path, submodule_search_locations=[str(path.parent)])
    assert spec is not None and spec.loader is not None, path
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
