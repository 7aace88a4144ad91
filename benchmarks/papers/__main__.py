"""`python -m benchmarks.papers [STUDY ...]`: trains missing runs, measures outdated figures, writes docs/results.md."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from transformers.utils import logging as transformers_logging

from benchmarks.papers.figures import FIGURES_DIR, FigureStore
from benchmarks.papers.lab import Lab
from benchmarks.papers.render import write_page
from benchmarks.papers.runs import QUICK, TrainingFailed, load_settings
from benchmarks.papers.studies import STUDIES, select_studies
from sage.commands.cli import new_parser, run

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the selected studies and writes the page; returns the exit code.

    Every figure is written as soon as it is measured, so an interrupted process loses one measurement.
    """
    parser = new_parser("python -m benchmarks.papers", description=__doc__)
    parser.add_argument("studies", metavar="STUDY", nargs="*", help=f"one of {', '.join(STUDIES)}; default: all")
    parser.add_argument("--quick", action="store_true", help="run every study once, on barely trained drafts")
    parser.add_argument("--settings", metavar="FILE", action="append", default=[], help="YAML over full.yaml; repeatable")
    parser.add_argument("--page-only", action="store_true", help="measure nothing: write the page and plots from the figures")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    studies = select_studies(args.studies)
    settings = load_settings(*([QUICK] if args.quick else []), *args.settings)
    docs = Path(settings.docs_dir)
    store = FigureStore(docs / FIGURES_DIR)
    failed, start, lab = [], time.perf_counter(), Lab(settings, store)
    for study in [] if args.page_only else studies:
        try:
            study.measure(lab)
        except TrainingFailed as error:  # the other studies do not need that run
            logger.error("%s: %s", study.name, error)
            failed.append(study.name)
        logger.info("%s: %.1f minutes since the start", study.name, (time.perf_counter() - start) / 60)
    print(f"written: {write_page(store.read_all(), docs)}")
    if failed:
        print(f"skipped, because a training run failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run(main))
