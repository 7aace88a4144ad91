"""`python -m benchmarks.papers [ITEM ..]`: trains what is missing, measures what has changed, writes docs/results.md."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from transformers.utils import logging as transformers_logging

from benchmarks.papers.figures import Figures
from benchmarks.papers.lab import FIGURES, Lab
from benchmarks.papers.measure.studies import ITEMS, chosen
from benchmarks.papers.page.render import write_page
from benchmarks.papers.runs import RunFailed
from benchmarks.papers.settings import QUICK, load_settings
from sage.cli import run

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Figures are written as soon as they are measured, the page at the end."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    names, failed, began = chosen(args.items), list[str](), time.perf_counter()
    settings = load_settings(*([QUICK] if args.quick else []), *args.settings)
    docs = Path(settings.docs_dir)
    figures = Figures(docs / FIGURES)
    if not args.page:
        lab = Lab(settings, figures)
        for name in names:
            try:
                ITEMS[name](lab)
            except RunFailed as error:  # the other items need other runs
                logger.error("%s: %s", name, error)
                failed.append(name)
            logger.info("%s: %.1f minutes in all", name, (time.perf_counter() - began) / 60)
    print(f"written: {write_page(figures.read_all(), docs)}")
    if failed:
        print(f"left out, because a training run failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.papers", description=__doc__)
    parser.add_argument("items", metavar="ITEM", nargs="*", help=f"of {', '.join(ITEMS)}; default: all of them")
    parser.add_argument("--quick", action="store_true", help="every item once, on drafts that have hardly learned")
    parser.add_argument("--settings", metavar="FILE", action="append", default=[], help="YAML over full.yaml; may be repeated")
    parser.add_argument("--page", action="store_true", help="measure nothing: write the page and pictures from the figures")
    return parser


if __name__ == "__main__":
    sys.exit(run(main))
