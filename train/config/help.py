"""`--help` of the commands that Hydra composes: usage, the choices of every group, and every key with its default and meaning.

Shows the configuration that the other words of the command line compose: `sage-train draft=eagle --help`. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sage.io.docstrings import key_meanings
from sage.io.files import config_dir
from sage.io.ranges import plain_type
from sage.trees import POLICIES
from train.config.descriptions import choice_meaning, choice_values, policy_options
from train.config.schema import PolicyName
from train.config.store import POLICY_GROUP, group_choices, subschemas

CHOICES, KEYS = "$APP_CONFIG_GROUPS", "$CONFIG"  # placeholders of Hydra in the templates of conf/*.yaml
INDENT, COLUMN, TERMINAL = "  ", 42, (128, 24)
LABELS = {"data.sources": "LABEL"}  # mappings whose keys the user names, as they are written in the help
POLICY_OPTIONS = "decode.options"
LISTED_WITH_VALUES = ("target", "deepspeed")  # groups whose choices are described by the values that they set
SET_BY_CHOICE = ("name", "kind")


Row = tuple[str, str]  # a line of the help: `key=default` or a choice, and its meaning


def help_text(config_name: str, schema: type, arguments: Sequence[str]) -> str:
    """Returns the help of a command for the configuration composed from its arguments.

    Args:
        arguments: of the command line; options like `--help`, and sweeps, are ignored.

    Raises:
        HydraException, OmegaConfBaseException: an argument is wrong.
    """
    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
        words = [word for word in arguments if not word.startswith("-")]
        parse = OverridesParser.create().parse_override
        single_values = [word for word in words if not parse(word).is_sweep_override()]
        composed = hydra.compose(config_name, single_values, return_hydra_config=True)
    width = min(shutil.get_terminal_size(TERMINAL).columns, TERMINAL[0])
    template, chosen = str(composed.hydra.help.template), dict(composed.hydra.runtime.choices)
    chosen |= {POLICY_GROUP: list(composed.decode.policies)} if "decode" in composed else {}
    choices = [_choices(group, chosen.get(group), width) for group in _groups(config_name)]
    keys = _table(_rows(schema, composed, "", chosen), width)
    return template.replace(CHOICES, "\n".join(choices)).replace(KEYS, keys).rstrip()


# -- choices -----------------------------------------------------------------------------------------------------------


def _groups(config_name: str) -> list[str]:
    """Returns the groups with several choices that a command takes: those of its defaults list."""
    listed: Any = OmegaConf.to_container(OmegaConf.load(config_dir() / f"{config_name}.yaml"))
    groups = [group for entry in listed["defaults"] if isinstance(entry, dict) for group in entry]
    groups += [POLICY_GROUP] if "decode" in groups else []
    return [group for group in groups if len(group_choices(group)) > 1]


def _choices(group: str, chosen: Any, width: int) -> str:
    """Returns the choices of a group with their meanings; a star marks those of this configuration."""
    marked = [chosen] if isinstance(chosen, str) else list(chosen or ())
    meanings = {name: choice_meaning(group, name).removesuffix(".") for name in group_choices(group)}
    rows = [(f"{'*' if name in marked else ' '} {name}", meaning) for name, meaning in meanings.items()]
    return f"{INDENT}{group}=\n{_table(rows, width, column=24)}\n"


# -- keys --------------------------------------------------------------------------------------------------------------


def _rows(schema: type, values: Any, prefix: str, chosen: Mapping[str, Any]) -> Iterator[Row]:
    """Yields a row per key of a schema and of all choices of its groups.

    Args:
        values: the composed values of the schema.
        prefix: dotted, of the keys.
        chosen: the composed choice by group.
    """
    group = prefix.rstrip(".").replace(".", "/")
    owners = {choice: part for (where, choice), part in subschemas().items() if where == group} or {"": schema}
    names = dict.fromkeys(field for part in owners.values() for field in _fields(part))
    part_of = {name: next(part for part in owners.values() if name in _fields(part)) for name in names}
    kind_of = {name: plain_type(typing.get_type_hints(part)[name]) for name, part in part_of.items()}
    for name in sorted(names, key=lambda name: _is_group(kind_of[name], prefix + name)):
        own = {choice: part for choice, part in owners.items() if name in _fields(part)}
        part, kind, key = part_of[name], kind_of[name], prefix + name
        if dataclasses.is_dataclass(kind):
            yield from _rows(typing.cast(type, kind), _value(values, name), f"{key}.", chosen)
        elif key in LABELS:
            item: Any = typing.get_args(kind)[1]
            yield from _rows(item, OmegaConf.structured(item), f"{key}.{LABELS[key]}.", chosen)
        elif key == POLICY_OPTIONS:
            yield from _policy_rows(key, _value(values, name))
        else:
            defaults = _defaults(name, group, own) if group in chosen else {}
            value = _value(values, name) if name in set(values) else next(iter(defaults.values()), MISSING)
            notes = [key_meanings(part).get(name, "").removesuffix("."), _allowed(kind)]
            notes.append(f"only with {group}={'|'.join(own)}" if len(own) < len(owners) else "")
            others = {} if group in LISTED_WITH_VALUES or name in SET_BY_CHOICE else defaults
            notes += [f"{other} with {group}={'|'.join(names)}" for other, names in _by_value(others, value).items()]
            yield f"{key}={_written(value)}", "; ".join(note for note in notes if note)


def _is_group(kind: Any, key: str) -> bool:
    """Returns whether a key has keys of its own; they follow the others."""
    return dataclasses.is_dataclass(kind) or key in LABELS or key == POLICY_OPTIONS


def _policy_rows(key: str, given: Mapping[str, Any]) -> Iterator[Row]:
    """Yields a row per option of every policy; `given` has the options that the configuration sets."""
    for policy in POLICIES:
        own = given.get(policy) or {}
        for name, option in policy_options(policy).items():
            value = _written(own[name]) if name in own else option.default
            yield f"{key}.{policy}.{name}={value}", option.meaning.removesuffix(".")


def _defaults(name: str, group: str, owners: Mapping[str, type]) -> dict[str, Any]:
    """Returns the default of a key under every choice of its group that has the key and sets it to a plain value."""
    parts = owners if "" not in owners else dict.fromkeys(group_choices(group), owners[""])
    fields = {choice: _fields(part)[name] for choice, part in parts.items()}
    found = {choice: choice_values(group, choice).get(name, field.default) for choice, field in fields.items()}
    return {choice: value for choice, value in found.items() if value not in (MISSING, dataclasses.MISSING)}


def _fields(schema: type) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(schema)}


def _by_value(defaults: Mapping[str, Any], value: Any) -> dict[str, list[str]]:
    """Returns the choices by written default, without those whose default is `value`."""
    found: dict[str, list[str]] = {}
    for choice, other in defaults.items():
        if _written(other) != _written(value):
            found.setdefault(_written(other), []).append(choice)
    return found


def _value(values: Any, name: str) -> Any:
    """Returns a resolved value; as it is written if it refers to a key that is missing."""
    try:
        value = MISSING if OmegaConf.is_missing(values, name) else values[name]
    except OmegaConfBaseException:
        value = OmegaConf.to_container(values, resolve=False)[name]  # type: ignore[call-overload,index]
    return value


def _allowed(kind: Any) -> str:
    """Lists the allowed values of an enumeration, or of a list of them."""
    item = typing.get_args(kind)[0] if typing.get_origin(kind) is list else kind
    if not (isinstance(item, type) and issubclass(item, Enum)) or item is PolicyName:  # policies are listed as choices
        return ""
    return f"{'list of' if item is not kind else 'one of'} {', '.join(item.__members__)}"


def _written(value: Any) -> str:
    """Returns a value as on a command line."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if OmegaConf.is_list(value) or isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    if OmegaConf.is_dict(value) or isinstance(value, dict):
        return "{" + ",".join(map(str, value)) + "}"
    return str(value)


# -- layout ------------------------------------------------------------------------------------------------------------


def _table(rows: Iterable[Row], width: int, column: int = COLUMN) -> str:
    """Returns the rows in two columns of `width` characters together; a blank line separates the groups of keys."""
    lines: list[str] = []
    before = ""
    for left, text in rows:
        group = left.partition("=")[0].rpartition(".")[0]
        lines += [""] if lines and group != before else []
        before = group
        meaning = textwrap.wrap(text, max(width - column - len(INDENT), 24)) or [""]
        if len(left) >= column:
            lines.append(INDENT + left)
        else:
            lines.append(f"{INDENT}{left:{column}}{meaning.pop(0)}".rstrip())
        lines += [INDENT + " " * column + line for line in meaning]
    return "\n".join(lines)
