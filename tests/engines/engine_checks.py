"""What the checks of engines have in common: prompts, drafts trained on a target's own answers, exports as vLLM serves them,
vLLM in a process, and the table that compares it with our decoder.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

import sage
from benchmarks.engines.measure import pocket_prompts, question
from checkpoints.export.exporter import ExportOptions, export
from checkpoints.export.formats.base import ExportFormat
from data_prep.conversation import Conversation
from sage.bench.measurement import BenchPrompt
from sage.drafts.registry import draft_kind, resolve
from sage.io.tables import markdown_table
from train.config.schema import ObjectiveConfig
from train.distill.objective import Objective
from train.distill.teacher import Teacher
from train.serve_check.acceptance import Answers
from train.serve_check.vllm_process import PROMPTS_FILE, EngineFailed, EngineSetting, VllmProcess, write_prompts

DEPTH = 3  # drafted tokens per round
MAX_NEW_TOKENS = 48
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STEPS, BATCH, LR, ANCHORS = 120, 8, 3e-3, 12  # of the training of a draft
TOLERANCE = 0.01  # of the rounds
MIN_LOSS = 0.05  # of the tokens accepted per round
NEAR_TIE = 0.02  # of logits in float32, for a target in bfloat16
ACCEPTANCE = 0.05, 0.98  # of the first drafted token; outside, a check would not see differences
COMPARED = ("texts equal", "rounds: ours", "vLLM", "accepted: ours", "vLLM")
Damage = Callable[[dict[str, Any], Path], None]  # changes the config.json of an export, or other files of its folder


def new_parser(description: str | None, names: Sequence[str]) -> argparse.ArgumentParser:
    """Returns the options that checks of several cases have in common; makes transformers print errors only."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine-python", type=Path, required=True, help="interpreter of the environment with vLLM")
    parser.add_argument("--only", nargs="*", choices=names, help="only these cases")
    return parser


def exported(
    draft: Path,
    target: Path,
    out: Path,
    format_: ExportFormat,
    damage: Damage | None = None,
    dtype: torch.dtype = torch.float32,
    max_model_len: int = 2048,
) -> EngineSetting:
    """Exports a draft and damages the export; returns the setting that serves it."""
    options = ExportOptions(target=str(target), dtype=dtype, flavour=format_.flavour, allow_unserved=True)
    export(draft, out, format_.name, options)
    if damage is not None:
        config = json.loads((out / "config.json").read_text())
        damage(config, out)
        (out / "config.json").write_text(json.dumps(config))
    sizes = {"depth": DEPTH, "max_model_len": max_model_len}
    return EngineSetting(target=str(target), draft=out, speculative=format_.vllm_options, is_compiled=False, **sizes)


def questions(kind: str, split: str, count: int) -> list[Conversation]:
    """Returns first questions of a kind of the pocket world: `text`, `question` about an image, or `all` that have one."""
    if kind == "all":
        return pocket_prompts(count, split)
    return [question(split, index, kind) for index in range(count)]


def answers_to(target: sage.Target, prompts: Sequence[Conversation], folder: Path) -> list[dict[str, Any]]:
    """Returns training examples: prompts with the target's greedy answers, which are supervised; `folder` receives images."""
    folder.mkdir()
    rows = []
    for prompt in write_prompts(target, prompts, folder)[0]:
        inputs = prompt.inputs
        answer = sage.generate(target, None, inputs, "autoregressive", max_new_tokens=MAX_NEW_TOKENS).tokens
        asked = inputs["input_ids"][0]
        ids = torch.cat((asked, answer))
        pixels = {key: value for key, value in inputs.items() if key in target.family.pixel_keys}
        tokens = {key: value[0] for key, value in target.family.token_inputs(ids[None]).items()}
        rows.append({"input_ids": ids, "loss_mask": torch.arange(len(ids)) >= len(asked), **tokens, **pixels})
    return rows


