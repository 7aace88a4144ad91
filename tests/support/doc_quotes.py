"""What the pages quote of the program: plans and the table of policies, which `make docs` renews, and messages.

A block between `<!-- plan: OVERRIDES -->`, `<!-- serving: OVERRIDES -->` or `<!-- verdict: OVERRIDES -->` and `<!-- end -->`
is what `sage-train OVERRIDES launch.plan=true` prints without the data, its line about serving engines, or its last line.

A message is one of tests/support/messages.json, except for paths, numbers and punctuation; `...` stands for any text. Messages
are the lines that begin with `error: ` or `warning: ` of any block, and between `<!-- messages -->` and `<!-- end -->` every
line, or in a table the code spans that begin so.
"""

from __future__ import annotations

import json
import re
from functools import cache

from support.doc_pages import ROOT, blocks, pages, read
from support.messages import SNAPSHOT

import train
from sage.bench.policies import START, with_table
from train.config.checks import check
from train.plan.search import plan
from train.plan.text import render

PLAN = re.compile(r"(<!-- (plan|serving|verdict): ([^\n]*) -->\n)```text\n.*?\n```(\n<!-- end -->)", re.DOTALL)
MESSAGES = re.compile(r"<!-- messages.*? -->\n(.*?)\n<!-- end -->", re.DOTALL)
REPORTED = re.compile(r"(?:error|warning): .*")
FILE_OR_NUMBER = re.compile(r"[^\s:;,()]*(?:[\d/]|\bTMP\b|\.jsonl?\b|\.safetensors\b)[^\s:;,()]*|\?")


@cache
def plan_text(overrides: str) -> str:
    """Returns what `sage-train OVERRIDES launch.plan=true` prints, without its section on the data of this machine."""
    config = train.compose(*overrides.split(), "launch.plan=true")
    check(config)
    return render(plan(config))


def quoted_plan(part: str, overrides: str) -> str:
    """Returns a plan, its line about serving engines, or its verdict."""
    text = plan_text(overrides)
    *_, serving, verdict = text.split("\n\n")
    return {"plan": text, "serving": serving.removeprefix("the draft "), "verdict": verdict}[part]


def renewed(text: str) -> str:
    """Returns the text of a page with current plans and a current table of policies."""
    text = PLAN.sub(lambda found: f"{found[1]}```text\n{quoted_plan(found[2], found[3])}\n```{found[4]}", text)
    return with_table(text) if START in text else text


def check_generated(page: str) -> None:
    """Raises AssertionError if a plan or the table of policies is not the program's."""
    text = read(page)
    for mark in re.findall(r"<!-- (?:plan|serving|verdict): .* -->\n", text):
        assert any(found.group().startswith(mark) for found in PLAN.finditer(text)), f"{page}: {mark}: no block of text"
    assert renewed(text) == text, f"{page}: run `make docs`"


def check_messages(page: str) -> None:
    """Raises AssertionError if no test records a message that the page quotes."""
    quoted = [line for block in blocks(page) if block.language == "text" for line in REPORTED.findall(block.text)]
    assert len(MESSAGES.findall(read(page))) == read(page).count("<!-- messages"), f"{page}: a mark of messages has no end"
    for marked in MESSAGES.findall(read(page)):
        quoted += re.findall(rf"`({REPORTED.pattern}?)`", marked) or marked.splitlines()[1:-1]
    for message in quoted:
        clauses = _clauses(re.sub("^(error|warning): ", "", message))
        pattern = re.compile(".*?".join(map(re.escape, clauses)))
        assert any(map(pattern.search, _recorded())), f"{page}: no test records the message {message!r}: {pattern.pattern}"


def _clauses(message: str) -> list[str]:
    """Splits a message at punctuation, and leaves out paths and numbers."""
    parts = re.split(r"[:;,()\[\]]|\.\.\.|\0", FILE_OR_NUMBER.sub("\0", message))
    return [part.strip() for part in parts if re.search(r"\w", part)]


@cache
def _recorded() -> list[str]:
    return [" ".join(_clauses(message)) for message in json.loads(SNAPSHOT.read_text(encoding="utf-8")).values()]


if __name__ == "__main__":
    for name in pages():
        (ROOT / name).write_text(renewed(read(name)), encoding="utf-8")
