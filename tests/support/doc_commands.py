"""Checks of a documented command without executing it: its options are parsed, its configuration is composed."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from support.doc_pages import ROOT, blocks, spans

import sage
from checkpoints.export.formats.registry import FORMATS
from sage.io.files import config_dir
from sage.planning.options import defaults
from sage.training.scripts import FUNCTIONS
from train.cli.data import DataCommand
from train.config.checks import check
from train.config.help import help_text
from train.config.hydra_app import compose, register_resolvers
from train.config.schema import Config, ValidateConfig
from train.config.store import group_choices, register

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ENTRY_POINTS: dict[str, str] = {  # modules that are the commands when they are run
    name: FUNCTIONS.get(name, entry).partition(":")[0] for name, entry in PROJECT["scripts"].items()
}
COMPOSED = {
    "sage-train": ("config", Config),
    "sage-validate": ("validate", ValidateConfig),
    "sage-data": ("prepare", DataCommand),
}
COMMANDS = (*ENTRY_POINTS, "python", "make", "pip")
LAUNCHERS = {"deepspeed": "deepspeed.launcher.runner", "torch.distributed.run": "torch.distributed.run"}
RECORDED = (*COMMANDS, "deepspeed", "srun", "scontrol", "vllm", "curl")
RECORDERS = "".join(f"{name}() {{ printf '%q ' {name} \"$@\" >&3; echo >&3; }}\n" for name in RECORDED)
PLACEHOLDERS = ("DIR", "FILE", "RUN", "TARGET")
WITH_VALUE = ("--draft", "--inspect", "--serve-check", "--check")  # options that the text names without their value
SETTING = re.compile(r"\+?[a-z_]+([./@][a-z_0-9]+)*=\S*")
ADDED_TEST = re.compile(r"vipllava")  # of the family that a reader adds
CONTEXTS = [  # choices that have keys of their own
    [],
    ["draft=eagle"],
    ["draft=block"],
    ["draft=model", "draft.num_layers=2"],
    ["draft=eagle", "draft/compressor=select"],
    ["tracking=wandb"],
    ["+data/validation=textvqa"],
]
PARSER = OverridesParser.create()


def make_placeholders(folder: Path) -> None:
    """Creates what the placeholders of the pages stand for, with as little content as the checks need."""
    target = ROOT / "data_prep/pocket/targets/pocket_qwen2_5_vl"
    for name in PLACEHOLDERS:
        (folder / name).symlink_to(target / "config.json" if name == "FILE" else target)


def command_lines(script: str) -> list[list[str]]:
    """Returns the arguments of every command that bash would call for `script`, by running it with recorders in their place.

    Raises:
        AssertionError: bash calls anything else, or does not understand the script.
    """
    recording = f'PATH=; exec 3>&1\n{RECORDERS}which() {{ echo "$1"; }}\n{script}'
    done = subprocess.run(["bash", "-c", recording], env={"LC_ALL": "C.UTF-8"}, capture_output=True, text=True)
    assert not done.stderr, f"{done.stderr.strip()}\n{script}"
    return [shlex.split(line) for line in done.stdout.splitlines()]


def check_blocks(page: str) -> None:
    """Raises AssertionError if a block has no command, or a command has an unknown option, key or value.

    Commands that Hydra composes check these themselves where a block is executed; others take abbreviated options.
    """
    for block in blocks(page):
        if block.language == "bash":
            calls = command_lines(block.text)
            assert calls, f"{block.place}: no command"
            for call in calls if block.reason else [call for call in calls if call[0] not in COMPOSED]:
                _guard(f"{block.place}: {shlex.join(call)}", check_call, call)


def check_text(page: str) -> None:
    """Raises AssertionError if a code span has an unknown command, option, key or value."""
    for place, span in spans(page):
        words = shlex.split(re.sub(r"\[(--[^]]*)\]", r"\1", span)) if span.count("'") % 2 == 0 else []
        if words and words[0] in COMMANDS:
            _guard(place, check_call, words if words[-1] not in WITH_VALUE else [*words, "DIR"])
        elif words and all(_is_setting(word) for word in words):
            _guard(place, check_settings, words)


def _guard(place: str, check: Callable[[list[str]], None], words: list[str]) -> None:
    try:
        check(words)
    except (Exception, SystemExit) as error:
        raise AssertionError(f"{place}: {error!r}") from error


def _is_setting(word: str) -> bool:
    """Whether a word is an override, not a Python argument: its key is dotted or a group of choices."""
    key = word.lstrip("+").split("=")[0]
    return bool(SETTING.fullmatch(word)) and ("." in key or "/" in key or (ROOT / "conf" / key).is_dir())


def check_call(call: Sequence[str]) -> None:
    """Checks one command, given by its arguments; `...` stands for arguments that the page leaves out.

    Raises:
        AssertionError, ValueError, SystemExit: an unknown option or key, a value that is not allowed, or a missing file.
    """
    name, *words = (word for word in call if not word.endswith("..."))
    if not words:
        assert name in RECORDED, f"{name}: not a command of this project"
    elif name in COMPOSED and words[0] != "--compare":
        _compose(name, words)
    elif name in ENTRY_POINTS:
        _parse(ENTRY_POINTS[name], words)
    elif name in LAUNCHERS or name == "srun":
        if name in LAUNCHERS:
            _parse(LAUNCHERS[name], words)
        check_call(words[next(number for number, word in enumerate(words) if word in ENTRY_POINTS) :])
    elif name == "make":
        arguments = [re.sub("^results-NAME$", "results-quick", word) for word in words]
        subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, capture_output=True, check=True)
    elif name == "pip":
        extras = {extra for word in words for extra in re.findall(r"\[(\w+)\]", word)}
        assert extras <= set(PROJECT["optional-dependencies"]), extras
    elif name == "python" and words[0] == "-m":
        _check_module(words[1], words[2:])
    elif name == "python":
        assert (ROOT / words[0]).is_file(), f"{words[0]}: no such file"
    elif name == "vllm":
        _check_vllm(words)


def _check_module(module: str, words: list[str]) -> None:
    """Checks the arguments of `python -m MODULE`."""
    if module in LAUNCHERS:
        check_call([module, *words])
    elif module == "pytest":
        files = [word.split("::")[0] for word in words if not word.startswith("-") and not ADDED_TEST.search(word)]
        assert all((ROOT / file).exists() for file in files), files
    elif module.startswith("vllm"):
        _check_vllm(words)
    elif not module.startswith("sglang"):
        spec = find_spec(module)
        assert spec, f"{module}: no such module"
        if words:
            _parse(f"{module}.__main__" if spec.submodule_search_locations is not None else module, words)


def _check_vllm(words: list[str]) -> None:
    if "--speculative-config" in words:
        settings = json.loads(words[words.index("--speculative-config") + 1])
        assert {"method", "model", "num_speculative_tokens"} <= set(settings), "--speculative-config: a key is missing"


# -- options parsed by argparse ----------------------------------------------------------------------------------------


class _Parsed(BaseException):
    """Ends a command whose arguments are parsed: `args` has them, and those that are unknown to the parser."""


def _parse(module: str, words: list[str]) -> None:
    """Runs the `main` of a module until its arguments are parsed; what its parser does not know may be settings to compose."""
    known, depth = argparse.ArgumentParser.parse_known_args, 0

    def parse_known_args(self: argparse.ArgumentParser, *args: object) -> Any:
        nonlocal depth
        depth += 1
        found = known(self, *args)  # calls itself for a subcommand
        depth -= 1
        if not depth:
            raise _Parsed(*found)
        return found

    no_abbreviations = patch.object(argparse.ArgumentParser, "_get_option_tuples", lambda self, option: [])
    stop = patch.object(argparse.ArgumentParser, "parse_known_args", parse_known_args)
    try:
        with stop, no_abbreviations, patch.object(sys, "argv", [module, *words]):
            importlib.import_module(module).main()
    except _Parsed as parsed:
        args, rest = parsed.args
        if module == ENTRY_POINTS["sage-generate"]:
            sage.policy(args.policy)
        assert getattr(args, "format", None) in (None, *FORMATS), args.format
        if rest and module.startswith("benchmarks.training"):
            return _compose("sage-train", rest)
        assert not rest, f"{module}: unknown arguments {rest}"
    else:
        raise AssertionError(f"{module}: parses no arguments")


# -- settings composed by Hydra ----------------------------------------------------------------------------------------


def _compose(name: str, words: list[str]) -> None:
    """Composes the configuration of a command, and checks it."""
    parser = get_args_parser()
    parser.add_argument("--resume")
    parser.add_argument("--debug", action="store_true")
    args = parser.parse_intermixed_args([word for word in words if word != "--version"])
    if args.help:
        register()
        register_resolvers()
        help_text(*COMPOSED[name], args.overrides)  # refuses an unknown topic
        return
    overrides = [] if args.shell_completion else args.overrides
    if args.multirun:
        check_settings(overrides)
        overrides = list(_first_job(overrides))
    if name == "sage-validate":
        overrides = [re.sub("^draft=", "checkpoint=", word) for word in overrides]
    ConfigStore.instance().store(name="prepare_schema", node=DataCommand)
    config = compose(COMPOSED[name][0], overrides, COMPOSED[name][1])
    if name == "sage-train":
        config.launch.plan = True  # a plan opens no data and checks no run folder
        check(config)


def _first_job(words: list[str]) -> Iterator[str]:
    """Yields the overrides of a sweep's first job, without those of plugins of Hydra that are not installed."""
    for override in PARSER.parse_overrides(words):
        key = override.key_or_group
        if key != "sweep" and not key.startswith("hydra."):
            yield f"{key}={_values(override)[0]}" if override.is_sweep_override() else override.input_line