def train(target: sage.Target, draft: Any, kind: str, rows: Sequence[dict[str, Any]]) -> None:
    """Trains a draft on examples."""
    is_one_pass = kind in ("block", "peagle")
    steps = draft.num_levels if is_one_pass else DEPTH
    config = ObjectiveConfig(ce_weight=1.0, feature_weight=0.0, steps=steps, anchors=ANCHORS)
    kept = [[1.0] * draft.num_levels] if is_one_pass else []
    student = resolve(draft_kind(kind).student)(draft, Objective(config), *kept)
    teacher = Teacher(target, getattr(draft.config, "image_inputs", "token"), draft.levels, draft.token_map)
    torch.manual_seed(0)
    student.train()
    optimizer = torch.optim.AdamW(student.parameters(), lr=LR, weight_decay=0.0)
    for step in range(STEPS):
        chosen = [rows[(step * BATCH + place) % len(rows)] for place in range(BATCH)]
        pairs = teacher(target.processor.collate(chosen))
        loss, *_ = student(pairs, teacher.lm_head)
        optimizer.zero_grad()
        (loss / pairs.mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()


class Engine:
    """vLLM in one process on one core, for the prompts of one target after the other; a context manager."""

    def __init__(self, scratch: Path, python: Path, core: int) -> None:
        self.scratch, self.python, self.core = scratch, python, core
        self._process: VllmProcess | None = None
        self._is_released = False
        self.last_error = ""

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.__exit__(None, None, None)
            self._process = None

    def trace(self, setting: EngineSetting, prompts: Path, is_released: bool = False) -> Answers | None:
        """Returns the answers of vLLM, `is_released` without our plugin; None if it fails, which is printed."""
        file = self.scratch / f"served_{PROMPTS_FILE}"
        shutil.copy(prompts, file)
        if is_released is not self._is_released:
            self.__exit__()
        if self._process is None:
            log, self._is_released = self.scratch / f"vllm-{time.monotonic_ns()}.log", is_released
            options = {"max_new_tokens": MAX_NEW_TOKENS, "cores": [self.core], "is_released": is_released}
            self._process = VllmProcess(self.python, file, log, **options)
        try:
            self._process.load(setting)
            answers = self._process.trace()
        except EngineFailed as error:
            print(error, flush=True)
            self.last_error = str(error)
            self.__exit__()
            return None
        for one in answers:  # its own metrics agree; the last round emits less than it accepts where the answer ends
            assert [emitted - 1 for emitted in one["rounds"][:-1]] == one["accepted"][: len(one["rounds"]) - 1]
        return Answers([one["tokens"] for one in answers], [one["rounds"] for one in answers], setting.depth)


@torch.no_grad()
def gap_at_difference(target: sage.Target, prompt: BenchPrompt, ours: list[int], theirs: list[int]) -> float | None:
    """Returns by how much the target prefers its best token to the next one where two answers first differ; None if equal."""
    if ours == theirs:
        return None
    place = next(place for place, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other)
    ids = torch.cat((prompt.inputs["input_ids"], torch.tensor([ours[:place]], dtype=torch.long)), 1)
    pixels = {key: value for key, value in prompt.inputs.items() if key in target.family.pixel_keys}
    logits = target.model(input_ids=ids, **target.family.token_inputs(ids), **pixels).logits[0, -1]
    first, second = logits.topk(2).values.tolist()
    return float(first - second)


@dataclass(frozen=True)
class Row:
    """A line of the table: the answers of both sides."""

    labels: list[str]
    ours: Answers
    theirs: Answers | None  # None if vLLM failed
    is_control: bool = False  # vLLM must accept less than our decoder
    is_fault: bool = False  # a fault of vLLM, whose rounds must differ from ours
    is_refused: bool | None = None  # whether vLLM refused, where it must
    by_number: bool = False  # rounds are compared by their number, not one by one
    gaps: Sequence[float | None] = ()  # of a target in low precision, see `gap_at_difference`: texts may differ at near-ties

    def problems(self) -> list[str]:
        """Returns what is wrong."""
        ours, theirs = self.ours, self.theirs
        if self.is_refused is not None:
            return [] if self.is_refused else ["vLLM does not refuse it"]
        if theirs is None:
            return ["vLLM failed, see above"]
        if any(gap is not None for gap in self.gaps):  # then rounds differ as well
            return [f"other texts, {gap:.3f} apart" for gap in self.gaps if gap is not None and gap > NEAR_TIE]
        found = [] if theirs.tokens == ours.tokens else ["other texts"]
        if self.is_fault:
            return [*found, *([] if theirs.rounds != ours.rounds else ["drafts as our decoder: the correction can go"])]
        if self.is_control:
            loss = 1 - sum(theirs.accepted) / sum(ours.accepted)
            return [*found, *([] if loss >= MIN_LOSS else [f"vLLM accepts only {loss:.1%} less than our decoder"])]
        if theirs.num_rounds != ours.num_rounds or not self.by_number and theirs.rounds != ours.rounds:
            found.append(f"other rounds, {theirs.num_rounds} and {ours.num_rounds} with our decoder")
        gap = max(abs(a - b) for a, b in zip(ours.accepted, theirs.accepted, strict=True))
        found += [] if gap <= TOLERANCE else [f"acceptance by position differs by {gap:.3f}"]
        lowest, highest = ACCEPTANCE
        return [*found, *([] if lowest < ours.accepted[0] < highest else ["the draft's acceptance is too low or too high"])]

    def cells(self) -> list[str]:
        """Returns the labels, and the cells of `COMPARED`."""
        ours, theirs = self.ours, self.theirs or Answers([[] for _ in self.ours.tokens], [], DEPTH)
        same = sum(a == b for a, b in zip(ours.tokens, theirs.tokens, strict=True))
        shares = [" ".join(f"{share:.3f}" for share in one.accepted) for one in (ours, theirs)]
        return [*self.labels, f"{same}/{len(ours.tokens)}", str(ours.num_rounds), str(theirs.num_rounds), *shares]


def conclude(what: str, head: Sequence[str], rows: Sequence[Row], begin: float) -> int:
    """Prints the table, the result, and the seconds since `begin`; returns the exit code."""
    print(markdown_table([*head, *COMPARED], [row.cells() for row in rows], "<"))
    failures = [f"FAILED {' '.join(row.labels)}: {problem}" for row in rows for problem in row.problems()]
    print("\n".join(failures) or f"{what}: all checks pass")
    print(f"{time.monotonic() - begin:.0f} s")
    return 1 if failures else 0
