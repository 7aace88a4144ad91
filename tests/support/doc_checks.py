"""Checks of a command in the documentation without executing it: its options are parsed, its configuration is composed."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from support.doc_blocks import ROOT

import sage
from checkpoints.export.formats.registry import FORMATS
from sage.io.files import config_dir
from sage.planning.options import defaults
from train.cli.data import DataCommand
from train.config.checks import check
from train.config.hydra_app import compose, register_resolvers
from train.config.schema import Config, ValidateConfig
from train.config.store import register

PLACEHOLDERS = ("DIR", "FILE", "RUN", "TARGET")
ELLIPSIS = "..."
CONTEXTS = [  # choices that have keys of their own
    [],
    ["draft=eagle"],
    ["draft=model", "draft.num_layers=2"],
    ["draft=eagle", "draft/compressor=select"],
    ["tracking=wandb"],
    ["+data/validation=textvqa"],
]


def make_placeholders(folder: Path) -> None:
    """Creates what the placeholders of the pages stand for, with as little content as the checks need."""
    target = ROOT / "data_prep/pocket/targets/pocket_qwen2_5_vl"
    for name in PLACEHOLDERS:
        (folder / name).symlink_to(target / "config.json" if name == "FILE" else target)


def check_call(call: Sequence[str]) -> None:
    """Checks one command, given by its arguments; `...` stands for arguments that the page leaves out.

    Raises:
        AssertionError, ValueError, SystemExit: an unknown option or key, a value that is not allowed, or a missing file.
    """
    words = [word for word in call if not word.endswith(ELLIPSIS)]
    if not words[1:]:
        assert words[0] in CHECKS, f"{words[0]}: not a command of this project"
        return
    CHECKS[words[0]](words[1:])


def check_settings(words: Sequence[str]) -> None:
    """Checks overrides quoted in the text: a command has these keys and takes these values.

    Raises:
        AssertionError: no command accepts one of them.
    """
    words = [word for word in words if not re.search(r"=$|\.\.\.$", word)]
    words = [re.sub(r"[|]\w.*$|\.\.zero3$", "", word) for word in words]  # the first of several choices
    for override in _parser().parse_overrides([re.sub(r"=[NK]$", "=2", word) for word in words]):
        key, choices = override.key_or_group, _choices(override.key_or_group)
        if key.startswith("hydra"):
            continue  # keys of plugins
        if choices:
            is_many = override.is_sweep_override() or isinstance(override.value(), list)
            assert is_many or override.value() in (*choices, "NAME"), f"{key}: {sorted(choices)}"
        elif key.startswith("decode.options."):
            policy, option = key.removeprefix("decode.options.").split(".")
            assert option in defaults(sage.trees.policy_class(policy)), f"{policy}: no option {option}"
        else:
            _check_value(key, override.value(), override.is_add())


def _parser() -> OverridesParser:
    return OverridesParser.create()


def _choices(group: str) -> set[str]:
    """Returns the choices of a group; empty if it is none."""
    stored = [name.removesuffix(".yaml") for name in ConfigStore.instance().list(group)] if _is_stored(group) else []
    return {*stored, *(path.stem for path in (ROOT / "conf" / group).glob("*.yaml"))}


def _is_stored(group: str) -> bool:
    register()
    level = ConfigStore.instance().repo
    for part in group.split("/"):
        if not isinstance(level, dict) or part not in level:
            return False
        level = level[part]
    return isinstance(level, dict)


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


def _train(words: list[str]) -> None:
    words = _without_resume(words)
    if words[:1] == ["--shell-completion"]:
        return
    words = [word for word in words if word not in ("--help", "--version")]
    if words[:1] == ["-m"]:
        words = _first_job(words[1:])
    if "--cfg" in words:
        assert "--cfg job --resolve" in " ".join(words)
        words = words[: words.index("--cfg")]
    register()
    config = compose("config", words, Config)
    config.launch.plan = True  # a plan opens no data and checks no run folder
    check(config)


def _without_resume(words: list[str]) -> list[str]:
    if "--resume" not in words:
        return words
    place = words.index("--resume")
    return words[:place] + words[place + 2 :]


def _first_job(words: Sequence[str]) -> list[str]:
    """Returns the overrides of a sweep's first job; plugins of Hydra that are not installed are left out."""
    found = []
    for override in _parser().parse_overrides(list(words)):
        key = override.key_or_group
        if key == "sweep":
            choices = override.value() if isinstance(override.value(), list) else [override.value()]
            assert all((ROOT / "conf/sweep" / f"{choice}.yaml").is_file() for choice in choices), override.input_line
        elif override.is_interval_sweep():
            found.append(f"{key}={override.value().start}")
        elif override.is_sweep_override():
            found.append(f"{key}={next(iter(override.sweep_string_iterator()))}")
        elif not key.startswith("hydra"):
            found.append(override.input_line)
    return found


