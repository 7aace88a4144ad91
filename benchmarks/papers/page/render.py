"""docs/results.md, from the figures alone: the same figures give the same page, which a test holds them to."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from benchmarks.papers.figures import Json
from benchmarks.papers.lab import FIGURES
from benchmarks.papers.page import dynamics, plots, policies, studies, studies_plot, training
from benchmarks.papers.page.parts import Finding, Found, Picture, Section, listed, paragraphs
from benchmarks.papers.page.tables import table
from sage.bench import write_text
from train.report import style

PAGE = "results.md"
README_START, README_END = "<!-- headline: written by make results -->", "<!-- headline ends -->"
HEADLINE = Picture("headline.png", "Speed by decoder, captions and all families", plots.draw_headline)

SECTIONS = (
    Section(
        "policies",
        "Policies and task families",
        ("policies_",),
        policies.body,
        policies.findings,
        (
            Picture("families.png", "Speedup by task family", plots.draw_families),
            Picture("time.png", "Decoding time by stage", plots.draw_time),
        ),
    ),
    Section(
        "epochs",
        "More epochs",
        ("epochs",),
        training.epochs,
        training.epoch_findings,
        (Picture("epochs.png", "Tokens per target pass by epoch", plots.draw_epochs),),
    ),
    Section(
        "compressor",
        "Compressors of the draft's visual input",
        ("compressor",),
        training.compressor,
        training.compressor_findings,
        (Picture("compressor.png", "Tokens per pass and speedup by compressor", plots.draw_compressors),),
    ),
    Section(
        "pruning",
        "Pruning while decoding",
        ("pruning",),
        training.pruning,
        training.pruning_findings,
        (Picture("pruning.png", "Acceptance and speedup by pruning ratio", plots.draw_pruning),),
    ),
    Section(
        "length",
        "Length of the answer",
        ("length",),
        dynamics.length,
        dynamics.length_findings,
        (Picture("length.png", "Acceptance by length", studies_plot.draw_length),),
    ),
    Section(
        "entropy",
        "How long the draft's confidence remembers",
        ("entropy",),
        dynamics.entropy,
        dynamics.entropy_findings,
        (Picture("entropy.png", "Autocorrelation of alpha by lag", studies_plot.draw_entropy),),
    ),
    Section(
        "calibration",
        "Does entropy predict acceptance?",
        ("calibration_",),
        studies.calibration,
        studies.calibration_findings,
        (
            Picture("reliability.png", "Predicted against observed acceptance", studies_plot.draw_reliability),
            Picture("calibration.png", "Calibration error by depth", studies_plot.draw_errors),
        ),
    ),
    Section(
        "ablations",
        "What each part is worth",
        ("ablations",),
        studies.ablations,
        studies.ablation_findings,
        (Picture("ablations.png", "Replayed speed by variant", studies_plot.draw_ablations),),
    ),
    Section(
        "temperature",
        "Temperature",
        ("temperature",),
        dynamics.temperature,
        dynamics.temperature_findings,
        (Picture("temperature.png", "Tokens per pass by temperature", studies_plot.draw_temperature),),
    ),
    Section(
        "projection",
        "Overhead, and what a GPU would give",
        ("overhead", "projection", "costs"),
        studies.projection,
        studies.overhead_findings,
    ),
)


def write_page(files: Mapping[str, Json], docs: Path) -> Path:
    """Writes the page, its pictures, and the headline of the README beside `docs` where that has a place for it.

    Args:
        files: by name, as `Figures.read_all` gives them.

    Returns:
        the page's path.
    """
    docs.mkdir(parents=True, exist_ok=True)
    found = {name: content["figures"] for name, content in files.items()}
    drawn = [picture.file for picture in pictures() if _draw(picture, found, docs / FIGURES)]
    write_text(docs / PAGE, render(files, drawn))
    readme = docs.parent / "README.md"
    if readme.is_file() and README_START in (text := readme.read_text(encoding="utf-8")):
        write_text(readme, with_headline(text, found))
    return docs / PAGE


def pictures() -> list[Picture]:
    """All that the page may show."""
    return [HEADLINE, *(picture for section in SECTIONS for picture in section.pictures)]


def _draw(picture: Picture, found: Found, folder: Path) -> bool:
    with style.look():
        made = picture.draw(found)
        if made is not None:
            folder.mkdir(parents=True, exist_ok=True)
            style.save(made, folder / picture.file)
    return made is not None


def with_headline(readme: str, found: Found) -> str:
    """The README with the headline's table between its two marks; as it was before there are figures."""
    before, _, rest = readme.partition(README_START)
    _, _, after = rest.partition(README_END)
    if not policies.headline(found):
        return readme
    return f"{before}{README_START}\n\n{policies.headline(found)}\n\n{README_END}{after}"


