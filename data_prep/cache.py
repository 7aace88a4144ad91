"""Results that are kept in the cache folder of data: one process computes them and all others read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from sage.io.files import locked, naming_write_errors, user_cache_dir
from sage.io.folders import new_folder

OTHER_CACHE = "another data.cache_dir"  # the remedy if the cache cannot be written


def cache_dir(configured: str = "") -> Path:
    """Returns the folder `configured`, by default `sage.io.files.user_cache_dir()`."""
    return Path(configured).expanduser() if configured else user_cache_dir()


@contextmanager
def computed_once(
    path: Path,
    compute: Callable[[Path], object],
    is_outdated: Callable[[], bool] = lambda: False,
    replacing: Callable[[Path], AbstractContextManager[Path]] = new_folder,
) -> Iterator[None]:
    """Holds the lock of a cached result after `compute` has written it to the given path if it is absent or outdated: into a
    new folder, or with `atomic_path` as `replacing` as a file. Raises CannotWrite.
    """
    with locked(path, OTHER_CACHE):
        if not path.exists() or is_outdated():
            with naming_write_errors(path, OTHER_CACHE), replacing(path) as temporary:
                compute(temporary)
        yield
