"""`--widen-to`: measures a pocket target with more weights and the same function (data_prep.pocket.widen)."""

from __future__ import annotations

import argparse

from data_prep.pocket.widen import wide_target

OPTION = "--widen-to"


def add_widen_option(parser: argparse.ArgumentParser) -> None:
    """Adds the option; `widened` reads it."""
    text = "widens a pocket target, without changing its function, until a float32 pass reads that many megabytes of weights"
    parser.add_argument(OPTION, type=float, metavar="MB", help=f"{text}; such as 62 or 226")


def widened(target: str, args: argparse.Namespace) -> str:
    """Returns the target to measure; raises ValueError for one that cannot be widened."""
    return target if args.widen_to is None else str(wide_target(target, args.widen_to, OPTION))
