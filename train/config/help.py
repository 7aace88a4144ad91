"""`--help` of the commands that Hydra composes.

    --help            one screen: usage, the names of all choices, all keys with their values
    --help GROUP|KEY  choices and keys of a group, or one key, with their meanings
    --help all        the choices of every group, and every key with its value and meaning

Shows the configuration that the other words of the command line compose: `sage-train draft=eagle --help`. Imports no torch.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sage.io.files import config_dir
from sage.io.ranges import allowed, did_you_mean, plain_type
from train.config.schema import ConfigError
from train.config.store import LABEL, POLICY_GROUP, choice_meaning, group_choices, group_of, keys_of

INDENT, TERMINAL = "  ", (128, 24)
CHOICE_COLUMN, KEY_COLUMN, NAME_COLUMN = 24, 42, 20  # widths of the first column
UNLIMITED = (str, bool, dict[str, Any])  # types that a meaning need not state
ALL = "all"  # the topic of the complete help
MAX_CHOICES, MAX_PATH = 12, 40  # names of a group, and characters of a path, that the one screen shows


class Row(NamedTuple):
    """A key, written with its value if this configuration has it, and its meaning; `section` is what its parent is about."""

    key: str
    written: str
    meaning: str
    section: str

    @property
    def parent(self) -> str:
        return self.key.rpartition(".")[0]


def help_text(config_name: str, schema: type, arguments: Sequence[str]) -> str:
    """Returns the help of a command for the configuration composed from its arguments: overrides, and topics without `=`."""
    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
        words = [word for word in arguments if not word.startswith("-")]
        parse = OverridesParser.create().parse_override
        topics = [word for word in words if "=" not in word and not word.startswith("~")]
        single_values = [word for word in words if word not in topics and not parse(word).is_sweep_override()]
        composed = hydra.compose(config_name, single_values, return_hydra_config=True)
    width = min(shutil.get_terminal_size(TERMINAL).columns, TERMINAL[0])
    runtime = composed.hydra.runtime.choices
    chosen = {group: [choice] if isinstance(choice, str) else choice for group, choice in runtime.items()}
    chosen |= {POLICY_GROUP: composed.decode.policies} if "decode" in composed else {}
    listed: Any = OmegaConf.to_container(OmegaConf.load(config_dir() / f"{config_name}.yaml"))
    named = [group for entry in listed["defaults"] if isinstance(entry, dict) for group in entry]
    groups = [group for group in (*named, *([POLICY_GROUP] if "decode" in named else ())) if len(group_choices(group)) > 1]
    rows = list(_rows(schema, composed))
    if topics and ALL not in topics:
        return "\n".join(_topic(topic, groups, rows, chosen, width) for topic in topics).rstrip()
    if topics:
        choices, keys = "\n".join(_choices(group, chosen, width) for group in groups), _keys(rows, width)
    else:
        names = ((f"{group}=", _names(group, chosen)) for group in groups)
        choices, keys = _table(names, width, NAME_COLUMN) + "\n", _sections(rows, width)
    template = str(composed.hydra.help.template)  # with placeholders of Hydra
    return template.replace("$APP_CONFIG_GROUPS", choices).replace("$CONFIG", keys).rstrip()


def _topic(topic: str, groups: Sequence[str], rows: Sequence[Row], chosen: Mapping[str, Any], width: int) -> str:
    """Returns the choices of a group and the keys below it, or the keys that have the topic as a part of their name."""
    shown = [group for group in groups if f"{group}/".startswith(f"{topic}/")]
    dotted = topic.replace("/", ".")
    keys = [row for row in rows if f"{row.key}.".startswith(f"{dotted}.")]
    keys = keys or [row for row in rows if not shown and f".{dotted}." in f".{row.key}."]
    if not shown and not keys:
        names = dict.fromkeys([*groups, *(row.key for row in rows)])
        tails = {row.key.rpartition(".")[2]: row.key for row in reversed(rows)}
        near = did_you_mean(topic, [*names]) or did_you_mean(topic, [*tails])
        raise ConfigError(f"--help {topic}: no such group or key{near}; `--help` lists both, `--help all` describes them")
    return "\n".join([*(_choices(group, chosen, width) for group in shown), _keys(keys, width)]) + "\n"


# -- choices -----------------------------------------------------------------------------------------------------------


def _names(group: str, chosen: Mapping[str, Any]) -> str:
    """Returns the names of the choices of a group, a star at those of this configuration; of a long list these alone."""
    marked, names = chosen.get(group) or (), group_choices(group)
    shown = [f"*{name}" if name in marked else name for name in names if len(names) <= MAX_CHOICES or name in marked]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more: --help {group}" if more else "")


def _choices(group: str, chosen: Mapping[str, Any], width: int) -> str:
    """Returns the choices of a group with their meanings; a star marks those of this configuration."""
    marked = chosen.get(group) or ()
    rows = ((f"{'*' if name in marked else ' '} {name}", choice_meaning(group, name)) for name in group_choices(group))
    return f"{INDENT}{group}=\n{_table(rows, width, CHOICE_COLUMN)}\n"


# -- keys --------------------------------------------------------------------------------------------------------------


def _rows(schema: type, composed: Any) -> Iterator[Row]:
    """Yields a row per key of a schema, with its value in the composed configuration, else its default."""
    for name, key in keys_of(schema).items():
        only = f"only with {group_of(name.rpartition('.')[0])}={'|'.join(key.choices)}" if key.choices else ""
        limits = allowed(key.hint).removeprefix("give ") if plain_type(key.hint) not in UNLIMITED else ""
        value = _value(composed, name, key.default)
        is_of_other_choice = bool(key.choices) and value == MISSING
        written = name if is_of_other_choice else f"{name}={_written(value)}"
        yield Row(name, written, "; ".join(filter(None, (key.meaning, limits, only))), key.section)


def _value(composed: Any, name: str, default: Any) -> Any:
    """Returns a resolved value; as it is written if it refers to a key that is missing."""
    parent, _, last = name.rpartition(".")
    values = OmegaConf.select(composed, parent) if parent else composed
    if values is None or last not in set(values):
        return default
    try:
        return MISSING if OmegaConf.is_missing(values, last) else values[last]
    except OmegaConfBaseException:
        return OmegaConf.to_container(values, resolve=False)[last]  # type: ignore[call-overload,index]


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


def _keys(rows: Iterable[Row], width: int) -> str:
    """Returns the keys with value and meaning; a blank line separates the sections."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for row in rows:
        sections.setdefault(row.parent, []).append((row.written, row.meaning))
    return "\n\n".join(_table(lines, width, KEY_COLUMN) for lines in sections.values())


