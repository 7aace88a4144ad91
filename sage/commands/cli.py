"""What the commands share: exit codes, errors as one line, the parser, options for models, device and dtype. Imports no torch.

An error is a user's mistake, a foreseen failure with an `exit_code` and maybe `details` to print above the line, or a bug.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_origin

from sage.drafts.location import DRAFT_HELP, find_draft, target_of
from sage.io.dtypes import LONG_NAMES, SHORT_NAMES, torch_dtype
from sage.io.manifest import refuse_corrupt_draft
from sage.io.ranges import did_you_mean, field_types, key_meanings, plain_type
from sage.io.target_paths import find_target
from sage.runtime.modes import PassMode, Quantize

if TYPE_CHECKING:
    import torch

CHECKPOINT_DTYPE = "that of the checkpoint, bf16 for fp16"
FAST_DTYPE = f"{CHECKPOINT_DTYPE}; on a CPU fp32, which is faster there"  # `load_options(cpu_dtype="float32")`
PACKAGES = ("sage-draft", "torch", "transformers")
EXIT_DONE = 0
EXIT_CRASH = 1  # anything unforeseen
EXIT_USER = 2  # the user's mistake, reported in one line
EXIT_STOPPED = 3  # stopped by a signal after saving
EXIT_INTERRUPTED = 130  # by Ctrl-C or SIGTERM, with nothing saved; that of a shell's own commands after Ctrl-C (128 + SIGINT)
NOTHING_SAVED = "stopped before anything was saved"
UNKNOWN = "unrecognized arguments: "  # start of the message of `argparse`


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Returns installed versions, `python` first; packages that are not installed are omitted."""
    from importlib.metadata import PackageNotFoundError, version  # takes as long as the rest of this module

    found = {"python": platform.python_version()}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def version_text() -> str:
    """Returns what `--version` prints: this package and the packages that its results depend on."""
    found = versions()
    texts = [f"{package} {found.get(package, 'unknown')}" for package in PACKAGES]  # unknown: a checkout, not installed
    return f"{', '.join(texts)}, Python {found['python']}"


def pop_debug_flag() -> bool:
    """Removes `--debug` from the command line; returns whether tracebacks are requested (`--debug` or HYDRA_FULL_ERROR=1)."""
    if "--debug" in sys.argv:
        sys.argv.remove("--debug")
        return True
    return os.environ.get("HYDRA_FULL_ERROR") == "1"


class CommandParser(argparse.ArgumentParser):
    """Ends the program with one line on stderr, with the nearest option, where `argparse` would print its usage."""

    def error(self, message: str) -> NoReturn:
        if message.startswith(UNKNOWN):
            unknown = message.removeprefix(UNKNOWN).split()[0].partition("=")[0]
            problem = "unknown option" if unknown.startswith("-") else "unexpected argument"
            message = f"{unknown}: {problem}{did_you_mean(unknown, [*self._option_string_actions])}"
        self.exit(EXIT_USER, f"error: {message.removeprefix('argument ')}; {self.prog} --help lists the options\n")


