"""Errors of Hydra and OmegaConf as one line: dotted key, value, allowed values, remedy."""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from typing import Any

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import errors as oc

from sage.io.ranges import allowed, did_you_mean, plain_type
from train.config.schema import ConfigError
from train.config.store import LABEL, group_choices, group_of, keys_of

MAX_LISTED = 30
SOURCE = re.compile(r"^data\.(?:sources|validation)\.[^.]+")  # of data, with the label that the user chose
TYPO = 0.8  # similarity of a key and the one that was meant; below, other relations come first
PLUGINS = {  # choices that need a package
    "hydra/sweeper/optuna": "hydra-optuna-sweeper",
    "hydra/launcher/submitit_slurm": "hydra-submitit-launcher",
    "hydra/launcher/submitit_local": "hydra-submitit-launcher",
}


def as_mistake(error: Exception, schema: type) -> Exception:
    """Returns an error of Hydra or OmegaConf as a ConfigError of one line, and any other error as it is."""
    if not isinstance(error, (HydraException, oc.OmegaConfBaseException)):
        return error
    if isinstance(error, MissingConfigException):
        return ConfigError(_missing_choice(error.missing_cfg_file or ""))
    if isinstance(error, OverrideParseException):
        return ConfigError(f"{error.override}: is not an override; write key=value, lists as key=[a,b], no spaces around =")
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, oc.OmegaConfBaseException):
        cause = cause.__cause__
    return ConfigError(_explain_hydra(str(error)) if cause is None else _explain_omegaconf(cause, str(error), schema))


def _missing_choice(name: str) -> str:
    group, _, choice = name.rpartition("/")
    if name in PLUGINS:
        return f"{name}: its package is not installed; pip install 'sage-draft[sweep]' ({PLUGINS[name]})"
    options = group_choices(group)
    if not group or not options:
        return f"{name}: no such configuration file"
    hint = "; or give any local folder as target.path=DIR" if group == "target" else ""
    return f"{group}={choice}: no such choice{did_you_mean(choice, options, group + '=')}; allowed: {', '.join(options)}{hint}"


def _explain_omegaconf(error: oc.OmegaConfBaseException, outer: str, schema: type) -> str:
    key, first_line = str(error.full_key or error.key or ""), str(error).strip().splitlines()[0]
    override = re.search(r"(?:override|Could not override) '?([\w./@]+)", outer)
    if override and override.group(1).startswith(key):
        key = override.group(1)
    last_name = (re.findall(r"[\w.]+", first_line) or [""])[-1]
    if isinstance(error, oc.MissingMandatoryValue):
        key = key or last_name
        return f"{key}: missing; give {key}=VALUE, {_allowed(schema, key).removeprefix('give ')}"
    if isinstance(error, (oc.ConfigKeyError, oc.ConfigAttributeError)):
        return unknown_key(key, schema)
    if isinstance(error, oc.InterpolationToMissingValueError):
        quoted = re.search(r"'([^']+)'", first_line)
        missing = quoted.group(1) if quoted else last_name
        return f"{key}: refers to {missing}, which is missing; give {missing}=VALUE"
    if isinstance(error, oc.GrammarParseError | oc.InterpolationResolutionError):
        return f"{key}: {first_line}"
    value = re.search(r"Value '(.*?)'(?: of type| \()", str(error)) or re.search(r"Invalid value '(.*?)'", str(error))
    shown = f"={value.group(1)}" if value else ""
    return f"{key}{shown}: wrong type; {_allowed(schema, key)}"


def _explain_hydra(text: str) -> str:
    if group := re.search(r"Could not override '(.*?)'\.\s*No match in the defaults list", text):
        return f"{group.group(1)}: no such group of choices; `--help` lists groups and keys"
    key = re.search(r"Could not override '(.*?)'", text) or re.search(r"Key '(.*?)' is not in struct", text)
    return f"{key.group(1)}: unknown key" if key else text


def unknown_key(key: str, schema: type) -> str:
    """Returns the message for a key that the schema does not have, or that belongs to another choice of its group."""
    known = keys_of(schema)
    parent = key.rpartition(".")[0]
    if key in known:
        group = group_of(parent)
        return f"{key}: not a key of the chosen {group}; it belongs to {group}={'|'.join(known[key].choices)}"
    if parent in known and plain_type(known[parent].hint) == dict[str, Any]:
        return f"{key}: not set by any choice, so it has to be added as +{key}=VALUE"
    names = sorted({".".join(parts[:end]) for parts in (name.split(".") for name in known) for end in range(1, len(parts) + 1)})
    siblings = [name for name in names if name.rpartition(".")[0] == parent] or [name for name in names if "." not in name]
    return f"{key}: unknown key{_nearest_key(key, names)}; allowed: {', '.join(siblings[:MAX_LISTED])}"


def refuse_unknown(composed: Any, schema: type, prefix: str = "", root: type | None = None) -> None:
    """Raises ConfigError with the first key added with `+` that the schema lacks; OmegaConf accepts them silently."""
    hints = typing.get_type_hints(schema)
    for name in composed:
        if name not in hints:
            raise ConfigError(unknown_key(prefix + str(name), root or schema))
        child = composed._get_node(name)
        object_type = getattr(child, "_metadata", None) and child._metadata.object_type
        if dataclasses.is_dataclass(object_type):
            refuse_unknown(child, typing.cast(type, object_type), f"{prefix}{name}.", root or schema)


def _allowed(schema: type, key: str) -> str:
    """Returns what a key allows; of an item of a list, what the list allows."""
    name = re.sub(r"\[\d+\]", "", SOURCE.sub(f"data.sources.{LABEL}", key))
    known = keys_of(schema).get(name)
    return "--help describes the keys" if known is None else allowed(known.hint)


def _nearest_key(key: str, known: list[str]) -> str:
    """Returns the hint for an unknown key: a misspelt one, an abbreviated or spelt-out one, or one of another group."""
    parent, _, name = key.rpartition(".")
    if not difflib.get_close_matches(key, known, n=1, cutoff=TYPO):
        alike = [other for other in known if _is_abbreviation(name, other.rpartition(".")[2])]
        same_name = [other for other in known if other.rpartition(".")[2] == name]
        siblings = [other for other in alike if other.rpartition(".")[0] == parent]
        if related := [*siblings, *same_name, *alike]:
            return f" (did you mean {related[0]}?)"
    return did_you_mean(key, known)


def _is_abbreviation(name: str, other: str) -> bool:
    """Whether one name has the initials of the other: `lr` and `learning_rate`."""
    initials = ["".join(word[:1] for word in words.split("_")) for words in (name, other)]
    return "_" in name + other and (initials[0] == other or initials[1] == name)
