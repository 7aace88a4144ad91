"""Options of policies: names, types, ranges and defaults are the fields of the policy's class, a dataclass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from typing import Any

from sage.io.ranges import FieldError, check_fields, field_types


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
    if not is_dataclass(type(policy)):
        return
    try:
        check_fields(policy)
    except FieldError as error:
        raise OptionError(policy.name, error.key, f"{error.value!r} is not allowed; {error.allowed}") from None
    for option in defaults(type(policy)):
        hint = field_types(type(policy))[option]
        if isinstance(hint, type) and issubclass(hint, StrEnum):
            setattr(policy, option, hint(getattr(policy, option)))
