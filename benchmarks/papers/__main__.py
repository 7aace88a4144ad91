"""`python -m benchmarks.papers [STUDY ...]`: trains missing runs, measures outdated figures, fills the tables of the pages."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers.utils import logging as transformers_logging

from benchmarks.figures import fill_blocks
from benchmarks.papers.claims import claims, real_claims
from benchmarks.papers.measure import Lab, read_measurements
from benchmarks.papers.runs import Json, TrainingFailed, load_settings, select_studies
from benchmarks.papers.tables import PLOTS, TABLES
from sage.commands.cli import new_parser, run
from sage.io.files import write_text
from train.report import style

logger = logging.getLogger(__name__)
PAGE, RESULTS, TARGETS = "results.md", "results", "targets.md"


def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser("python -m benchmarks.papers", description=__doc__)
    parser.add_argument("studies", metavar="STUDY", nargs="*", help="of settings.yaml; default: all but those on request")
    parser.add_argument("--page-only", action="store_true", help="measure nothing: fill the page from the figures")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    settings = load_settings()
    docs, failed = Path(settings.docs_dir), []
    lab = Lab(settings, docs / RESULTS)
    for study in [] if args.page_only else select_studies(settings, args.studies):
        try:
            lab.measure(study)
        except TrainingFailed as error:  # the other studies do not need that run
            logger.error("%s: %s", study, error)
            failed.append(study)
    write_pages({study: read_figures(lab.folder, study) for study in settings.studies}, docs)
    print(f"written: {docs / PAGE}")
    if failed:
        print(f"skipped, because a training run failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def read_figures(folder: Path, study: str) -> Json:
    """Returns the figures of a study by measurement, without inputs and machine."""
    return {name: content["figures"] for name, content in read_measurements(folder, study).items()}


def write_pages(studies: Mapping[str, Json], docs: Path) -> None:
    """Fills the tables of docs/results.md, docs/targets.md and the README beside `docs`, and draws the pictures."""
    with style.rc_context():
        for file, (study, draw) in PLOTS.items():
            if studies[study]:
                style.save(draw(studies[study]), docs / RESULTS / file)
    for page in (docs / PAGE, docs / TARGETS, docs.parent / "README.md"):
        if page.is_file():
            write_text(page, fill_page(page.read_text(encoding="utf-8"), studies))


def fill_page(text: str, studies: Mapping[str, Json]) -> str:
    """Returns a page with the tables between its markers; a table without figures keeps its text."""

    def content(name: str) -> str | None:
        if name in (pages := {"claims": claims, "real_claims": real_claims}):
            is_real = name == "real_claims"
            needed = [figures for study, figures in studies.items() if study.startswith("real") is is_real]
            return pages[name](studies) if all(needed) else None
        study, make = TABLES[name]
        return make(studies[study]) if studies[study] else None

    return fill_blocks(text, "table", content)


if __name__ == "__main__":
    sys.exit(run(main))
