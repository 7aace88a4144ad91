"""Results that are kept in the cache folder of data: one process computes them and all others read them."""

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
    """Holds the lock of a cached result, a file or folder, after `compute` has written it to the given path if it is absent or
    outdated; raises CannotWrite.
    """
    with locked(path, OTHER_CACHE):
        if not path.exists() or is_outdated():
            with writing(path, OTHER_CACHE) as temporary:
                compute(temporary)
        yield
