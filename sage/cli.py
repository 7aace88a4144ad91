"""How every command of the project ends: 0 done, 2 the user's mistake in one line, 3 interrupted, 1 anything else."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

EXIT_MISTAKE = 2
EXIT_STOPPED = 3


def wants_debug() -> bool:
    """Whether tracebacks are wanted: `--debug`, which is taken off the command line, or HYDRA_FULL_ERROR=1."""
    if "--debug" in sys.argv:
        sys.argv.remove("--debug")
        return True
    return os.environ.get("HYDRA_FULL_ERROR") == "1"


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
