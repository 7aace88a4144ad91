"""`python -m train.report report.json`: draws the plots and the page of a report again."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from sage.cli import run
from sage.files import write_text
from train.report.page import render_page
from train.report.plots import write_plots


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m train.report", description=__doc__)
    parser.add_argument("report", metavar="FILE", help="a report.json, or the output of `python -m sage.bench --out FILE`")
    parser.add_argument("--out", metavar="DIR", help="output folder; default: that of the file")
    args = parser.parse_args()
    folder = Path(args.out) if args.out else Path(args.report).parent
    report = read_report(Path(args.report))
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "report.md", render_page(report, write_plots(report, folder)))
    print(f"written: {folder / 'report.md'}")


def read_report(path: Path) -> dict[str, Any]:
    """Reads a report.json.

    Raises:
        ValueError: the file does not exist or is not a report.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give a report.json")
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error.msg}); give a report.json") from error
    if not isinstance(report, dict) or "policies" not in report:
        raise ValueError(f"{path}: has no policies; give a report.json of sage-validate or sage.bench")
    return report


if __name__ == "__main__":
    sys.exit(run(main))