def new_parser(program: str, **texts: Any) -> argparse.ArgumentParser:
    """Returns a parser with `--version`, whose help keeps the line breaks of its texts, `description` and `epilog`."""
    parser = CommandParser(prog=program, formatter_class=argparse.RawDescriptionHelpFormatter, **texts)
    parser.add_argument("--version", action="version", version=version_text(), help="print versions and exit")
    return parser


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--target` and `--draft`; `find_models` reads them."""
    text = "folder, hub id or name of the target; default: the one the draft was trained for"
    parser.add_argument("--target", metavar="TARGET", help=text)
    parser.add_argument("--draft", metavar="RUN", help=f"{DRAFT_HELP}; not needed for the policy autoregressive")


def add_load_options(parser: argparse.ArgumentParser, default_dtype: str) -> None:
    """Adds the options that `load_options` reads, and `--passes`, which the caller reads."""
    add_device_option(parser, "auto")
    text = "split a target that is too large for one GPU across all of them: auto, balanced or sequential, or a JSON object, "
    parser.add_argument("--device-map", metavar="MAP", help=f"{text}module name -> device; replaces --device")
    parser.add_argument("--adapter", metavar="DIR", help="folder or hub id of a PEFT adapter, merged into the target")
    choices = [str(kind) for kind in Quantize]
    parser.add_argument("--quantize", choices=choices, help="quantize the weights of the target when it is loaded")
    add_passes_option(parser)
    add_dtype_option(parser, None, f"dtype of target and draft (default: {default_dtype})")


def named_models(args: argparse.Namespace) -> tuple[str | None, Path | None]:
    """Returns the folder or hub id of `--target`, and the folder of `--draft`, None for one not given.

    ValueError if one of them does not exist, or neither is given.
    """
    if args.draft is None and args.target is None:
        raise ValueError("--target: missing; give a folder, hub id or name, or a --draft that names its target")
    draft = None if args.draft is None else find_draft(args.draft, "--draft")
    return None if args.target is None else find_target(args.target, "--target"), draft


def find_models(args: argparse.Namespace) -> tuple[str, Path | None]:
    """Returns `named_models` with the target that the draft names, where none is given; ValueError also for a corrupt draft."""
    target, draft = named_models(args)
    if draft is None:
        assert target is not None
        return target, None
    refuse_corrupt_draft(draft)
    from sage.drafts.draft import kind_of_folder

    kind_of_folder(draft)
    return target or find_target(target_of(draft, "--target"), "--target"), draft


def add_dtype_option(parser: argparse._ActionsContainer, default: str | None, text: str) -> None:
    """Adds `--dtype`, with long and short names; `text` describes it."""
    names = (*LONG_NAMES, *SHORT_NAMES)
    parser.add_argument("--dtype", metavar="NAME", choices=names, default=default, help=f"{text}: {', '.join(names)}")


def add_device_option(parser: argparse._ActionsContainer, default: str) -> None:
    """Adds `--device`; `resolve_device` reads it."""
    text = "auto (a GPU if there is one), cpu, cuda or cuda:N; default %(default)s"
    parser.add_argument("--device", default=default, help=text)


def add_settings(parser: argparse._ActionsContainer, kind: type, *names: str) -> None:
    """Adds an option per field (of `names`, if given) of a settings dataclass, which `from_attributes` builds from them."""
    hints, meanings = field_types(kind), key_meanings(kind)
    for field in fields(kind):
        if names and field.name not in names:
            continue
        hint, option, text = plain_type(hints[field.name]), field.name.replace("_", "-"), meanings[field.name].removesuffix(".")
        if hint is bool:
            parser.add_argument(f"--no-{option}", dest=field.name, action="store_false", help=f"turn off: {text}")
        elif hint in (int, float):
            default = "" if field.default is None else " (default: %(default)s)"
            parser.add_argument(f"--{option}", type=hint, default=field.default, metavar="N", help=text + default)
        elif get_origin(hint) is Collection:
            parser.add_argument(f"--{option}", action="append", default=[], metavar="TEXT", help=f"{text}; can be repeated")


def add_passes_option(parser: argparse._ActionsContainer) -> None:
    """Adds `--passes`, the argument of `sage.load_target`."""
    text = "how passes run; auto: captured on a GPU, compiled on a CPU for many answers, else eager (default: %(default)s)"
    parser.add_argument("--passes", choices=[str(mode) for mode in PassMode], default=str(PassMode.auto), help=text)


def load_options(args: argparse.Namespace, cpu_dtype: str | None = None) -> dict[str, Any]:
    """Returns the arguments of `sage.load_target` from the options of `add_load_options`; ValueError for mistakes.

    `cpu_dtype` is that of a target on the CPU without `--dtype`; None: that of the checkpoint, as on a GPU.
    """
    device_map = args.device_map
    if device_map is not None and device_map.startswith("{"):
        try:
            device_map = json.loads(device_map)
        except ValueError as error:
            raise ValueError(f"--device-map: {device_map!r} is no JSON object ({error})") from error
    device = resolve_device(args.device)
    name = args.dtype or (cpu_dtype if device.type == "cpu" and device_map is None else None)
    dtype = torch_dtype(name) if name else None
    options = {"adapter": args.adapter, "quantize": args.quantize}
    return {"dtype": dtype, "device": device, "device_map": device_map, **options}


def resolve_device(name: str) -> torch.device:
    """Returns the device named by `--device`, torch's current device if it is a GPU; ValueError if torch cannot use it."""
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        device = torch.device(("cuda" if num_gpus else "cpu") if name == "auto" else name)
        torch.empty(1, device=device).cpu()  # fails on the meta device, which holds no data
    except (RuntimeError, AssertionError) as error:
        choices = ["auto", "cpu", *(["cuda"] if num_gpus else []), *(f"cuda:{index}" for index in range(num_gpus))]
        gpus = f"{num_gpus} GPU(s)" if num_gpus else "no GPU"
        raise ValueError(
            f"--device {name}: not usable by torch, which finds {gpus} on this machine; choose one of {', '.join(choices)}"
        ) from error
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


def has_colors(stream: Any) -> bool:
    """Whether to color a stream: a terminal, unless NO_COLOR is set (https://no-color.org), or any with FORCE_COLOR."""
    return bool(os.environ.get("FORCE_COLOR")) or (stream.isatty() and not os.environ.get("NO_COLOR"))


def plain_warnings() -> None:
    """Shows warnings as one line, without the place in the code, and none of torchao, of kernels that the machine lacks."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.formatwarning = lambda message, *_place, **_line: f"warning: {' '.join(str(message).split())}\n"


def report_interrupt() -> int:
    """Prints that a command was interrupted; returns its exit code."""
    print("stopped", file=sys.stderr)
    return EXIT_INTERRUPTED


def run(main: Callable[[], int | None]) -> int:
    """Runs a command; returns its exit code. Errors are one line on stderr (see `report`), warnings as well."""
    has_traceback = pop_debug_flag()
    if not has_traceback:
        plain_warnings()
    try:
        return main() or EXIT_DONE
    except KeyboardInterrupt:
        return report_interrupt()
    except BrokenPipeError:  # the reader of the output, `head` for example, has exited
        return ignore_broken_pipe()
    except Exception as error:
        return report(error, has_traceback=has_traceback)


def ignore_broken_pipe() -> int:
    """Discards the rest of the output, so that flushing it at exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_DONE


def report(error: Exception, is_main: bool = True, has_traceback: bool = False) -> int:
    """Prints an error as one line, on rank 0 only, and returns its exit code; `has_traceback`: also of a user's mistake."""
    code = getattr(error, "exit_code", None)
    is_bug = code is None and is_crash(error)
    if code is not None:
        print(getattr(error, "details", ""), end="", file=sys.stderr)
    if is_bug or (has_traceback and not is_crash(error)):
        traceback.print_exception(error)
    return print_error(message_of(error), EXIT_CRASH if is_bug else EXIT_USER if code is None else int(code), is_main)


def message_of(error: Exception) -> str:
    """Returns an error as one line."""
    is_expected = not is_crash(error) or hasattr(error, "exit_code")
    return " ".join((str(error) if is_expected else f"{type(error).__name__}: {error}").split())


def is_crash(error: BaseException) -> bool:
    """Whether an error is a bug rather than a user's mistake, so that its traceback is printed."""
    return isinstance(error, UnicodeError) or not isinstance(error, (ValueError, OSError))


def print_error(message: str, code: int, is_main: bool = True) -> int:
    """Prints a line on rank 0; returns `code`."""
    if is_main:
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code
