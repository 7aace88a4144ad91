"""Draws a page and its plots again: the curves of a run, or a measurement of sage-validate or sage-bench."""

from __future__ import annotations

import sys
from pathlib import Path

from checkpoints.run_folder import REPORT, REPORT_PAGE, is_run, read_report
from sage.commands.cli import new_parser, run
from train.config.schema import ConfigError
from train.report.compare import read_run
from train.report.page import write_pages
from train.report.run_page import write_run_report


def main() -> None:
    """Draws the pages that the command line names; raises ConfigError for several sources with one `--out`."""
    parser = new_parser("sage-report", description=__doc__)
    text = "a run, for its curves; a report.json or its folder, such as RUN/checks/NAME; a file of `sage-bench --out`"
    parser.add_argument("sources", metavar="RUN_OR_REPORT", nargs="+", help=text)
    text = "output folder, or DIR/NAME.md for a page of that name with its plots beside it; default: the folder of the source"
    parser.add_argument("--out", metavar="DIR", help=text)
    args = parser.parse_args()
    if args.out and len(args.sources) > 1:
        given = f"--out {args.out}: {len(args.sources)} sources would replace each other's page"
        raise ConfigError(f"{given}; give one of them with --out")
    for source in args.sources:
        print(f"written: {draw(Path(source).expanduser(), args.out)}")


def draw(source: Path, out: str | None) -> Path:
    """Draws the page of a run or of a report; returns its path. Refuses another source before anything is created."""
    if is_run(source):
        read_run(source)
        return write_run_report(source, page_path(out, source))
    path = source / REPORT if source.is_dir() else source
    report, page = read_report(path), page_path(out, path.parent)
    write_pages(report, path.parent, page)
    return page


def page_path(out: str | None, default: Path) -> Path:
    """Returns the path of the page for `--out`, and creates its folder; raises ValueError if either place is taken."""
    chosen = default if out is None else Path(out).expanduser()
    page = chosen if chosen.suffix == ".md" else chosen / REPORT_PAGE
    if page.parent.is_file() or page.is_dir():
        wrong = f"{page.parent} is a file" if page.parent.is_file() else f"{page} is a folder"
        raise ValueError(f"--out {out or default}: {wrong}; give a folder, or DIR/NAME.md")
    page.parent.mkdir(parents=True, exist_ok=True)
    return page


def console() -> None:
    sys.exit(run(main))


if __name__ == "__main__":
    console()
