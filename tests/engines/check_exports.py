"""Serves our exports with vLLM and compares it with our decoder: `make engines` builds the environments and runs this.

Short training runs on the pocket Qwen2.5-VL yield the drafts. Each is exported, served by vLLM (float32, greedy, prompts with
an image, `DEPTH` drafted tokens) and compared with the trained draft, rounded to the export's dtype, under our policy `chain`
of the same depth:

1. the same token ids for every prompt;
2. the same number of rounds;
3. at every position, the shares of rounds that accept it differ by at most `TOLERANCE`. The last round of an answer does not
   count: what it accepts is truncated at the answer's end;
4. negative controls: exports that vLLM loads without a word although they are wrong for it must yield the same texts, and at
   least `MIN_LOSS` fewer accepted tokens.

vLLM 0.32 drafts wrongly after images, which our plugin corrects (`checkpoints.vllm_plugin`). It is also run as released,
without the plugin: once its rounds equal ours, the correction can go.

Work is divided among the cores: every core trains drafts in one process, then serves exports in one process of vLLM.

    python tests/engines/check_exports.py --engine-python .venv-engines/bin/python [--runs DIR] [--only NAME ...]
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from engine_checks import DEPTH, Damage, Engine, Row, conclude, exported, new_parser, off_by_one_levels
from safetensors.torch import load_file, save_file

import sage
from benchmarks.engines.measure import FAMILIES, pocket_prompts
from checkpoints.export.formats import variants
from checkpoints.run_folder import DRAFT
from sage.io.machine import available_cores, pin
from train.serve_check.acceptance import Answers, decode_chain
from train.serve_check.vllm_process import write_prompts

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "data_prep" / "pocket" / "targets" / "pocket_qwen2_5_vl"
NUM_PROMPTS, MAX_NEW_TOKENS = 16, 64
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

TRAINING = (
    *("target=pocket_qwen2_5_vl", "data=pocket", f"data.sources.pocket.families=[{','.join(FAMILIES)}]"),
    *("data.num_examples=960", "data.cache=examples", "launch.device=cpu", "launch.ranks=1", "optim.schedule=cosine"),
    *("train.epochs=null", "train.max_steps=120", "train.global_batch_size=8", "train.micro_batch_size=8"),
    *("train.save_every=0", "decode.policies=[chain]", "decode.baselines=[]", "decode.num_prompts=1", "decode.warmup=0"),
    *("decode.max_new_tokens=8", "decode.passes=eager"),
)
EAGLE3 = ("draft=eagle3", "objective.steps=2", "optim.lr=4e-3")
RUNS = {
    "token": (*EAGLE3, "draft.image_inputs=token"),
    "reduced": (*EAGLE3, "draft.image_inputs=token", "draft.draft_vocab_size=400"),
    "levels": (*EAGLE3, "draft.image_inputs=token", "draft.feature_levels=[3,7,11]"),
    "eagle_3_1": (*EAGLE3, "draft.image_inputs=token", "draft.fc_norm=true", "draft.norm_output=true"),
    "embed": (*EAGLE3, "draft.image_inputs=embed"),
    "eagle": ("draft=eagle", "draft.input_norm=false", "draft.image_inputs=token", "optim.lr=8e-3"),
    "norm": ("draft=eagle", "draft.image_inputs=token", "optim.lr=8e-3"),
}


@dataclass(frozen=True)
class Case:
    """One export."""

    run: str
    format: str
    dtype: str
    damage: Damage | None = None
    is_control: bool = False  # vLLM must accept less than our decoder
    is_released: bool = False  # vLLM without our plugin, whose rounds must differ
    flavour: str | None = None  # of the export; None: the first one that vLLM serves

    @property
    def name(self) -> str:
        damage = f"-{self.damage.__name__}" if self.damage else ""
        return f"{self.run}-{self.format}-{self.dtype}{damage}{'-released' if self.is_released else ''}"


def absolute_d2t(config: dict[str, Any], folder: Path) -> None:
    """Writes target ids instead of offsets, as far as their sums stay in the vocabulary: beyond it vLLM ends on a CPU."""
    tensors = load_file(folder / "model.safetensors")
    ids, size = torch.arange(len(tensors["d2t"])), len(tensors["t2d"])
    tensors["d2t"] = torch.minimum(tensors["d2t"] + ids, size - 1 - ids)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def without_norm_output(config: dict[str, Any], folder: Path) -> None:
    """Leaves out that later levels read the normed output, which no tensor shows."""
    del config["norm_output"]


CASES = (
    Case("token", "eagle3", "float32"),
    Case("token", "eagle3", "bfloat16"),
    Case("reduced", "eagle3", "float32"),
    Case("reduced", "eagle3", "bfloat16"),
    Case("levels", "eagle3", "float32"),
    Case("levels", "eagle3", "bfloat16"),
    Case("token", "speculators", "float32"),
    Case("reduced", "speculators", "bfloat16"),
    Case("eagle_3_1", "eagle3", "float32"),
    Case("eagle_3_1", "speculators", "bfloat16"),
    Case("eagle_3_1", "eagle3", "float32", without_norm_output, is_control=True),
    Case("eagle", "eagle", "float32"),
    Case("eagle", "eagle", "bfloat16"),
    Case("norm", "eagle", "float32", flavour="plugin"),
    Case("embed", "eagle3", "float32", is_control=True),
    Case("levels", "eagle3", "float32", off_by_one_levels, is_control=True),
    Case("reduced", "eagle3", "float32", absolute_d2t, is_control=True),
    Case("token", "eagle3", "float32", is_released=True),
)


def main() -> int:
    """Trains, exports, serves and compares; returns 0 if all checks pass."""
    parser = new_parser(__doc__, [case.name for case in CASES])
    parser.add_argument("--runs", type=Path, help="folder of the training runs, kept and reused; default: a temporary one")
    args, begin = parser.parse_args(), time.monotonic()
    cases = [case for case in CASES if not args.only or case.name in args.only]
    with tempfile.TemporaryDirectory() as scratch:
        runs = args.runs or Path(scratch) / "runs"
        train([run for run in dict.fromkeys(case.run for case in cases) if not (runs / run / DRAFT).is_dir()], runs)
        rows = check(cases, Path(scratch), runs, args.engine_python)
    return conclude("engines", ["format", "draft", "vocabulary", "dtype"], rows, begin)


def check(cases: Sequence[Case], scratch: Path, runs: Path, python: Path) -> list[Row]:
    """Serves each case as soon as one of the engines, one per core, is free; decodes on our side meanwhile."""
    target, cores = sage.load_target(TARGET, dtype=torch.float32), available_cores()
    prompts, file = write_prompts(target, pocket_prompts(NUM_PROMPTS), scratch)
    engines: queue.SimpleQueue[Engine] = queue.SimpleQueue()

    def serve(case: Case) -> Answers | None:
        engine, begin = engines.get(), time.monotonic()
        kinds = (one for one in variants([case.format]) if "vLLM" in one.engines and case.flavour in (None, one.flavour))
        draft, out = runs / case.run / DRAFT, scratch / case.name
        try:
            setting = exported(draft, TARGET, out, next(kinds), case.damage, DTYPES[case.dtype])
            answers = engine.trace(setting, file, case.is_released)
        finally:
            engines.put(engine)
        print(f"served {case.name}: {time.monotonic() - begin:.0f} s", flush=True)
        return answers

    def decode(run: str, dtype: str) -> Answers:
        """Decodes all prompts with the trained draft, its weights rounded to `dtype`, on our side."""
        draft = sage.load_draft(runs / run / DRAFT, target)
        draft.to(DTYPES[dtype]).to(torch.float32)
        return decode_chain(target, draft, prompts, DEPTH, MAX_NEW_TOKENS)

    with ExitStack() as started, ThreadPoolExecutor(len(cores)) as threads:
        for core in cores:
            engines.put(started.enter_context(Engine(scratch / f"core_{core}", python, core, MAX_NEW_TOKENS)))
        served = [threads.submit(serve, case) for case in cases]
        ours = {key: decode(*key) for key in dict.fromkeys((case.run, case.dtype) for case in cases)}
        theirs = [future.result() for future in served]
    return [new_row(case, ours[case.run, case.dtype], one) for case, one in zip(cases, theirs, strict=True)]


def new_row(case: Case, ours: Answers, theirs: Answers | None) -> Row:
    """Returns the line of a case."""
    draft = f"{case.run}, {case.damage.__name__}" if case.damage else case.run
    draft += ", vLLM as released" if case.is_released else ""
    draft = f"control: {draft}" if case.is_control else draft
    labels = [case.format, draft, "reduced" if case.run == "reduced" else "full", case.dtype]
    return Row(labels, ours, theirs, is_control=case.is_control, is_fault=case.is_released, by_number=True)


def train(names: Sequence[str], runs: Path) -> None:
    """Trains runs, one per core at a time; each process trains several of them."""
    runs.mkdir(parents=True, exist_ok=True)
    free = multiprocessing.get_context("spawn").SimpleQueue()
    for core in available_cores():
        free.put(core)
    with ProcessPoolExecutor(len(available_cores()), multiprocessing.get_context("spawn"), use_core, (free, runs)) as pool:
        for line in pool.map(train_one, names, [runs] * len(names)):
            print(line, flush=True)


def use_core(free: queue.SimpleQueue[int], runs: Path) -> None:
    """Pins a new process to a core of its own; what it and its subprocesses print goes to a log."""
    core = free.get()
    pin(0, [core])
    torch.set_num_threads(1)
    with (runs / f"core_{core}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def train_one(name: str, runs: Path) -> str:
    """Trains a run."""
    from train.job.run import compose, run

    begin = time.monotonic()
    run(compose(*TRAINING, *RUNS[name], f"run.dir={runs / name}"))
    return f"trained {name}: {time.monotonic() - begin:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