def _validate(words: list[str]) -> None:
    if words[0] == "--compare":
        from train.report.compare import run_command

        return _parse(lambda: run_command(words[1:]))
    register()
    compose("validate", [re.sub("^draft=", "checkpoint=", word) for word in words], ValidateConfig)


def _data(words: list[str]) -> None:
    ConfigStore.instance().store(name="prepare_schema", node=DataCommand)
    register()
    compose("prepare", words, DataCommand)


def _generate(words: list[str]) -> None:
    from sage.commands.generate import parse_args

    if "--prompt" not in words:
        words = [*words, "--prompt", "text"]
    with _complete_options():
        sage.policy(parse_args(words).policy)


EXAMPLE = re.compile(r"vipllava")  # the family that docs/adding_a_family.md adds


def _export(words: list[str]) -> None:
    from train.cli.export import parse_args

    with _complete_options():
        args = parse_args(words)
    assert not args.format or args.format in FORMATS, args.format


def _python(words: list[str]) -> None:
    if words[0] != "-m":
        assert (ROOT / words[0]).is_file(), f"{words[0]}: no such file"
        return
    module, arguments = words[1], words[2:]
    if module == "pytest":
        files = [word.split("::")[0] for word in arguments if not word.startswith("-")]
        missing = [file for file in files if not (ROOT / file).exists() and not EXAMPLE.search(file)]
        assert not missing, f"no such file: {missing}"
    elif module == "torch.distributed.run":
        from torch.distributed.run import get_args_parser

        parsed = get_args_parser().parse_args(arguments)
        check_call([parsed.training_script, *parsed.training_script_args])
    elif module.startswith("sglang"):
        return
    elif module.startswith("vllm"):
        _vllm(arguments)
    elif arguments:
        _check_module(module, arguments)
    else:
        assert importlib.util.find_spec(module), f"{module}: no such module"


def _check_module(module: str, arguments: Sequence[str]) -> None:
    is_package = importlib.util.find_spec(module).submodule_search_locations is not None
    main = importlib.import_module(f"{module}.__main__" if is_package else module).main
    with patch.object(sys, "argv", [module, *arguments]):
        rest = _parse(main)
    if module == "benchmarks.training" and rest:
        return _train(rest)
    assert not rest, f"{module}: unknown arguments {rest}"


class _Parsed(BaseException):
    def __init__(self, rest: list[str]) -> None:
        self.rest = rest


def _parse(main: Callable[[], object]) -> list[str]:
    """Runs `main` until its arguments are parsed; returns those that are unknown to the parser."""
    with _stop_after_parsing():
        try:
            main()
        except _Parsed as parsed:
            return parsed.rest
    raise AssertionError(f"{main}: parses no arguments")


@contextmanager
def _stop_after_parsing() -> Iterator[None]:
    known, depth = argparse.ArgumentParser.parse_known_args, 0

    def parse_known_args(self: argparse.ArgumentParser, *args: object) -> tuple[argparse.Namespace, list[str]]:
        nonlocal depth
        depth += 1
        found = known(self, *args)  # calls itself for a subcommand
        depth -= 1
        if not depth:
            raise _Parsed(found[1])
        return found

    with patch.object(argparse.ArgumentParser, "parse_known_args", parse_known_args), _complete_options():
        yield


def _complete_options() -> Any:
    """Refuses abbreviated options, which argparse takes."""
    return patch.object(argparse.ArgumentParser, "_get_option_tuples", lambda self, option: [])


def _make(words: list[str]) -> None:
    arguments = [re.sub("^results-NAME$", "results-quick", word) for word in words]
    done = subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _pip(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for word in words[1:]:
        if found := re.fullmatch(r"(?:sage-draft|\.)\[(\w+)\]", word):
            assert found[1] in extras, f"{word}: no such extra"


def _launched(words: list[str]) -> None:
    """Checks the part of a launcher's command line that follows its options."""
    starts = [number for number, word in enumerate(words) if word.startswith("sage-")]
    assert starts, f"no command of this project: {words}"
    check_call(words[starts[0] :])


def _deepspeed(words: list[str]) -> None:
    from deepspeed.launcher.runner import parse_args

    parsed = parse_args(words)
    check_call([parsed.user_script, *parsed.user_args])


def _vllm(words: list[str]) -> None:
    if "--speculative-config" not in words:
        assert words[0] == "serve", words
        return
    settings = json.loads(words[words.index("--speculative-config") + 1])
    assert {"method", "model", "num_speculative_tokens"} <= set(settings)


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "sage-train": _train,
    "sage-validate": _validate,
    "sage-data": _data,
    "sage-generate": _generate,
    "sage-export": _export,
    "python": _python,
    "make": _make,
    "pip": _pip,
    "deepspeed": _deepspeed,
    "srun": _launched,
    "scontrol": lambda words: None,
    "vllm": _vllm,
}
