"""Command line of the bench: compares policies; `policies` lists the policies.

Imports torch after the command line is checked.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from sage.bench import options
from sage.commands.cli import new_parser, run


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; the first argument may be the subcommand `policies`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["policies"]:
        new_parser("sage-bench policies", description="The policies with their rules and options.").parse_args(arguments[1:])
        print(options.policy_table())
        return
    args = options.compare_parser().parse_args(arguments)
    options.check_compare(args)
    from sage.bench import commands

    commands.compare(args, shlex.join(["python", "-m", "sage.bench", *arguments]))


def console() -> None:
    sys.exit(run(main))


if __name__ == "__main__":
    console()
