"""Renders docs/results.md, its plots and the README's headline table from the figures; equal figures give an equal page."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from benchmarks.papers.figures import FIGURES_DIR, Json
from benchmarks.papers.page.expectations import expectations_section
from benchmarks.papers.page.headline import headline_table
from benchmarks.papers.page.markdown import Figures, fill, join, listing
from benchmarks.papers.page.sections import SECTIONS, Section
from sage.files import write_text
from train.report import style

PAGE = "results.md"
README_START, README_END = "<!-- headline: written by make results -->", "<!-- headline ends -->"


def write_page(files: Mapping[str, Json], docs: Path) -> Path:
    """Writes the page and its plots, and the headline table of the README beside `docs` if it has the markers.

    Args:
        files: contents by name, as returned by `FigureStore.read_all`.
        docs: folder of the page; plots go to its subfolder results.

    Returns:
        the path of the page.
    """
    folder, figures = docs / FIGURES_DIR, _figures(files)
    folder.mkdir(parents=True, exist_ok=True)
    with style.rc_context():
        for section in _shown(figures):
            for file, draw in section.plots.items():
                style.save(draw(figures), folder / file)
    write_text(docs / PAGE, render(files))
    readme = docs.parent / "README.md"
    if readme.is_file() and README_START in (text := readme.read_text(encoding="utf-8")):
        write_text(readme, with_headline(text, figures))
    return docs / PAGE


def with_headline(readme: str, figures: Figures) -> str:
    """Returns the README with the headline table between its markers; unchanged if there are no figures yet."""
    table = headline_table(figures)
    before, _, rest = readme.partition(README_START)
    _, _, after = rest.partition(README_END)
    return f"{before}{README_START}\n\n{table}\n\n{README_END}{after}" if table else readme


def render(files: Mapping[str, Json]) -> str:
    """Returns the text of the page."""
    figures = _figures(files)
    shown = _shown(figures)
    table = headline_table(figures)
    expectations = [one for section in shown for one in section.module.expectations(figures)]
    page = fill(
        "results",
        machines="\n".join(f"{number}. {line}" for line, number in _machines(files).items()),
        headline=fill("headline", table=table) if table else "",
        expectations=expectations_section(expectations),
        sections=join(*(_section(number, section, files) for number, section in enumerate(shown, start=1))),
    )
    return page + "\n"


def _figures(files: Mapping[str, Json]) -> Figures:
    return {name: content["figures"] for name, content in files.items()}


def _shown(figures: Figures) -> list[Section]:
    return [section for section in SECTIONS if section.is_shown(figures)]


def _section(number: int, section: Section, files: Mapping[str, Json]) -> str:
    figures = _figures(files)
    names = section.figure_names(figures)
    seconds = sum(files[name]["seconds"] for name in names)
    links = ", ".join(f"[{name}.json]({FIGURES_DIR}/{name}.json)" for name in names)
    source = f"`make results-{section.study}`: {seconds:.0f} s after training{_measured_on(names, files)}. Figures: {links}."
    return fill(section.study, number=number, source=source, **section.module.values(figures))


def _machines(files: Mapping[str, Json]) -> dict[str, int]:
    """Returns the number on the page of each machine, by its description."""
    lines = dict.fromkeys(_machine_line(content) for content in files.values())
    return {line: number for number, line in enumerate(lines, start=1)}


def _measured_on(names: Collection[str], files: Mapping[str, Json]) -> str:
    lines = _machines(files)
    if len(lines) < 2:
        return ""
    numbers = sorted({lines[_machine_line(files[name])] for name in names})
    return f", on {'machine' if len(numbers) == 1 else 'machines'} {listing([str(number) for number in numbers])}"


def _machine_line(content: Json) -> str:
    machine, versions = content["machine"], content["versions"]
    packages = ", ".join(f"{package} {version}" for package, version in versions.items())
    place = f"{machine['system']}, {machine['cpu']}, {machine['cores']} cores, {machine['torch_threads']} thread"
    return f"{place}; {packages}."
