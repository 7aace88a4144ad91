"""Exit codes, error reporting and the `--device` option shared by every command. Imports torch only to resolve a device."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

EXIT_DONE = 0
EXIT_CRASH = 1  # anything unforeseen, and an interrupt before anything was saved
EXIT_USER = 2  # the user's mistake, reported in one line
EXIT_STOPPED = 3  # stopped by a signal after saving


def pop_debug_flag() -> bool:
    """Removes `--debug` from the command line; returns whether tracebacks are requested (`--debug` or HYDRA_FULL_ERROR=1)."""
    if "--debug" in sys.argv:
        sys.argv.remove("--debug")
        return True
    return os.environ.get("HYDRA_FULL_ERROR") == "1"


def resolve_device(name: str) -> torch.device:
    """Returns the device named by `--device`; a GPU becomes torch's current device, so that nothing is allocated on another.

    Args:
        name: auto (a GPU if there is one), cpu, cuda, cuda:N, or any other device that torch knows.

    Raises:
        ValueError: torch knows no such device, or cannot use it on this machine.
    """
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        found = torch.device(("cuda" if num_gpus else "cpu") if name == "auto" else name)
        torch.empty(1, device=found).cpu()  # fails on the meta device, which holds no data
    except (RuntimeError, AssertionError) as error:
        choices = ["auto", "cpu", *(["cuda"] if num_gpus else []), *(f"cuda:{index}" for index in range(num_gpus))]
        gpus = f"{num_gpus} GPU(s)" if num_gpus else "no GPU"
        raise ValueError(
            f"--device {name}: not usable by torch, which finds {gpus} on this machine; choose one of {', '.join(choices)}"
        ) from error
    if found.type == "cuda":
        found = torch.device("cuda", found.index or 0)
        torch.cuda.set_device(found)
    return found


def run(main: Callable[[], int | None]) -> int:
    """Runs a command and reports the user's mistakes as one line on stderr.

    Args:
        main: the command; raises ValueError, or the OSError of a file that the user named, for the user's mistakes.

    Returns:
        the exit code. With `--debug` or HYDRA_FULL_ERROR=1 a traceback is shown instead of the line.
    """
    has_traceback = pop_debug_flag()
    try:
        return main() or EXIT_DONE
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return EXIT_CRASH
    except BrokenPipeError:
        sys.stderr.close()
        return EXIT_DONE
    except (ValueError, OSError) as error:
        if has_traceback:
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_USER