def _values(override: Override) -> list[Any]:
    """Returns the values of an override: one, those of a list or of a sweep, or the start of an interval."""
    value: Any = override.value()
    if override.is_interval_sweep():
        return [value.start]
    if override.is_sweep_override():
        return list(override.sweep_string_iterator())
    return value if isinstance(value, list) else [value]


def check_settings(words: Sequence[str]) -> None:
    """Checks overrides quoted in the text: a command has these keys and takes these values.

    Raises:
        AssertionError: no command accepts one of them.
    """
    words = [word for word in words if not re.search(r"=$|\.\.\.$", word)]
    words = [re.sub(r"[|]\w.*$|\.\.zero3$", "", word) for word in words]  # the first of several choices
    for override in PARSER.parse_overrides([re.sub(r"=[NK]$", "=2", word) for word in words]):
        key, values = override.key_or_group, _values(override)
        if choices := group_choices(key):
            assert {*values} <= {*choices, "NAME"}, f"{key}: {choices}"
        elif key.startswith("decode.options."):
            policy, option = key.removeprefix("decode.options.").split(".")
            assert option in defaults(sage.trees.policy_class(policy)), f"{policy}: no option {option}"
        elif not key.startswith("hydra"):  # keys of plugins
            _check_value(key, values[0] if override.is_sweep_override() else override.value(), override.is_add())


def _check_value(key: str, value: object, is_add: bool) -> None:
    errors = []
    for config in _composed():
        try:
            return OmegaConf.update(config.copy(), key, value, force_add=is_add)
        except OmegaConfBaseException as error:
            errors.append(str(error))
    raise AssertionError(f"{key}: {errors[0]}")


@cache
def _composed() -> list[DictConfig]:
    """The configuration of every command, and of `sage-train` with every choice that has keys of its own."""
    register()
    register_resolvers()
    ConfigStore.instance().store(name="prepare_schema", node=DataCommand)
    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
        trained = [hydra.compose("config", context) for context in CONTEXTS]
        return [*trained, hydra.compose("validate"), hydra.compose("prepare")]
