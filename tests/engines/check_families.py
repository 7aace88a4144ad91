"""Serves drafts for targets of every family with vLLM and compares it with our decoder: `make engines-families` runs this.

Each family has a small random target and an `eagle3` draft, trained on the target's own answers until some of its tokens are
accepted. Its export is served by vLLM (float32, greedy, `DEPTH` drafted tokens per round) and compared with our policy `chain`
of the same depth: the same token ids and rounds for every prompt, acceptance by position within the tolerance of
engine_checks.py. Prompts of a family with images have one each. LLaVA-OneVision is also the pocket target, and a small one in
the published layout. Levels one too low are a negative control, which must be accepted less; without our plugin, vLLM must
refuse what it cannot serve.

Evidence for `Family.served_by`: it names vLLM only where this check passes.

    python tests/engines/check_families.py --engine-python .venv-engines/bin/python [--only NAME ...]
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from engine_checks import DEPTH, Engine, Row, conclude, exported, new_parser, off_by_one_levels
from layouts import LAYOUTS, PUBLISHED, save_target

import sage
from checkpoints.export.formats import find_format
from data_prep.conversation import Conversation
from data_prep.pocket import world
from sage.bench.measurement import BenchPrompt
from sage.io.machine import available_cores, pin
from train.config.schema import ObjectiveConfig
from train.distill.objective import Objective
from train.distill.student import HeadStudent
from train.distill.teacher import Teacher
from train.serve_check.acceptance import Answers, decode_chain
from train.serve_check.vllm_process import PROMPTS_FILE, write_prompts

NUM_PROMPTS, MAX_NEW_TOKENS = 8, 48
TRAIN_PROMPTS, STEPS, BATCH, LR = 32, 80, 8, 3e-3
ONEVISION = "pocket_llava_onevision"
REFUSAL = "Model does not support EAGLE3 interface"  # by vLLM as released
NAMES = [*(name for name in LAYOUTS if name != "llava"), ONEVISION, PUBLISHED]  # LLaVA-1.5: check_one_pass.py


def main() -> int:
    """Builds, trains, exports, serves and compares; returns 0 if all checks pass."""
    parser = new_parser(__doc__, NAMES)
    parser.add_argument("--scratch", type=Path, help="folder of targets, exports and logs, kept; default: a temporary one")
    args, begin = parser.parse_args(), time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        rows = check(args.only or NAMES, args.scratch or Path(temporary), args.engine_python)
    return conclude("families", ["target"], rows, begin)


def check(names: Sequence[str], scratch: Path, python: Path) -> list[Row]:
    """Prepares one family after the other on the first core; vLLM serves them on the last one meanwhile."""
    cores = available_cores()
    torch.set_num_threads(1)
    served = []
    with Engine(scratch, python, cores[-1], MAX_NEW_TOKENS) as engine, ThreadPoolExecutor(1) as threads:
        pin(0, cores[:1])
        for name in names:
            begin = time.monotonic()
            ours = prepare(name, scratch / name)
            print(f"prepared {name}: {time.monotonic() - begin:.0f} s", flush=True)
            served.append(threads.submit(serve, engine, name, scratch / name, ours))
        return [row for future in served for row in future.result()]


def prepare(name: str, folder: Path) -> Answers:
    """Builds the target, trains its draft on its own answers, and decodes the prompts."""
    target = save_target(name, folder / "target")
    draft = train_draft(target, folder)
    draft.save_pretrained(folder / "draft")
    count = NUM_PROMPTS if name in LAYOUTS else 2 * NUM_PROMPTS
    prompts, _ = write_prompts(target, questions(_kind(target), "test", count), folder)
    return decode_chain(target, draft.eval(), prompts, DEPTH, MAX_NEW_TOKENS)


def serve(engine: Engine, name: str, folder: Path, ours: Answers) -> list[Row]:
    """Serves a family's draft, a control with levels one too low, and without our plugin, which vLLM must refuse."""
    begin, eagle3, file = time.monotonic(), find_format("eagle3"), folder / PROMPTS_FILE
    setting = exported(folder / "draft", folder / "target", folder / "export", eagle3)
    rows = [Row([name], ours, engine.trace(setting, file))]
    if name == ONEVISION:
        control = exported(folder / "draft", folder / "target", folder / "control", eagle3, off_by_one_levels)
        label = f"control: {name}, {off_by_one_levels.__name__}"
        rows.append(Row([label], ours, engine.trace(control, file), is_control=True))
    if name == PUBLISHED:
        released = engine.trace(setting, file, is_released=True)
        rows.append(Row([f"{name}, vLLM as released"], ours, released, is_refused=REFUSAL in engine.last_error))
    print(f"served {name}: {time.monotonic() - begin:.0f} s; {' | '.join(rows[0].cells()[1:])}", flush=True)
    return rows


def questions(kind: str, split: str, count: int) -> list[Conversation]:
    """Returns first questions of a kind of the pocket world: `text`, or `question` about an image."""
    talks = [world.sample(split, index, [kind]) for index in range(count)]
    return [replace(talk, id=f"{talk.id}-{kind}", family=kind, messages=talk.messages[:1]) for talk in talks]


def _kind(target: sage.Target) -> str:
    return "question" if target.family.placeholders else "text"


def train_draft(target: sage.Target, folder: Path) -> Any:
    """Trains an EAGLE-3 draft on the target's answers to training prompts, with levels that a config names."""
    levels = [2, target.num_layers // 2, target.num_layers - 2]
    draft: Any = sage.new_draft(target, "eagle3", seed=0, image_inputs="token", feature_levels=levels)
    objective = ObjectiveConfig(ce_weight=1.0, feature_weight=0.0, steps=DEPTH)
    rows = answers_to(target, questions(_kind(target), "train", TRAIN_PROMPTS), folder / "training")
    train(target, HeadStudent(draft, Objective(objective)), rows, STEPS)
    return draft


def train(target: sage.Target, student: Any, rows: Sequence[dict[str, Any]], steps: int) -> None:
    """Trains the draft of a student on `rows`."""
    teacher = Teacher(target, "token", student.draft.levels, student.draft.token_map)
    student.train()
    optimizer = torch.optim.AdamW(student.parameters(), lr=LR, weight_decay=0.0)
    for step in range(steps):
        chosen = [rows[(step * BATCH + place) % len(rows)] for place in range(BATCH)]
        pairs = teacher(target.processor.collate(chosen))
        loss, *_ = student(pairs, teacher.lm_head)
        optimizer.zero_grad()
        (loss / pairs.mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()


def answers_to(target: sage.Target, prompts: Sequence[Conversation], folder: Path) -> list[dict[str, Any]]:
    """Returns training examples: prompts with the target's answers; `folder` receives their images."""
    folder.mkdir()
    return [answered(target, prompt) for prompt in write_prompts(target, prompts, folder)[0]]


def answered(target: sage.Target, prompt: BenchPrompt) -> dict[str, Any]:
    """Returns a training example: a prompt with the target's greedy answer, which is supervised."""
    inputs = prompt.inputs
    answer = sage.generate(target, None, inputs, "autoregressive", max_new_tokens=MAX_NEW_TOKENS).tokens
    question = inputs["input_ids"][0]
    ids = torch.cat((question, answer))
    row = {key: value for key, value in inputs.items() if key in target.family.pixel_keys}
    tokens = {key: value[0] for key, value in target.family.token_inputs(ids[None]).items()}
    return {"input_ids": ids, "loss_mask": torch.arange(len(ids)) >= len(question), **tokens, **row}


if __name__ == "__main__":
    sys.exit(main())
