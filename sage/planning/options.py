"""Options of policies: types, bounds and defaults are read from the fields of the policy's class, and values checked by them.

A policy is a dataclass; a field is an option. Bounds are written with `Annotated`: `Annotated[int, Range(ge=1)]`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True, kw_only=True)
class Range:
    """Bounds of a number; `remedy` is appended to the message."""

    ge: float = -math.inf
    gt: float = -math.inf
    le: float = math.inf
    lt: float = math.inf
    remedy: str = ""

    def contains(self, value: float) -> bool:
        """Whether `value` is within the bounds."""
        return self.ge <= value <= self.le and self.gt < value < self.lt

    def __str__(self) -> str:
        bounds = (("of at least", self.ge), ("above", self.gt), ("at most", self.le), ("below", self.lt))
        return " and ".join(f"{words} {bound:g}" for words, bound in bounds if math.isfinite(bound))


class OptionError(ValueError):
    """An option that is unknown or has a value that is not allowed; `problem` holds value, what is allowed and remedy."""

    def __init__(self, policy: str, option: str, problem: str) -> None:
        super().__init__(f"policy.{policy}.{option}: {problem}")
        self.policy, self.option, self.problem = policy, option, problem

    def under(self, prefix: str) -> str:
        """Returns the message with the option's dotted key under `prefix`, for example `decode.options`."""
        return f"{prefix}.{self.policy}.{self.option}: {self.problem}"


def defaults(kind: type) -> dict[str, Any]:
    """Returns the options of a policy class with their default values."""
    if not is_dataclass(kind):
        return {}
    values = {field.name: field.default for field in fields(kind) if field.init}
    assert MISSING not in values.values(), f"every option of {kind.__name__} needs a default"
    return values


def check_names(kind: Any, options: Sequence[str]) -> None:
    """Raises OptionError with the first of `options` that a policy class does not have, and the known ones."""
    known = defaults(kind)
    for option in options:
        if option not in known:
            raise OptionError(kind.name, option, f"unknown option; choose from {', '.join(known) or 'none'}")


def check_values(policy: Any) -> None:
    """Checks every option of a policy against its annotation; text becomes the member of an enum. Raises OptionError with the
    option, the value and what is allowed.
    """
    kind: type = type(policy)
    hints = types(kind)
    for option in defaults(kind):
        value, hint = getattr(policy, option), hints[option]
        if not _fits(value, hint):
            raise OptionError(policy.name, option, f"{value!r} is not allowed; {_allowed(hint)}")
        if isinstance(hint, type) and issubclass(hint, StrEnum):
            setattr(policy, option, hint(value))


@cache
def types(kind: type) -> dict[str, Any]:
    """Returns the annotations of a class, bounds included."""
    return get_type_hints(kind, include_extras=True)


def _fits(value: Any, hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _fits(value, args[0]) and all(bound.contains(value) for bound in args[1:])
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in args)
    if origin is Sequence:
        return isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and all(_fits(one, args[0]) for one in value)
    if hint in (bool, NoneType):
        return isinstance(value, hint)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, str) and value in list(hint)


def _allowed(hint: Any) -> str:
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return f"choose one of {', '.join(hint)}"
    remedies = "".join(f"; {bound.remedy}" for bound in get_args(hint) if isinstance(bound, Range) and bound.remedy)
    return f"give {type_name(hint)}{remedies}"


def type_name(hint: Any, is_plural: bool = False) -> str:
    """Returns an annotation in words: `an integer of at least 1`, `a list of lists of integers`."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return " ".join([type_name(args[0], is_plural), *map(str, args[1:])])
    if origin in (Union, UnionType):
        return " or ".join(type_name(part, is_plural) for part in args)
    if origin is Sequence:
        return f"{'lists' if is_plural else 'a list'} of {type_name(args[0], is_plural=True)}"
    singular = {int: "an integer", float: "a number", bool: "true or false", NoneType: "null"}
    plural = {int: "integers", float: "numbers"}
    return (plural if is_plural else singular)[hint]
