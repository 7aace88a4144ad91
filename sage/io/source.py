"""Digests of source code, for the keys of results that are kept on disk: a result is valid while the code that computed it is
the same.
"""

from __future__ import annotations

import hashlib
import importlib.util
from functools import cache
from pathlib import Path


@cache
def source_digest(*names: str) -> str:
    """Returns a digest of the source files of packages and modules, 32 hexadecimal digits; any change counts.

    Imports are not followed. Files are read once per process. ValueError if there is no such package or module.
    """
    digest = hashlib.sha256()
    for path in sorted({path for name in names for path in _files(name)}):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def _files(name: str) -> list[Path]:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ValueError(f"{name}: no module of this name")
    path = Path(spec.origin)
    return [*path.parent.rglob("*.py")] if path.name == "__init__.py" else [path]
