"""Training from Python, whatever the working directory contains: `from sage.training import compose, run`.

Importing this package imports the installed `train`, `data_prep` and `checkpoints`, which lie beside `sage`, so that a user's
own `train.py` is not imported in their place. The names are those of the package `train`; torch is imported when a run starts.

Owns: where these packages are imported from. Does not own: training (train.job). This is the only part of `sage` that refers to
packages above it, and it does so by name.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage.io.files import PACKAGES_DIR

if TYPE_CHECKING:
    from train import Callback, Config, ConfigError, compose, run

PACKAGES = ("checkpoints", "data_prep", "train")
__all__ = ["Callback", "Config", "ConfigError", "compose", "run"]


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


for _name in PACKAGES:
    import_installed(_name)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'sage.training' has no attribute {name!r}")
    return getattr(import_module("train"), name)
