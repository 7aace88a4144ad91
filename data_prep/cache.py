"""The cache folder of data: results that one process computes and all others read.

Does not own: the keys of the results, atomic writes and locks (sage.io.files).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sage.io.files import locked, user_cache_dir, writing

OTHER_CACHE = "another data.cache_dir"  # the remedy if the cache cannot be written


def cache_dir(configured: str = "") -> Path:
    """Returns the folder `configured`, by default `sage.io.files.user_cache_dir()`."""
    return Path(configured).expanduser() if configured else user_cache_dir()


@contextmanager
def computed_once(
    path: Path, compute: Callable[[Path], object], is_outdated: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Computes a result unless it is cached; no other process changes it before the block ends.

    Args:
        path: the file or folder of the result, complete or absent.
        compute: writes the result to the path that it is given.
        is_outdated: whether the cached result has to be computed again.

    Raises:
        CannotWrite: the cache cannot be written.
    """
    with locked(path, OTHER_CACHE):
        if not path.exists() or is_outdated():
            with writing(path, OTHER_CACHE) as temporary:
                compute(temporary)
        yield
