"""Progress bars on stderr: none where stderr is not a terminal, and none for what takes less than a second."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tqdm import tqdm

DELAY_S = 1.0  # work that ends sooner shows no bar


def progress_bar(
    items: Iterable[Any] | None, description: str, total: int | None = None, initial: int = 0, is_shown: bool = True
) -> tqdm:
    """Wraps `items` in a progress bar; the caller updates one without items, and one that is not shown draws nothing."""
    is_disabled = None if is_shown else True  # None: unless stderr is a terminal
    return tqdm(items, description, total, initial=initial, disable=is_disabled, delay=DELAY_S, dynamic_ncols=True)


def progress_callback(description: str) -> Callable[[int, int], None]:
    """Returns a callback (done, total) that draws a progress bar."""
    bar = progress_bar(None, description)

    def update(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    return update
