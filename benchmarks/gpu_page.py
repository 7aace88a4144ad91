"""`python -m benchmarks.gpu_page FOLDER`: writes the figures of benchmarks/first_gpu_hour.sh into docs/gpu.md.

A block between `<!-- figures: NAME NAME -->` and `<!-- end -->` receives the tables of these steps, each with its command and
machine; of a step without a table its output. A block without a figure in the folder keeps its text.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from benchmarks.figures import fill_blocks, read_figures
from sage.commands.cli import new_parser, run
from sage.io.files import write_text
from sage.io.tables import markdown_table

PAGE = Path(__file__).parents[1] / "docs" / "gpu.md"
STEPS = "steps"  # file with a line `NAME CODE SECONDS` per step, and the name of its block
HIDDEN = re.compile(r"(error|warning): |USDT:|\s*$")  # lines of logs that no page quotes
MAX_LINES = 40


def filled(text: str, folder: Path) -> str:
    """Returns a page with the figures that the folder has."""

    def content(names: str) -> str | None:
        parts = [part for name in names.split() if (part := part_of(name, folder))]
        return "\n\n".join(parts) or None

    return fill_blocks(text, "figures", content)


def part_of(name: str, folder: Path) -> str | None:
    """Returns the figures of a step in Markdown; None if the folder has none."""
    if name == STEPS:
        return _steps(folder / STEPS)
    if (folder / f"{name}.json").is_file():
        command, figures = read_figures(folder / f"{name}.json")
        lines = (f"`{command}`, measured on {figures.machine}:", figures.title + ".", "; ".join(figures.notes) + ".")
        table = markdown_table(figures.head, figures.rows, "<" + ">" * (len(figures.head) - 1))
        return "\n\n".join((lines[0], lines[1], table, lines[2]))
    if (folder / f"{name}.txt").is_file():
        lines_of_log = (folder / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        kept = [line.rstrip() for line in lines_of_log if not HIDDEN.match(line)]
        return "\n".join(("```text", kept[0], *kept[1:][-MAX_LINES:], "```"))
    return None


def _steps(path: Path) -> str | None:
    if not path.is_file():
        return None
    rows = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    results = [(f"`{name}`", "ran" if code == "0" else f"failed, exit code {code}", seconds) for name, code, seconds in rows]
    return markdown_table(("step", "result", "seconds"), results, "<<>")


def main() -> int:
    parser = new_parser("python -m benchmarks.gpu_page", description=__doc__)
    parser.add_argument("folder", metavar="FOLDER", help="written by benchmarks/first_gpu_hour.sh")
    parser.add_argument("--out", metavar="FILE", default=str(PAGE), help="page to write; default: docs/gpu.md")
    arguments = parser.parse_args()
    folder = Path(arguments.folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; give the one that benchmarks/first_gpu_hour.sh has written")
    write_text(Path(arguments.out), filled(PAGE.read_text(encoding="utf-8"), folder))
    print(f"written: {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
