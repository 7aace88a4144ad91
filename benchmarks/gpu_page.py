"""`python -m benchmarks.gpu_page [DIR ..]`: writes what benchmarks.gpu_quarter_hour has measured, wherever, into docs/gpu.md.

A block between `<!-- figures: NAME NAME -->` and `<!-- end -->` receives the tables of these steps, each with its command and
machine; of a step without a table its output. A block without a figure keeps its text. Without DIR, only the block `expected`
is written, with what is expected of a GPU.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from benchmarks.figures import Figures, fill_blocks
from benchmarks.gpu_expected import HEAD, expected
from benchmarks.gpu_quarter_hour import FIGURES, RESULTS
from sage.commands.cli import new_parser, run
from sage.io.files import read_json, write_text
from sage.io.tables import markdown_table

PAGE = Path(__file__).parents[1] / "docs" / "gpu.md"
HIDDEN = re.compile(r"(error|warning): |USDT:|\s*$")  # lines of logs that no page quotes


def filled(text: str, results: list[dict[str, Any]], figures: dict[str, Any]) -> str:
    """Returns a page with these figures."""
    commands = {row["name"]: f"`python {' '.join(row['command'][1:])}`" for row in results}

    def content(names: str) -> str | None:
        if names == "steps" and results:
            return markdown_table(
                ("step", "", "seconds"), [(row["name"], row["outcome"], str(row["seconds"])) for row in results], "<<>"
            )
        if names == "expected":
            return markdown_table(HEAD, expected(figures), "<>>>")
        parts = [part for name in names.split() if (part := part_of(figures.get(name, {}), commands.get(name, "")))]
        return "\n\n".join(parts) or None

    return fill_blocks(text, "figures", content)


def part_of(step: dict[str, Any], command: str) -> str | None:
    """Returns the figures of a step in Markdown; None if it has none."""
    table = step.get("files", {}).get("table.json")
    if table is not None:
        figures = Figures.of(table)
        cells = markdown_table(figures.head, figures.rows, "<" + ">" * (len(figures.head) - 1))
        head = f"`{table['command']}`, measured on {figures.machine}:"
        return "\n\n".join((head, f"{figures.title}.", cells, f"{'; '.join(figures.notes)}."))
    lines = [line.rstrip() for line in step.get("output", "").splitlines() if not HIDDEN.match(line)]
    return "\n".join((f"{command}:\n", "```text", *lines, "```")) if lines else None


def main() -> int:
    parser = new_parser("python -m benchmarks.gpu_page", description=__doc__)
    parser.add_argument(
        "folders", metavar="DIR", nargs="*", type=Path, help="--out of gpu_quarter_hour; the last one's steps win"
    )
    parser.add_argument("--out", metavar="FILE", type=Path, default=PAGE, help="page to write; default: docs/gpu.md")
    args = parser.parse_args()
    results, figures = dict[str, Any](), dict[str, Any]()
    for folder in args.folders:
        results |= {row["name"]: row for row in read_json(folder / RESULTS)["steps"]}
        figures |= {name: step for name, step in read_json(folder / FIGURES).items() if step["output"]}
    write_text(args.out, filled(PAGE.read_text(encoding="utf-8"), list(results.values()), figures))
    print(f"written: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
