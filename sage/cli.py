"""How every command of the project ends: 0 done, 2 the user's mistake in one line, 3 interrupted, 1 anything else.

And which device `--device` names.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

EXIT_MISTAKE = 2
EXIT_STOPPED = 3


def wants_debug() -> bool:
    """Whether tracebacks are wanted: `--debug`, which is taken off the command line, or HYDRA_FULL_ERROR=1."""
    if "--debug" in sys.argv:
        sys.argv.remove("--debug")
        return True
    return os.environ.get("HYDRA_FULL_ERROR") == "1"


def device(name: str) -> torch.device:
    """The device that `--device` names.

    Args:
        name: auto (a GPU if there is one), cpu, cuda, cuda:N, or any other that torch has here.

    Raises:
        ValueError: torch knows no such device, or cannot use it on this machine.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        found = torch.device(("cuda" if count else "cpu") if name == "auto" else name)
        torch.empty(1, device=found).cpu()  # the meta device has nothing to give back
    except (RuntimeError, AssertionError) as error:
        choices = ["auto", "cpu", *(["cuda"] if count else []), *(f"cuda:{index}" for index in range(count))]
        gpus = f"{count} GPU(s)" if count else "no GPU"
        raise ValueError(
            f"--device {name}: torch cannot use it, and sees {gpus} here; choose one of {', '.join(choices)}"
        ) from error
    return found


def run(main: Callable[[], int | None]) -> int:
    """Runs a command and turns the user's mistakes into one line on stderr.

    Args:
        main: the command; raises ValueError, or an OSError of a file the user named, for the user's mistakes.

    Returns:
        the exit code. With `--debug` or HYDRA_FULL_ERROR=1 the traceback is shown instead of the line.
    """
    wants_traceback = wants_debug()
    try:
        return main() or 0
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return EXIT_STOPPED
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except (ValueError, OSError) as error:
        if wants_traceback:
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_MISTAKE
