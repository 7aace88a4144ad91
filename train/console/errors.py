"""Errors as one line and an exit code: a user's mistake, a failure that the program foresees, or a bug with its traceback.

A failure may have an `exit_code` of its own, and `details` to print above the line.
"""

from __future__ import annotations

import sys
import traceback

from sage.commands.cli import EXIT_CRASH, EXIT_USER

NOTHING_SAVED = "stopped before anything was saved"


def report(error: Exception, is_main: bool = True) -> int:
    """Prints an error and returns its exit code."""
    if hasattr(error, "exit_code"):
        print(getattr(error, "details", ""), end="", file=sys.stderr)
        return print_error(message_of(error), int(error.exit_code), is_main)
    if not is_crash(error):
        return print_error(message_of(error), EXIT_USER, is_main)
    traceback.print_exception(error)
    return print_error(message_of(error), EXIT_CRASH, is_main)


def message_of(error: Exception) -> str:
    """Returns an error as one line."""
    is_expected = not is_crash(error) or hasattr(error, "exit_code")
    return " ".join((str(error) if is_expected else f"{type(error).__name__}: {error}").split())


def is_crash(error: BaseException) -> bool:
    """Whether an error is a bug rather than a user's mistake, so that its traceback is printed."""
    return isinstance(error, UnicodeError) or not isinstance(error, (ValueError, OSError))


def print_error(message: str, code: int, is_main: bool) -> int:
    """Prints a line on rank 0; returns `code`."""
    if is_main:
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code
