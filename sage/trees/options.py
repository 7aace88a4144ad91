"""Checks of policies' options. Each names the dotted key, the value found and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any


def check_count(key: str, value: Any, least: int, remedy: str = "") -> None:
    """Refuses anything but a whole number of at least `least`.

    Raises:
        ValueError: names the dotted key, the value and what is allowed.
    """
    if not is_count(value, least):
        raise ValueError(f"{key}: {value!r} is not allowed; give a whole number of at least {least}{remedy}")


def check_number(key: str, value: Any, least: float, most: float = math.inf) -> None:
    """Refuses anything but a finite number from `least` to `most`.

    Raises:
        ValueError: names the dotted key, the value and what is allowed.
    """
    if not _is_number(value) or not least <= value <= most or math.isinf(value):
        bound = "" if math.isinf(most) else f" and at most {most:g}"
        raise ValueError(f"{key}: {value!r} is not allowed; give a finite number of at least {least:g}{bound}")


def check_share(key: str, value: Any, is_zero_allowed: bool = False) -> None:
    """Refuses anything but a probability below 1, and 0 unless allowed.

    Raises:
        ValueError: names the dotted key, the value and what is allowed.
    """
    if not _is_number(value) or not (0 < value < 1 or (is_zero_allowed and value == 0)):
        least = "at least 0" if is_zero_allowed else "above 0"
        raise ValueError(f"{key}: {value!r} is not allowed; give a number {least} and below 1")


def check_switch(key: str, value: Any) -> None:
    """Refuses anything but true and false.

    Raises:
        ValueError: names the dotted key, the value and what is allowed.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{key}: {value!r} is not allowed; give true or false")


def check_choice(key: str, value: Any, choices: Iterable[str]) -> None:
    """Refuses anything but one of the choices.

    Raises:
        ValueError: names the dotted key, the value and the choices.
    """
    known = [str(choice) for choice in choices]
    if value not in known:
        raise ValueError(f"{key}: {value!r} is not allowed; choose one of {', '.join(known)}")


def is_count(value: Any, least: int) -> bool:
    """Whether it is a whole number of at least `least`; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
