"""The option `--out` of the commands that draw a page again."""

from __future__ import annotations

import argparse
from pathlib import Path

from checkpoints.run_folder import REPORT_PAGE


def add_out_option(parser: argparse.ArgumentParser, default: str) -> None:
    """Adds `--out`; `default` describes the folder used without it."""
    text = f"output folder, or DIR/NAME.md for a page of that name with its plots beside it; default: {default}"
    parser.add_argument("--out", metavar="DIR", help=text)


def page_path(out: str | None, default: Path) -> Path:
    """Returns the path of the page for `--out`, and creates its folder.

    Raises:
        ValueError: a file is in the place of the folder, or a folder in the place of the page.
    """
    chosen = default if out is None else Path(out).expanduser()
    page = chosen if chosen.suffix == ".md" else chosen / REPORT_PAGE
    if page.parent.is_file() or page.is_dir():
        wrong = f"{page.parent} is a file" if page.parent.is_file() else f"{page} is a folder"
        raise ValueError(f"--out {out or default}: {wrong}; give a folder, or DIR/NAME.md")
    page.parent.mkdir(parents=True, exist_ok=True)
    return page
