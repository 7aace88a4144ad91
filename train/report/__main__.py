"""Draws a page and its plots again: the curves of a run, or a measurement of sage-validate or sage-bench."""

from __future__ import annotations

import sys
from pathlib import Path

from checkpoints.run_folder import REPORT, REPORT_PAGE, is_run, read_report
from sage.commands.cli import new_parser, run
from sage.io.files import check_writable
from train.config.schema import ConfigError


def main() -> None:
    """Draws the pages that the command line names; raises ConfigError for several sources with one `--out`."""
    parser = new_parser("sage-report", description=__doc__)
    text = "a run, for its curves; a report.json or its folder, such as RUN/checks/NAME; a file of `sage-bench --out`"
    parser.add_argument("sources", metavar="RUN_OR_REPORT", nargs="+", type=Path, help=text)
    parser.add_argument("--out", metavar="DIR", type=Path, help="output folder; default: the folder of the source")
    args = parser.parse_args()
    if args.out and len(args.sources) > 1:
        given = f"--out {args.out}: {len(args.sources)} sources would replace each other's page"
        raise ConfigError(f"{given}; give one of them with --out")
    for source in args.sources:
        print(f"written: {draw(source.expanduser(), args.out and args.out.expanduser())}")


def draw(source: Path, out: Path | None) -> Path:
    """Draws the page of a run or of a report; returns its path. Refuses another source before anything is created."""
    from train.report.page import write_pages  # with matplotlib, which `--help` does not need
    from train.report.run_page import write_run_report

    if out is not None:
        check_writable(out / REPORT_PAGE)
    if is_run(source):
        return write_run_report(source, out)
    path = source / REPORT if source.is_dir() else source
    return write_pages(read_report(path), path.parent, out)


def console() -> None:
    sys.exit(run(main))


if __name__ == "__main__":
    console()