def _sections(rows: Iterable[Row], width: int) -> str:
    """Returns every key with its value, by section; of keys that every label has, the names alone."""
    sections: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        key, equals, value = row.written.removeprefix(f"{row.parent}.").partition("=")
        if value.startswith("/") and len(value) > MAX_PATH:  # the length of the screen must not depend on the package's place
            value = f".../{value.rpartition('/')[2]}"
        entry = key if row.parent.endswith(LABEL) else f"{key}{equals}{value}"
        sections.setdefault((row.parent, row.section), {})[entry] = None
    lines = []
    for (parent, meaning), entries in sections.items():
        title = textwrap.shorten(meaning, width - len(INDENT) - NAME_COLUMN, placeholder=" ...")
        lines += [_table([(f"{parent}.", title)], width, NAME_COLUMN)] if parent else []
        lines += _wrap(" ".join(entries), width, 2 * INDENT if parent else INDENT)
    return "\n".join(lines)


def _table(rows: Iterable[tuple[str, str]], width: int, column: int) -> str:
    """Returns the rows in two columns of `width` characters together, the second one wrapped; a long name has its own line."""
    lines: list[str] = []
    for left, text in rows:
        wrapped = _wrap(text, width, INDENT + " " * column)
        name = f"{INDENT}{left}"
        if len(left) < column and wrapped:
            name = f"{INDENT}{left:{column}}{wrapped.pop(0).lstrip()}"
        lines += [name, *wrapped]
    return "\n".join(lines)


def _wrap(text: str, width: int, indent: str) -> list[str]:
    """Wraps at blanks only."""
    width = max(width, len(indent) + 24)
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )
