"""The words of a command line: short forms, unknown options and keys, keys without effect; Hydra's errors as one line."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf import errors as oc

from checkpoints.run_folder import is_run
from sage.io.files import config_dir
from sage.io.ranges import allowed, did_you_mean, field_types, plain_type
from sage.io.target_paths import target_names
from train.config.resuming import own_choices
from train.config.schema import ConfigError, LaunchConfig
from train.config.store import BY_PATH, LABEL, group_choices, group_of, key_of, keys_of

RESUME = "--resume"
GROUPS = ("target", "data", "draft")
PATH_KEY = re.compile(r"(?:\A|\.)(?:path|dir|cache_dir|media_root|bad_list|draft|checkpoint|out|state)\Z")
PLAIN = re.compile(r"[A-Za-z0-9_/.+*?@%:-]*")
SYNTAX = re.compile(r"\A[\['\"]|[,$]")  # of a list, a quoted text, a sweep, or an interpolation
MAX_LISTED = 30
SOURCE = re.compile(r"^data\.(?:sources|validation)\.[^.]+")  # of data, with the label that the user chose
TYPO = 0.8  # similarity of a key and the one that was meant; below, other relations come first
PLUGINS = {  # choices that need a package
    "hydra/sweeper/optuna": "hydra-optuna-sweeper",
    "hydra/launcher/submitit_slurm": "hydra-submitit-launcher",
    "hydra/launcher/submitit_local": "hydra-submitit-launcher",
}


def refuse_unknown_options(arguments: Sequence[str], schema: type, leading: Sequence[str] = ()) -> None:
    """Raises ConfigError with the first option that neither Hydra nor this command has; `leading` ones only come first."""
    resume = [RESUME] if "run" in {field.name for field in fields(schema)} else []
    options = [*get_args_parser()._option_string_actions, "--debug", *resume]
    for option in (argument.partition("=")[0] for argument in arguments if argument.startswith("-")):
        if option in leading:
            raise ConfigError(f"{option}: has to be the first word; move it to the front")
        if option not in options:
            known = [name for name in (*options, *leading) if name.startswith("--")]
            name = option.strip("-").replace("-", "_")
            keys = [key for key in (*GROUPS, *keys_of(schema)) if name in (key, key.rpartition(".")[2])]
            if name in GROUPS or len(keys) == 1:
                raise ConfigError(f"{option}: write {keys[0]}=VALUE, without dashes")
            raise ConfigError(f"{option}: unknown option{did_you_mean(option, known)}; allowed: {', '.join(known)}")


def expand(arguments: Sequence[str], schema: type | None = None) -> list[str]:
    """Returns the words of a command line with our short forms written out as overrides that Hydra composes.

        --resume RUN       run.dir=RUN run.resume=true
        RUN, draft=DIR     checkpoint=RUN, checkpoint=DIR, for a `schema` with this key
        data=FILE          data=auto data.path=FILE, as for data.path=FILE without a choice of data
        target.path=NAME   target=NAME, for a name of conf/target
        target.path=DIR    target=by_path target.path=DIR, unless a target is chosen: name and precision are the folder's own
        run.resume=true    the run's choices of groups whose choices have different keys, unless given

    Raises:
        ConfigError: `--resume` without a folder, or the configuration of the run to resume cannot be read.
    """
    words = _with_choices(_with_resume(arguments))
    if schema is not None and "checkpoint" in {field.name for field in fields(schema)}:
        words = [f"checkpoint={word}" if "=" not in word and is_run(Path(word)) else word for word in words]
        words = [re.sub(r"\Adraft=", "checkpoint=", word) for word in words]
    return [*own_choices(dict(word.partition("=")[::2] for word in words)), *map(_quoted, words)]


def _with_resume(arguments: Sequence[str]) -> list[str]:
    words: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        option, equals, folder = argument.partition("=")
        if option == RESUME:
            folder = folder if equals else next(rest, "")
            if not folder or folder.startswith("-"):
                raise ConfigError("--resume: missing folder; give --resume RUN")
        words += [f"run.dir={folder}", "run.resume=true"] if option == RESUME else [argument]
    return words


def _with_choices(arguments: Sequence[str]) -> list[str]:
    """Writes a path in place of a choice of data or of a target as its path, and the choice that it needs before it."""
    words = []
    for word in arguments:
        key, _, value = word.partition("=")
        is_path = ("/" in value or os.path.exists(value)) and not (config_dir() / key / f"{value}.yaml").exists()
        words.append(f"{key}.path={value}" if key in ("data", "target") and is_path else word)
    keys = {key_of(word) for word in words}
    has_data = bool({"data", "run.resume"} & keys) or any(key.startswith("data.sources.") for key in keys)
    overrides: list[str] = []
    for word in words:
        key, value = key_of(word), word.partition("=")[2]
        if key == "data.path" and not has_data and "data=auto" not in overrides:
            overrides.append("data=auto")
        if key == "target.path" and "target" not in keys:
            is_name = value in target_names() and not os.path.exists(value)
            overrides += [f"target={value}"] if is_name else [word] if BY_PATH in overrides else [BY_PATH, word]
        else:
            overrides.append(word)
    return overrides


def _quoted(word: str) -> str:
    """Quotes a path that Hydra's grammar would not read: with blanks, brackets, quotes, `=`, or letters beyond ASCII.

    A ~ stands for the home folder, which a shell does not expand after `=`.
    """
    key, equals, value = word.partition("=")
    if not equals or not PATH_KEY.search(key):
        return word
    value = os.path.expanduser(value)
    if PLAIN.fullmatch(value) or (SYNTAX.search(value) and not os.path.exists(value)):
        return f"{key}={value}"
    escaped = re.sub(r"(\\*)('|\Z)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), value)  # as Hydra reads them
    return f"{key}='" + escaped.replace("${", "\\${") + "'"


def changed_command(arguments: Sequence[str], run_dir: str, change: str, suffix: str) -> str:
    """Returns the command of a run, from its `sys.argv`, with a `key=value` changed and `-suffix` at the end of its folder."""
    changed = f"{change} run.dir={shlex.quote(run_dir.rstrip('/') + f'-{suffix}')}"
    program, *words = arguments or [""]
    is_known = Path(program).name == "sage-train" or program.endswith("train/cli/train.py")
    options = {word.partition("=")[0] for word in words if word.startswith("-")}
    if not is_known or options - {"--debug"} or "run.resume=true" in words:  # another program, a sweep, a resumed run
        return f"sage-train ... {changed}"
    replaced = ("run.dir", "run.name", key_of(change))
    kept = (shlex.quote(word) for word in words if key_of(word) not in replaced)
    return " ".join(["sage-train", *kept, changed])


def task_overrides() -> list[str]:
    """Returns the overrides of this process's command line, `key=value`; empty if Hydra does not run it."""
    return list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []


