"""Renders docs/results.md, its plots and the README's headline table from the figures; equal figures give an equal page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from matplotlib.figure import Figure

from benchmarks.papers.figures import FIGURES_DIR, Json
from benchmarks.papers.page.headline import engines_table, headline_table
from benchmarks.papers.page.markdown import Expectation, Figures, expectations_section, fill, join, listing
from sage.io.files import write_text
from train.report import style

PAGE = "results.md"
README_START, README_END = "<!-- headline: written by make results -->", "<!-- headline ends -->"
ENGINES_START, ENGINES_END = "<!-- engines: written by make results -->", "<!-- engines end -->"
STUDIES = (  # in the order of their sections; one module and one template each
    *("policies", "epochs", "compressor", "pruning", "length", "entropy", "calibration", "ablations", "temperature"),
    *("coupling", "projection", "engines"),
)
REQUIRED = {"projection": ("overhead", "projection", "costs")}  # prefixes of figure names; default: the study


class Section(Protocol):
    """The module of a section; `PLOTS` are drawn by file name."""

    PLOTS: Mapping[str, Callable[[Figures], Figure]]

    def values(self, figures: Figures) -> dict[str, Any]:
        """Returns the placeholders of the template, except `number` and `source`."""
        ...

    def expectations(self, figures: Figures) -> list[Expectation]:
        """Returns the section's part of the list of expectations."""
        ...


SECTIONS = {study: cast(Section, import_module(f"{__package__}.{study}")) for study in STUDIES}


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
            for file, draw in SECTIONS[study].PLOTS.items():
                style.save(draw(figures), folder / file)
    write_text(docs / PAGE, render(files))
    readme = docs.parent / "README.md"
    if readme.is_file():
        write_text(readme, with_headline(readme.read_text(encoding="utf-8"), figures))
    return docs / PAGE


def with_headline(readme: str, figures: Figures) -> str:
    """Returns the README with the headline tables between the markers that it has; a table without figures is unchanged."""
    readme = _between(readme, README_START, README_END, headline_table(figures))
    return _between(readme, ENGINES_START, ENGINES_END, engines_table(figures))


def _between(text: str, start: str, end: str, table: str) -> str:
    if not table or start not in text:
        return text
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}\n\n{table}\n\n{end}{after}"


def render(files: Mapping[str, Json]) -> str:
    """Returns the text of the page."""
    figures = _figures(files)
    shown, table = _shown(figures), headline_table(figures)
    machines = list(dict.fromkeys(_machine_line(content) for content in files.values()))
    expectations = [one for study in shown for one in SECTIONS[study].expectations(figures)]
    page = fill(
        "results",
        machines="\n".join(f"{number}. {line}" for number, line in enumerate(machines, start=1)),
        headline=fill("headline", table=table) if table else "",
        expectations=expectations_section(expectations),
        sections=join(*(_section(number, study, files, machines) for number, study in enumerate(shown, start=1))),
    )
    return page + "\n"


def _figures(files: Mapping[str, Json]) -> Figures:
    return {name: content["figures"] for name, content in files.items()}


def _required(study: str) -> tuple[str, ...]:
    return REQUIRED.get(study, (study,))


def _shown(figures: Figures) -> list[str]:
    """Returns the studies of which all required figures exist."""
    return [one for one in STUDIES if all(any(name.startswith(prefix) for name in figures) for prefix in _required(one))]


def _section(number: int, study: str, files: Mapping[str, Json], machines: list[str]) -> str:
    names = [name for name in files if name.startswith(_required(study))]
    seconds = sum(files[name]["seconds"] for name in names)
    links = ", ".join(f"[{name}.json]({FIGURES_DIR}/{name}.json)" for name in names)
    used = [str(place) for place, line in enumerate(machines, 1) if any(_machine_line(files[name]) == line for name in names)]
    where = f", on machine{'s' if len(used) > 1 else ''} {listing(used)}" if len(machines) > 1 else ""
    source = f"`make results-{study}`: {seconds:.0f} s after training{where}. Figures: {links}."
    return fill(study, number=number, source=source, **SECTIONS[study].values(_figures(files)))


def _machine_line(content: Json) -> str:
    machine, versions = content["machine"], content["versions"]
    packages = ", ".join(f"{package} {version}" for package, version in versions.items())
    place = f"{machine['system']}, {machine['cpu']}, {machine['cores']} cores, {machine['torch_threads']} thread"
    return f"{place}; {packages}."