def render(files: Mapping[str, Json], drawn: Collection[str]) -> str:
    """The page's text.

    Args:
        drawn: files of pictures that exist.
    """
    found = {name: content["figures"] for name, content in files.items()}
    shown = [section for section in SECTIONS if section.names(found)]
    parts = [
        "# Results",
        "The papers' questions asked of this code on the pocket suite. Every number comes out of a file in "
        f"[{FIGURES}/]({FIGURES}/); `make results` trains what is missing, measures what has changed and writes this page. "
        "To measure something again, delete its file.",
        _machine(files),
        f"![{HEADLINE.caption}]({FIGURES}/{HEADLINE.file})" if HEADLINE.file in drawn else "",
        policies.headline(found),
        _headline_note(found),
        _expectations(shown, found),
        *(_section(number, section, files, drawn) for number, section in enumerate(shown, start=1)),
    ]
    return paragraphs(*parts) + "\n"


def _headline_note(found: Found) -> str:
    if not policies.headline(found):
        return ""
    return (
        "Speedup, decode only, over the fastest autoregressive decoder of the same run; *identical* counts texts equal to "
        "the target's own, both targets together. Policies as tuned on the validation split; `hf_assisted` drafts with a "
        "smaller model, distilled from some of the target's own layers."
    )


def _machines(files: Mapping[str, Json]) -> dict[str, int]:
    """Where it was measured, each place with its number on the page."""
    lines = dict.fromkeys(_machine_line(content) for content in files.values())
    return {line: number for number, line in enumerate(lines, start=1)}


def _machine(files: Mapping[str, Json]) -> str:
    """Where it was measured; a list if not all on one machine."""
    lines = _machines(files)
    return "\n".join(lines) if len(lines) < 2 else "\n".join(f"{number}. {line}" for line, number in lines.items())


def _where(names: Collection[str], files: Mapping[str, Json]) -> str:
    """Which of several machines these figures come from; nothing if there is but one."""
    lines = _machines(files)
    if len(lines) < 2:
        return ""
    numbers = sorted({lines[_machine_line(files[name])] for name in names})
    return f", on {'machine' if len(numbers) == 1 else 'machines'} {listed([str(number) for number in numbers])}"


def _machine_line(content: Json) -> str:
    machine, versions = content["machine"], content["versions"]
    named = ", ".join(f"{package} {version}" for package, version in versions.items())
    place = f"{machine['system']}, {machine['cpu']}, {machine['cores']} cores, {machine['torch_threads']} thread"
    return f"Measured on {place}; {named}."


def _expectations(shown: list[Section], found: Found) -> str:
    findings = [one for section in shown for one in section.findings(found)]
    if not findings:
        return ""
    missed = [one for one in findings if not one.holds]
    head = ["expected", "held", "measured"]
    return paragraphs(
        "## What was expected, and what came out",
        f"{len(findings) - len(missed)} of {len(findings)} held. Where one did not, the last column says what the figures "
        "point to.",
        table(head, [_finding_row(one) for one in sorted(findings, key=lambda one: one.holds)], left=3),
    )


def _finding_row(one: Finding) -> list[str]:
    return [one.claim, "yes" if one.holds else "**no**", one.said]


def _section(number: int, section: Section, files: Mapping[str, Json], drawn: Collection[str]) -> str:
    found = {name: content["figures"] for name, content in files.items()}
    names = section.names(found)
    seconds = sum(files[name]["seconds"] for name in names)
    sources = ", ".join(f"[{name}.json]({FIGURES}/{name}.json)" for name in names)
    return paragraphs(
        f"## {number}. {section.title}",
        f"`make results-{section.item}`, {seconds:.0f} s of measuring after training{_where(names, files)}; {sources}.",
        *(f"![{picture.caption}]({FIGURES}/{picture.file})" for picture in section.pictures if picture.file in drawn),
        section.body(found),
    )
