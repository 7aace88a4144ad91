"""`--help` of the commands that Hydra composes.

    --help            one screen: usage, the names of all choices, all keys with their values
    --help GROUP|KEY  choices and keys of a group, or one key, with their meanings
    --help all        the choices of every group, and every key with its default and meaning

Shows the configuration that the other words of the command line compose: `sage-train draft=eagle --help`. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sage.io.docstrings import first_sentence, key_meanings
from sage.io.files import config_dir
from sage.io.names import did_you_mean
from sage.io.ranges import allowed, field_types, plain_type
from sage.trees import POLICIES
from train.config.descriptions import choice_meaning, choice_values, policy_options
from train.config.schema import ConfigError, PolicyName
from train.config.store import POLICY_GROUP, group_choices, subschemas

CHOICES, KEYS = "$APP_CONFIG_GROUPS", "$CONFIG"  # placeholders of Hydra in the templates of conf/*.yaml
INDENT, COLUMN, TERMINAL = "  ", 42, (128, 24)
LABELS = {"data.sources": "LABEL"}  # mappings whose keys the user names, as they are written in the help
POLICY_OPTIONS = "decode.options"
LISTED_WITH_VALUES = ("target", "deepspeed")  # groups whose choices are described by the values that they set
SET_BY_CHOICE = ("name", "kind")
ALL = "all"  # the topic of the complete help
MAX_CHOICES = 12  # names of a group that the one screen lists
SECTION_COLUMN = 20


Line = tuple[str, str]  # of the help: `key=default` or a choice, and its meaning


class Row(NamedTuple):
    """A key with its written value and its meaning; `section` describes the part of the configuration that it belongs to."""

    key: str
    value: str
    meaning: str
    section: str
    limits: str = ""

    @property
    def line(self) -> Line:
        return f"{self.key}={self.value}", self.meaning


def help_text(config_name: str, schema: type, arguments: Sequence[str]) -> str:
    """Returns the help of a command for the configuration composed from its arguments.

    Args:
        arguments: of the command line: overrides, and the topics, which have no `=`; options like `--help`, and sweeps, are
            ignored.

    Raises:
        HydraException, OmegaConfBaseException: an override is wrong.
        ConfigError: no group or key has the name of a topic.
    """
    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
        words = [word for word in arguments if not word.startswith("-")]
        parse = OverridesParser.create().parse_override
        topics = [word for word in words if "=" not in word and not word.startswith("~")]
        single_values = [word for word in words if word not in topics and not parse(word).is_sweep_override()]
        composed = hydra.compose(config_name, single_values, return_hydra_config=True)
    width = min(shutil.get_terminal_size(TERMINAL).columns, TERMINAL[0])
    template, chosen = str(composed.hydra.help.template), dict(composed.hydra.runtime.choices)
    chosen |= {POLICY_GROUP: list(composed.decode.policies)} if "decode" in composed else {}
    groups, rows = _groups(config_name), list(_rows(schema, composed, "", chosen))
    if topics and ALL not in topics:
        return "\n".join(_topic(topic, groups, rows, chosen, width) for topic in topics).rstrip()
    if topics:
        choices = "\n".join(_choices(group, chosen.get(group), width) for group in groups)
        keys = _table((row.line for row in rows), width)
    else:
        choices = _two_columns(((f"{group}=", _names(group, chosen.get(group))) for group in groups), width)
        keys = _sections(rows, width)
    return template.replace(CHOICES, choices).replace(KEYS, keys).rstrip()


# -- topics and the one screen -----------------------------------------------------------------------------------------


def _topic(topic: str, groups: Sequence[str], rows: Sequence[Row], chosen: Mapping[str, Any], width: int) -> str:
    """Returns the choices of a group and the keys below it, or the keys that have the topic as a part of their name."""
    found = [group for group in groups if f"{group}/".startswith(f"{topic}/")]
    dotted = topic.replace("/", ".")
    keys = [row for row in rows if f"{row.key}.".startswith(f"{dotted}.")]
    keys = keys or [row for row in rows if not found and f".{dotted}." in f".{row.key}."]
    if not found and not keys:
        names = dict.fromkeys([*groups, *(row.key for row in rows)])
        tails = {row.key.rpartition(".")[2]: row.key for row in reversed(rows)}
        near = did_you_mean(topic, [*names]) or did_you_mean(topic, [*tails])
        raise ConfigError(f"--help {topic}: no such group or key{near}; `--help` lists both, `--help all` describes them")
    shown = [_choices(group, chosen.get(group), width) for group in found]
    return "\n".join([*shown, _table([row.line for row in keys], width), *_limits(keys)]) + "\n"


def _limits(rows: Sequence[Row]) -> list[str]:
    """Returns what the only key allows; of several keys it would repeat their meanings."""
    return [f"{INDENT}{rows[0].limits}"] if len(rows) == 1 and rows[0].limits else []


def _names(group: str, chosen: Any) -> str:
    """Returns the names of the choices of a group, a star at those of this configuration; of a long list these alone."""
    marked, names = [chosen] if isinstance(chosen, str) else list(chosen or ()), group_choices(group)
    shown = [f"*{name}" if name in marked else name for name in names if len(names) <= MAX_CHOICES or name in marked]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more: --help {group}" if more else "")


def _sections(rows: Iterable[Row], width: int) -> str:
    """Returns every key with its value, by section; of keys that every label or policy has, the names alone."""
    sections: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        place, _, entry = row.key.rpartition(".")
        if place.startswith(f"{POLICY_OPTIONS}."):
            place, _, entry = place.rpartition(".")
        elif place.rpartition(".")[2] not in LABELS.values():
            entry = f"{entry}={row.value}"
        sections.setdefault((place, row.section), {})[entry] = None
    lines = []
    for (place, meaning), entries in sections.items():
        text = textwrap.shorten(meaning, width - len(INDENT) - SECTION_COLUMN, placeholder=" ...")
        lines += [f"{INDENT}{place + '.':{SECTION_COLUMN}}{text}".rstrip()] if place else []
        lines += _wrap(" ".join(entries), width, 2 * INDENT if place else INDENT)
    return "\n".join(lines)


def _two_columns(lines: Iterable[Line], width: int) -> str:
    """Returns a narrow column and a second one, which is wrapped."""
    indent = INDENT + " " * SECTION_COLUMN
    wrapped = [(left, _wrap(text, width, indent)) for left, text in lines]
    return "\n".join(f"{INDENT}{left:{SECTION_COLUMN}}" + "\n".join(texts).lstrip() for left, texts in wrapped) + "\n"


def _wrap(text: str, width: int, indent: str) -> list[str]:
    """Wraps at blanks only."""
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


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
            limits = "" if _allowed(kind) else allowed(field_types(part)[name])
            yield Row(key, _written(value), "; ".join(note for note in notes if note), first_sentence(schema.__doc__), limits)


def _is_group(kind: Any, key: str) -> bool:
    """Returns whether a key has keys of its own; they follow the others."""
    return dataclasses.is_dataclass(kind) or key in LABELS or key == POLICY_OPTIONS


def _policy_rows(key: str, given: Mapping[str, Any]) -> Iterator[Row]:
    """Yields a row per option of every policy; `given` has the options that the configuration sets."""
    for policy in POLICIES:
        own = given.get(policy) or {}
        for name, option in policy_options(policy).items():
            value = _written(own[name]) if name in own else option.default
            yield Row(f"{key}.{policy}.{name}", value, option.meaning.removesuffix("."), "Options of the policies")


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


def _table(rows: Iterable[Line], width: int, column: int = COLUMN) -> str:
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
