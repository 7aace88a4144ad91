"""Command line of the bench: compares policies; `costs` measures passes of random weights; `policies` lists the policies.

Imports torch after the command line is checked.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from sage.bench import options
from sage.commands.cli import run


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; the first argument may be a subcommand, `costs` or `policies`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["policies"]:
        from sage.bench import policies

        policies.run(arguments[1:])
        return
    is_costs = arguments[:1] == ["costs"]
    args = (options.costs_parser() if is_costs else options.compare_parser()).parse_args(arguments[is_costs:])
    (options.check_costs if is_costs else options.check_compare)(args)
    from sage.bench import commands

    if is_costs:
        commands.measure_costs(args)
    else:
        commands.compare(args, shlex.join(["python", "-m", "sage.bench", *arguments]))


def console() -> None:
    """Entry point of the console script."""
    sys.exit(run(main))


if __name__ == "__main__":
    console()
