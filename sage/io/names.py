"""The nearest known name to one that is misspelt, for messages."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

MIN_BEGINNING = 3  # letters


def did_you_mean(name: str, known: Sequence[str], prefix: str = "") -> str:
    """Returns ` (did you mean NAME?)`, or nothing if no known name is close; `prefix` is written before the name.

    A name of three letters or more that only begins other ones stands for the first of them.
    """
    close = difflib.get_close_matches(name, known, n=1)
    if not close and len(name) >= MIN_BEGINNING:
        close = [other for other in known if other.startswith(name)]
    return f" (did you mean {prefix}{close[0]}?)" if close else ""
