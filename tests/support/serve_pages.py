"""The page of a serve check made by hand, without a model and an engine."""

from __future__ import annotations

from collections.abc import Sequence

from support.data_helpers import make_image
from support.traces import Words

from sage.bench.measurement import BenchPrompt
from train.serve_check.acceptance import Answers, Measured
from train.serve_check.page import AskedPrompt, render_check

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
        asked.append(AskedPrompt.of(BenchPrompt(name=text, family=text, inputs={}, messages=talk)))
    tokens = [list(range(LENGTH))] * len(texts)
    ours, theirs = (Answers(tokens, [rounds] * len(texts), DEPTH) for rounds in (OURS, THEIRS))
    rows = Measured(ours, ours, theirs, ours).rows("vLLM")
    return render_check(rows, [fault], asked, Words(texts), dict.fromkeys(NAMED, texts[0]))
