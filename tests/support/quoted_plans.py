"""Plans quoted in docs/, computed by the planner: `make docs` renews the marked blocks.

A block begins with `<!-- plan: OVERRIDES -->`, `<!-- serving: OVERRIDES -->` or `<!-- verdict: OVERRIDES -->`: what
`sage-train OVERRIDES launch.plan=true` prints without the data, its line about serving engines, or its last line.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import train
from train.config.checks import check
from train.plan.search import plan
from train.plan.text import render

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"(<!-- (plan|serving|verdict): ([^\n]*) -->\n)```text\n.*?\n```(\n<!-- end -->)", re.DOTALL)


@cache
def plan_text(overrides: str) -> str:
    """Returns what `sage-train OVERRIDES launch.plan=true` prints, without its section on the data of this machine."""
    config = train.compose(*overrides.split(), "launch.plan=true")
    check(config)
    return render(plan(config))


def with_plans(page: str) -> str:
    """Returns the page with all blocks renewed."""
    return BLOCK.sub(lambda found: f"{found[1]}```text\n{quoted(found[2], found[3])}\n```{found[4]}", page)


def quoted(part: str, overrides: str) -> str:
    """Returns a part of a plan."""
    text = plan_text(overrides)
    *_, serving, verdict = text.split("\n\n")
    return {"plan": text, "serving": serving.removeprefix("the draft "), "verdict": verdict}[part]


def pages() -> list[Path]:
    """Returns the pages with plans."""
    return [page for page in sorted(DOCS.glob("*.md")) if BLOCK.search(page.read_text(encoding="utf-8"))]


if __name__ == "__main__":
    for page in pages():
        page.write_text(with_plans(page.read_text(encoding="utf-8")), encoding="utf-8")
