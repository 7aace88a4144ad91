"""The words of a command line: our short forms, options that are unknown, keys without effect."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig

from checkpoints.run_folder import is_run
from sage.io.files import config_dir
from sage.io.ranges import did_you_mean
from sage.io.target_paths import target_names
from train.config.resuming import own_choices
from train.config.schema import ConfigError, LaunchConfig
from train.config.store import BY_PATH, key_of

RESUME = "--resume"
WITHOUT_DASHES = ("target", "data", "draft", "checkpoint", "out", "action")
PATH_KEY = re.compile(r"(?:\A|\.)(?:path|dir|cache_dir|media_root|bad_list|draft|checkpoint|out|state)\Z")
PLAIN = re.compile(r"[A-Za-z0-9_/.+*?@%:~-]*")
SYNTAX = re.compile(r"\A[\['\"]|[,$]")  # of a list, a quoted text, a sweep, or an interpolation


def refuse_unknown_options(arguments: Sequence[str], schema: type, leading: Sequence[str] = ()) -> None:
    """Raises ConfigError with the first option that neither Hydra nor this command has; Hydra would print its usage, or guess.

    `leading` are options that the command takes as its first word only.
    """
    resume = [RESUME] if "run" in {field.name for field in fields(schema)} else []
    options = [*get_args_parser()._option_string_actions, "--version", "--debug", *resume]
    for option in (argument.partition("=")[0] for argument in arguments if argument.startswith("-")):
        if option in leading:
            raise ConfigError(f"{option}: has to be the first word; move it to the front")
        if option not in options:
            known = [name for name in (*options, *leading) if name.startswith("--")]
            if option.strip("-") in WITHOUT_DASHES:
                raise ConfigError(f"{option}: write {option.strip('-')}=VALUE, without dashes")
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
        if option != RESUME:
            words.append(argument)
            continue
        folder = folder if equals else next(rest, "")
        if not folder or folder.startswith("-"):
            raise ConfigError("--resume: missing folder; give --resume RUN")
        words += [f"run.dir={folder}", "run.resume=true"]
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
    """Quotes a path that Hydra's grammar would not read: with blanks, brackets, quotes, `=`, or letters beyond ASCII."""
    key, equals, value = word.partition("=")
    is_path = bool(PATH_KEY.search(key)) and value and not PLAIN.fullmatch(value)
    if not is_path or not (os.path.exists(os.path.expanduser(value)) or not SYNTAX.search(value)):
        return word
    return f"{key}='" + value.replace("'", "\\'").replace("${", "\\${") + "'"


def changed_command(arguments: Sequence[str], run_dir: str, change: str, suffix: str) -> str:
    """Returns the command of a run, from its `sys.argv`, with one `key=value` changed and `-suffix` at the end of its folder.

    The arguments of a sweep, a resumed run or another program are not repeated.
    """
    changed = f"{change} run.dir={shlex.quote(run_dir.rstrip('/') + f'-{suffix}')}"
    program, *words = arguments or [""]
    is_known = Path(program).name == "sage-train" or program.endswith("train/cli/train.py")
    options = {word.partition("=")[0] for word in words if word.startswith("-")}
    if not is_known or options - {"--debug"} or "run.resume=true" in words:
        return f"sage-train ... {changed}"
    replaced = ("run.dir", "run.name", key_of(change))
    kept = (shlex.quote(word) for word in words if key_of(word) not in replaced)
    return " ".join(["sage-train", *kept, changed])


def task_overrides() -> list[str]:
    """Returns the overrides of this process's command line, `key=value`; empty if Hydra does not run it."""
    return list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []


def refuse_unused(overrides: Sequence[str], unused: Mapping[str, str]) -> None:
    """Raises ConfigError with the first override that has no effect.

    `unused` has dotted keys, or prefixes that end in a dot -> where the key has no effect, and the remedy.
    """
    for override in overrides:
        for key, reason in unused.items():
            if key_of(override) == key or (key.endswith(".") and key_of(override).startswith(key)):
                raise ConfigError(f"{override}: has no effect {reason}")


def launch_keys(*used: str) -> list[str]:
    """Returns the keys of `launch` except `used`."""
    return [f"launch.{field.name}" for field in fields(LaunchConfig) if field.name not in used]
