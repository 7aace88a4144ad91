"""Pages made by hand, without a model and an engine, in which every name and text can be hostile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from support.data_helpers import assistant, make_image, make_processor, user
from support.reports import example_report
from support.traces import HOSTILE, Words, made_trace

from data_prep.chat import build_example
from data_prep.conversation import Conversation
from data_prep.tools.stats import measure, render_html
from sage.bench.measurement import BenchPrompt
from train.report import page
from train.serve_check.acceptance import Answers, Measured
from train.serve_check.page import render_check
from train.validation.validate import PromptTrace, write

NAMED = ("draft", "export", "target", "engine")
DEPTH, LENGTH = 3, 30
OURS = [4, 1, 2, 3, 1, 4, 4, 2, 1, 3, 4]  # tokens per round
THEIRS = [4, 1, 2, 1, 2, 1, 4, 4, 2, 1, 3, 4]  # three tokens by two rounds
NUM_TOKENS = 3  # of the rounds of an answer that differ


def made_check(texts: Sequence[str], fault: str = "engine bad: <b>") -> str:
    """The page with a prompt for every text, in which the engine emits tokens 8 to 10 by two rounds."""
    asked = []
    for text in texts:
        content = [{"type": "image", "image": make_image()}, {"type": "text", "text": text}]
        talk = [{"role": "user", "content": content}]
        asked.append(BenchPrompt(name=text, family=text, inputs={}, messages=talk))
    tokens = [list(range(LENGTH))] * len(texts)
    ours, theirs = (Answers(tokens, [rounds] * len(texts), DEPTH) for rounds in (OURS, THEIRS))
    rows = Measured(ours, ours, theirs, ours).rows("vLLM")
    return render_check(rows, [fault], asked, Words(texts), dict.fromkeys(NAMED, texts[0]))


def data_page() -> str:
    """The page of a data set."""
    processor = make_processor("llava_onevision")
    talk = Conversation(HOSTILE[0], [user(make_image(), HOSTILE[1]), assistant(HOSTILE[0])], HOSTILE[1])
    example = build_example(talk, processor)
    return render_html(HOSTILE[0], measure([(talk, example)], 1, processor), [(talk, example)], processor)


def report_page(folder: Path) -> Path:
    """The page of a validation with a plot, prompts and a trace."""
    report, prompts = example_report(), []
    for place, text in enumerate(HOSTILE):
        image = {"type": "image", "image": make_image()}
        talk = [{"role": "user", "content": [image, {"type": "text", "text": text}]}]
        prompts.append(BenchPrompt(name=f"{place} {text}", inputs={}, messages=talk))
    for number, part in enumerate(report["policies"].values()):
        part["per_prompt"] = [
            {"name": prompt.name, "family": HOSTILE[0], "tokens": 9, "tokens_per_target_pass": 1.0 + (place + number) % 4}
            for place, prompt in enumerate(prompts)
        ]
    families = {HOSTILE[1]: report["by_family"]["caption"]}
    report |= {"target": HOSTILE[0], "draft": HOSTILE[1], "command": HOSTILE[0], "by_family": families}
    shown = made_trace(8, 5, HOSTILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "PLOTS", page.PLOTS[:1])
        write(report, folder, prompts, [PromptTrace(prompt=prompts[0].name, policy="sage", page="traces/1.html", trace=shown)])
    return folder / "report.html"


def hostile_pages(folder: Path) -> dict[str, Path]:
    """Writes every page into a folder; returns their paths by kind."""
    pages = {name: folder / f"{name}.html" for name in ("trace", "check", "data")}
    made_trace(30, 9, HOSTILE).save(pages["trace"])
    pages["check"].write_text(made_check(HOSTILE), encoding="utf-8")
    pages["data"].write_text(data_page(), encoding="utf-8")
    return pages | {"report": report_page(folder / "<img src=x onerror='window.hacked = 3'>")}
