"""Renders docs/results.md, its plots and the README's headline tables from the figures; equal figures give an equal page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.papers.figures import FIGURES_DIR, Json
from benchmarks.papers.headline import headline_table
from benchmarks.papers.markdown import fill, listing
from benchmarks.papers.studies import SECTIONS, STUDIES
from benchmarks.papers.studies.regimes import engines_table
from benchmarks.papers.study import Figures, Study
from sage.io.files import write_text
from train.report import style

PAGE = "results.md"
README_START, README_END = "<!-- headline: written by make results -->", "<!-- headline ends -->"
ENGINES_START, ENGINES_END = "<!-- engines: written by make results -->", "<!-- engines end -->"


def write_page(files: Mapping[str, Json], docs: Path) -> Path:
    """Writes the page, its plots, and the tables of the README beside `docs` for which it has markers; returns the path.

    Args:
        files: contents by name, as returned by `FigureStore.read_all`.
        docs: folder of the page; plots go to its subfolder results.
    """
    folder, figures = docs / FIGURES_DIR, _figures(files)
    folder.mkdir(parents=True, exist_ok=True)
    with style.rc_context():
        for study in _shown(figures):
            for file, draw in study.plots.items():
                style.save(draw(study.select(figures)), folder / file)
    write_text(docs / PAGE, render(files))
    readme = docs.parent / "README.md"
    if readme.is_file():
        write_text(readme, with_headline(readme.read_text(encoding="utf-8"), figures))
    return docs / PAGE


def with_headline(readme: str, figures: Figures) -> str:
    """Returns the README with the headline tables between the markers that it has; a table without figures is unchanged."""
    readme = _between(readme, README_START, README_END, headline_table(figures))
    return _between(readme, ENGINES_START, ENGINES_END, engines_table(figures))


def _between(text: str, start: str, end: str, content: str) -> str:
    if not content or start not in text:
        return text
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}\n\n{content}\n\n{end}{after}"


def render(files: Mapping[str, Json]) -> str:
    """Returns the text of the page."""
    figures = _figures(files)
    shown = _shown(figures)
    machines = list(dict.fromkeys(_machine_line(content) for content in files.values()))
    expectations = [one for study in shown for one in study.expectations(study.select(figures))]
    values = {
        "machines": machines,
        "table": headline_table(figures),
        "expectations": sorted(expectations, key=lambda one: one.is_met),  # unmet ones first
        "sections": [section(number, study, figures, _source(study, files, machines)) for number, study in enumerate(shown, 1)],
    }
    return fill("results", values) + "\n"


def section(number: int, study: Study, figures: Figures, source: str) -> str:
    """Returns the section of a study. Its template is filled with the figures themselves and with the study's values; if there
    are several targets, with the figures of the first one, and with all of them as `targets`.
    """
    found = study.select(figures)
    own = {**next(iter(found.values())), "targets": found} if study.is_per_target else found
    return fill(study.name, {**own, **study.values(found), "number": number, "source": source})


def _figures(files: Mapping[str, Json]) -> Figures:
    return {name: content["figures"] for name, content in files.items()}


def _shown(figures: Figures) -> list[Study]:
    """Returns the studies of which all figures exist, in the order of their sections."""
    return [STUDIES[name] for name in SECTIONS if STUDIES[name].file_names(figures)]


def _source(study: Study, files: Mapping[str, Json], machines: Sequence[str]) -> str:
    names = [*study.file_names(files), *sorted(name for name in files if study.beside and name.startswith(f"{study.beside}_"))]
    seconds = sum(files[name]["seconds"] for name in names)
    places = {name: machines.index(_machine_line(files[name])) + 1 for name in names}
    used = [str(place) for place in sorted(set(places.values()))]
    of_file = {name: f" (machine {place})" if len(used) > 1 else "" for name, place in places.items()}
    links = ", ".join(f"[{name}.json]({FIGURES_DIR}/{name}.json){of_file[name]}" for name in names)
    where = f", on machine{'s' if len(used) > 1 else ''} {listing(used)}" if len(machines) > 1 else ""
    return f"`make results-{study.name}`: {seconds:.0f} s after training{where}. Figures: {links}."


def _machine_line(content: Json) -> str:
    machine, versions = content["machine"], content["versions"]
    packages = ", ".join(f"{package} {version}" for package, version in versions.items())
    place = f"{machine['system']}, {machine['cpu']}, {machine['cores']} cores, {machine['torch_threads']} thread"
    return f"{place}; {packages}."