def refuse_unused(overrides: Sequence[str], unused: Mapping[str, str]) -> None:
    """Raises ConfigError with the first override of `unused`: dotted keys, or prefixes that end in a dot -> where, remedy."""
    for override in overrides:
        for key, reason in unused.items():
            if key_of(override) == key or (key.endswith(".") and key_of(override).startswith(key)):
                raise ConfigError(f"{override}: has no effect {reason}")


def launch_keys(*used: str) -> list[str]:
    """Returns the keys of `launch` except `used`."""
    return [f"launch.{field.name}" for field in fields(LaunchConfig) if field.name not in used]


# -- errors of Hydra and OmegaConf: dotted key, value, allowed values, remedy ---------------------------------------------


def as_mistake(error: Exception, schema: type) -> Exception:
    """Returns an error of Hydra or OmegaConf as a ConfigError of one line, and any other error as it is."""
    if not isinstance(error, (HydraException, oc.OmegaConfBaseException)):
        return error
    if isinstance(error, MissingConfigException):
        return ConfigError(_missing_choice(error.missing_cfg_file or ""))
    if isinstance(error, OverrideParseException):
        forms = "write key=value, lists as key=[a,b], other signs as \"key='it\\'s'\", no spaces around ="
        return ConfigError(f"{error.override}: is not an override; {forms}")
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, oc.OmegaConfBaseException):
        cause = cause.__cause__
    if cause is not None:
        return ConfigError(_explain_omegaconf(cause, str(error), schema))
    text = str(error)
    if group := re.search(r"Could not override '(.*?)'\.\s*No match in the defaults list", text):
        return ConfigError(f"{group.group(1)}: no such group of choices; `--help` lists groups and keys")
    if word := re.search(r"Ambiguous value for argument '(.*)'\n", text):
        return ConfigError(f"{word[1]}: a list is key=[a,b], a text with commas \"key='a,b'\", a sweep -m key=a,b")
    key = re.search(r"Could not override '(.*?)'", text) or re.search(r"Key '(.*?)' is not in struct", text)
    return ConfigError(f"{key.group(1)}: unknown key" if key else text)


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
    hints = field_types(schema)
    for name in composed:
        if name not in hints:
            raise ConfigError(unknown_key(prefix + str(name), root or schema))
        child = composed._get_node(name)
        object_type = OmegaConf.get_type(child)
        if is_dataclass(object_type):
            refuse_unknown(child, object_type, f"{prefix}{name}.", root or schema)


def _allowed(schema: type, key: str) -> str:
    """Returns what a key allows; of an item of a list, what the list allows."""
    name = re.sub(r"\[\d+\]", "", SOURCE.sub(f"data.sources.{LABEL}", key))
    known = keys_of(schema).get(name)
    return "--help describes the keys" if known is None else allowed(known.hint)


def _nearest_key(key: str, known: list[str]) -> str:
    """Returns the hint for an unknown key: a misspelt one, an abbreviated or spelt-out one, or one of another group."""
    parent, _, name = key.rpartition(".")
    if not difflib.get_close_matches(key, known, n=1, cutoff=TYPO):
        last_names = {other: other.rpartition(".")[2] for other in known}
        alike = [other for other, last in last_names.items() if _initials(name) == last or _initials(last) == name]
        siblings = [other for other in alike if other.rpartition(".")[0] == parent]
        same_name = [other for other, last in last_names.items() if last == name]
        if related := [*siblings, *same_name, *alike]:
            return f" (did you mean {related[0]}?)"
    return did_you_mean(key, known)


def _initials(name: str) -> str:
    """Returns `lr` of `learning_rate`."""
    return "".join(word[:1] for word in name.split("_")) if "_" in name else ""
