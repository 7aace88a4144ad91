"""The keys of a schema with annotation, default and meaning, for help and messages: the dataclasses are their only source.

Does not own: the values of a configuration (conf/), options of policies (their classes). Imports no torch.
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from sage.io.ranges import field_types, first_sentence, key_meanings, plain_type
from train.config.store import subschemas

LABEL = "LABEL"  # stands for a name that the user chooses
LABELED = ("data.sources",)  # mappings with such names


@dataclass(frozen=True)
class Key:
    """A key of a schema.

    Attributes:
        hint: the annotation of its field, ranges included.
        default: of its field; `MISSING` without one.
        meaning: from the docstring of its dataclass.
        section: what its part of the configuration is about.
        choices: the choices of its group that have it; empty: all.
    """

    hint: Any
    default: Any
    meaning: str
    section: str
    choices: tuple[str, ...] = ()


def keys_of(schema: type, prefix: str = "") -> dict[str, Key]:
    """Returns the dotted keys of a schema, those of every choice of its groups included; keys of groups follow the others."""
    owners = {choice: part for (group, choice), part in subschemas().items() if group == group_of(prefix)} or {"": schema}
    having: dict[str, list[str]] = {}
    for choice, part in owners.items():
        for field in dataclasses.fields(part):
            having.setdefault(field.name, []).append(choice)
    found: dict[str, Key] = {}
    nested: dict[str, Key] = {}
    for name, choices in having.items():
        part, key = owners[choices[0]], prefix + name
        hint = field_types(part)[name]
        kind = plain_type(hint)
        if dataclasses.is_dataclass(kind):
            nested |= keys_of(typing.cast(type, kind), f"{key}.")
        elif key in LABELED:
            nested |= keys_of(typing.get_args(kind)[1], f"{key}.{LABEL}.")
        else:
            meaning, section = key_meanings(part).get(name, "").removesuffix("."), first_sentence(schema.__doc__)
            owned = tuple(choices) if len(choices) < len(owners) else ()
            found[key] = Key(hint, _default(part, name), meaning, section, owned)
    return found | nested


def group_of(prefix: str) -> str:
    """Returns the group of choices with a dotted name, `draft.compressor.` -> `draft/compressor`."""
    return prefix.rstrip(".").replace(".", "/")


def _default(schema: type, name: str) -> Any:
    field = next(field for field in dataclasses.fields(schema) if field.name == name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return MISSING if field.default is dataclasses.MISSING else field.default
