"""The nearest known name to one that is misspelt, for messages."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def did_you_mean(name: str, known: Sequence[str], prefix: str = "") -> str:
    """Returns ` (did you mean NAME?)`, or nothing if no known name is close; `prefix` is written before the name."""
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {prefix}{close[0]}?)" if close else ""
