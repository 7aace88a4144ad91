"""`python -m train.report report.json`: draws the plots and the page of a report again."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from checkpoints.run_folder import REPORT, read_report
from sage.cli import run
from sage.files import write_text
from train.report.out_option import add_out_option, page_path
from train.report.page import render_page
from train.report.plots import write_plots


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m train.report", description=__doc__)
    parser.add_argument("report", metavar="FILE", help="a report.json or its folder, or a file of `python -m sage.bench --out`")
    add_out_option(parser, "the folder of FILE")
    args = parser.parse_args()
    path = Path(args.report) / REPORT if Path(args.report).is_dir() else Path(args.report)
    report, page = read_report(path), page_path(args.out, path.parent)
    write_text(page, render_page(report, write_plots(report, page.parent)))
    print(f"written: {page}")


if __name__ == "__main__":
    sys.exit(run(main))
