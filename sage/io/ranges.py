"""Settings of users: ranges of numbers, the check of a dataclass by its annotations, meanings from docstrings, nearest names.

A number of a configuration, a command line or a policy is a dataclass field whose annotation has its range:
`depth: PositiveInt = 5`, `ratio: Annotated[float, Range(gt=0, lt=1)] = 0.03`. Imports no torch.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

Settings = TypeVar("Settings")
Choice = TypeVar("Choice", bound=StrEnum)
UNIONS = (Union, UnionType)  # of `Annotated[X, ...] | None` and of `X | None`
SECTION = re.compile(r"(Attributes|Args):")
ENTRY = re.compile(r"    (\w+(?:, \w+)*): (.+)")
_FIELD_TYPES: dict[type, dict[str, Any]] = {}  # by class; looking them up takes a third of a millisecond
MIN_BEGINNING = 3  # letters of a name that only begins another one


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


AnyInt = Annotated[int, Range()]
PositiveInt = Annotated[int, Range(ge=1)]
NonNegativeInt = Annotated[int, Range(ge=0)]
PositiveFloat = Annotated[float, Range(gt=0)]
NonNegativeFloat = Annotated[float, Range(ge=0)]


class FieldError(ValueError):
    """A field with a value that is not allowed; `allowed` holds what is allowed, and the remedy."""

    def __init__(self, key: str, value: Any, allowed: str) -> None:
        super().__init__(f"{key}: {value!r} is not allowed; {allowed}")
        self.key, self.value, self.allowed = key, value, allowed


def check_fields(settings: Any, prefix: str = "") -> None:
    """Raises FieldError for the first field of a dataclass that its annotation does not allow, also in nested dataclasses.

    `prefix`, for example `data.`, precedes the keys in messages.
    """
    hints = field_types(type(settings))
    for field in fields(settings):
        key, value, hint = f"{prefix}{field.name}", getattr(settings, field.name), hints[field.name]
        nested = {f"{key}.{label}": part for label, part in value.items()} if isinstance(value, dict) else {key: value}
        for name, part in nested.items():
            if is_dataclass(part):
                check_fields(part, f"{name}.")
        if field.init:
            check_value(key, value, hint)


def check_value(key: str, value: Any, hint: Any) -> None:
    """Raises FieldError for a value that an annotation does not allow."""
    if not _fits(value, hint):
        raise FieldError(key, value, allowed(hint))


def choose(key: str, name: str, kind: type[Choice]) -> Choice:
    """Returns the choice with a name; FieldError if there is none."""
    check_value(key, name, kind)
    return kind(name)


def from_attributes(kind: type[Settings], source: object, **given: Any) -> Settings:
    """Builds a dataclass from the attributes of `source` that have a field's name, as of parsed arguments; `given` precede."""
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: getattr(source, name) for name in names if hasattr(source, name)} | given)


def field_types(kind: type) -> dict[str, Any]:
    """Returns the annotations of a class, ranges included; do not modify the result."""
    if kind not in _FIELD_TYPES:
        _FIELD_TYPES[kind] = get_type_hints(kind, include_extras=True)
    return _FIELD_TYPES[kind]


def plain_type(hint: Any) -> Any:
    """Returns T of `Annotated[T, ...]` and of `T | None`."""
    while get_origin(hint) in (Annotated, *UNIONS):
        hint = next(part for part in get_args(hint) if part is not NoneType)
    return hint


def _fits(value: Any, hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _fits(value, args[0]) and all(bound.contains(value) for bound in args[1:])
    if origin in UNIONS:
        return any(_fits(value, part) for part in args)
    if hint is Any or not (isinstance(hint, type) or origin):
        return True
    if origin is not None and issubclass(origin, Collection) and not issubclass(origin, dict):
        is_collection = isinstance(value, Sequence if origin is list else origin) and not isinstance(value, (str, bytes))
        return is_collection and all(_fits(item, args[0]) for item in value)
    if hint in (int, float):
        is_number = isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
        return is_number and abs(value) < math.inf
    if issubclass(origin or hint, StrEnum):
        return isinstance(value, str) and value in list(hint)
    return isinstance(value, origin or hint)


def allowed(hint: Any) -> str:
    """Returns what an annotation allows, and the remedies of its ranges: `give an integer of at least 1; REMEDY`."""
    remedies = "".join(f"; {bound.remedy}" for bound in _ranges(hint) if bound.remedy)
    return f"give {type_name(hint)}{remedies}"


def _ranges(hint: Any) -> list[Range]:
    nested = [bound for part in get_args(hint) for bound in _ranges(part)]
    return [*([hint] if isinstance(hint, Range) else []), *nested]


def type_name(hint: Any, is_plural: bool = False) -> str:
    """Returns an annotation in words: `an integer of at least 1`, `a list of lists of integers`."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return " ".join(filter(None, [type_name(args[0], is_plural), *map(str, args[1:])]))
    if origin in UNIONS:
        return " or ".join(type_name(part, is_plural) for part in args)
    if origin is not None and not issubclass(origin, dict):
        return f"{'lists' if is_plural else 'a list'} of {type_name(args[0], is_plural=True)}"
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return f"one of {', '.join(hint)}"
    singular = {int: "an integer", float: "a number", str: "a string", bool: "true or false", NoneType: "null"}
    plural = {int: "integers", float: "numbers", str: "strings"}
    return (plural if is_plural else singular).get(hint, "a mapping")


def key_meanings(schema: type) -> dict[str, str]:
    """Returns the meaning of every described field of a dataclass, inherited fields included."""
    meanings: dict[str, str] = {}
    for base in reversed(schema.__mro__):
        meanings |= parse_section(base.__doc__ or "")
    return meanings


def parse_section(doc: str) -> dict[str, str]:
    """Parses the entries `name: text` or `name, name: text` of a docstring's `Attributes:` or `Args:`."""
    lines = iter(inspect.cleandoc(doc).splitlines())
    meanings: dict[str, str] = {}
    names: list[str] = []
    for line in lines:
        if SECTION.fullmatch(line):
            break
    for line in lines:
        if line and not line.startswith("    "):
            break
        if entry := ENTRY.fullmatch(line):
            names = entry.group(1).split(", ")
            meanings |= dict.fromkeys(names, entry.group(2))
        else:
            meanings |= {name: f"{meanings[name]} {line.strip()}".strip() for name in names}
    return meanings


def first_sentence(doc: str | None) -> str:
    """Returns the first sentence of a docstring without its full stop."""
    return re.split(r"\.(?=\s|$)", " ".join((doc or "").split()), maxsplit=1)[0]


def did_you_mean(name: str, known: Sequence[str], prefix: str = "") -> str:
    """Returns ` (did you mean NAME?)`, or nothing if no known name is close; `prefix` is written before the name.

    A name of three letters or more that only begins other ones stands for the first of them.
    """
    close = difflib.get_close_matches(name, known, n=1)
    if not close and len(name) >= MIN_BEGINNING:
        close = [other for other in known if other.startswith(name)]
    return f" (did you mean {prefix}{close[0]}?)" if close else ""
