"""The parser of every command with options: mistakes as one line with the nearest option, and shell completion."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Collection
from typing import Any, NoReturn

from sage.io.names import did_you_mean
from sage.io.target_paths import target_names
from sage.trees import POLICIES

EXIT_USER = 2  # the user's mistake, reported in one line
UNKNOWN = "unrecognized arguments: "  # start of the message of `argparse`
SHELLS = ("bash", "fish")


class CommandParser(argparse.ArgumentParser):
    """Ends the program with one line on stderr where `argparse` would print its usage."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix(UNKNOWN).split()[0].partition("=")[0] if message.startswith(UNKNOWN) else None
        if unknown is not None:
            problem = "unknown option" if unknown.startswith("-") else "unexpected argument"
            message = f"{unknown}: {problem}{did_you_mean(unknown, [*self._option_string_actions])}"
        self.exit(EXIT_USER, f"error: {message.removeprefix('argument ')}; {self.prog} --help lists the options\n")


class CompletionAction(argparse.Action):
    """`--shell-completion install=SHELL`, as in the commands that Hydra composes: prints a script for `eval`."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        shell = str(values).removeprefix("install=")
        if shell not in SHELLS:
            parser.error(
                f"{option_string} {values}: give install=SHELL with one of {', '.join(SHELLS)}; zsh takes that of bash"
            )
        print(completion_script(parser, shell))
        parser.exit()


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Returns what completes the options of a command, the values of those that have a list of them, and files."""
    actions = [action for action in parser._actions if action.help is not argparse.SUPPRESS and action.option_strings]
    if shell == "fish":
        return "\n".join(_fish_line(parser.prog, action) for action in actions)
    cases = []
    for action in actions:
        if action.nargs != 0:  # after an option without a list of values, bash completes files
            cases.append(f"    {'|'.join(action.option_strings)}) values={shlex.quote(' '.join(_values(action)))} ;;")
    options = " ".join(option for action in actions for option in action.option_strings)
    function = f"_{parser.prog.replace('-', '_')}"
    return "\n".join(
        [
            f"{function}() {{",
            '  local word="${COMP_WORDS[COMP_CWORD]}" values',
            '  case "${COMP_WORDS[COMP_CWORD-1]}" in',
            *cases,
            f"    *) values={shlex.quote(options)} ;;",
            "  esac",
            '  COMPREPLY=($(compgen -W "$values" -- "$word"))',
            "}",
            f"complete -o default -F {function} {parser.prog}",
        ]
    )


def _fish_line(program: str, action: argparse.Action) -> str:
    long = max(action.option_strings, key=len).removeprefix("--")
    values = _values(action)
    value = f" -x -a {shlex.quote(' '.join(values))}" if values else "" if action.nargs == 0 else " -r"
    return f"complete -c {program} -l {long}{value}"


def _values(action: argparse.Action) -> Collection[str]:
    """Returns the values to complete: the choices of an option, the names of policies and of targets."""
    if "--policy" in action.option_strings:
        return POLICIES
    if "--target" in action.option_strings:
        return target_names()
    return [str(choice) for choice in action.choices or ()]
