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

import argparse
import json
import multiprocessing
import os
import queue
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

import sage
from benchmarks.engines.prompts import FAMILIES, pocket_prompts
from checkpoints.export.configs import LEVELS_KEY
from checkpoints.export.exporter import export
from checkpoints.export.formats.registry import variants
from checkpoints.export.result import ExportOptions
from checkpoints.run_folder import DRAFT
from sage.io.machine import available_cores, pin
from sage.io.tables import markdown_table
from train.serve_check.acceptance import Answers, decode_chain
from train.serve_check.prompts import PROMPTS_FILE, write_prompts
from train.serve_check.vllm_process import EngineFailed, EngineSetting, VllmProcess

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "data_prep" / "pocket" / "targets" / "pocket_qwen2_5_vl"
NUM_PROMPTS, MAX_NEW_TOKENS, DEPTH = 16, 64, 3
TOLERANCE = 0.01  # of the rounds
MIN_LOSS = 0.05  # of the tokens accepted per round
ACCEPTANCE = 0.05, 0.98  # of the first drafted token; outside, a check would not see differences
COMPARED = ("texts equal", "rounds: ours", "vLLM", "accepted: ours", "vLLM")
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
    """One export.

    Attributes:
        damage: changes the export's folder.
        flavour: of the export; None: the first one that vLLM serves.
        is_control: vLLM must accept less than our decoder.
        is_released: vLLM without our plugin, whose rounds must differ.
    """

    run: str
    format: str
    dtype: str
    damage: Callable[[Path], None] | None = None
    is_control: bool = False
    is_released: bool = False
    flavour: str | None = None

    @property
    def name(self) -> str:
        damage = f"-{self.damage.__name__}" if self.damage else ""
        return f"{self.run}-{self.format}-{self.dtype}{damage}{'-released' if self.is_released else ''}"


def off_by_one_levels(folder: Path) -> None:
    """Names the hidden states one layer below those that the draft was trained on, as SGLang's field does."""
    config = json.loads((folder / "config.json").read_text())
    config[LEVELS_KEY] = [level - 1 for level in config[LEVELS_KEY]]
    (folder / "config.json").write_text(json.dumps(config))


def absolute_d2t(folder: Path) -> None:
    """Writes target ids instead of offsets, as far as their sums stay in the vocabulary: beyond it vLLM ends on a CPU."""
    tensors = load_file(folder / "model.safetensors")
    ids, size = torch.arange(len(tensors["d2t"])), len(tensors["t2d"])
    tensors["d2t"] = torch.minimum(tensors["d2t"] + ids, size - 1 - ids)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def without_norm_output(folder: Path) -> None:
    """Leaves out that later levels read the normed output, which no tensor shows."""
    config = json.loads((folder / "config.json").read_text())
    del config["norm_output"]
    (folder / "config.json").write_text(json.dumps(config))


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
        with Lab(Path(scratch), runs, args.engine_python) as lab:
            served = lab.serve(cases)
            ours = {key: lab.decode(*key) for key in dict.fromkeys((case.run, case.dtype) for case in cases)}
            theirs = [future.result() for future in served]
    rows = [new_row(case, ours[case.run, case.dtype], one) for case, one in zip(cases, theirs, strict=True)]
    return conclude("engines", ["format", "draft", "vocabulary", "dtype"], rows, begin)


def new_row(case: Case, ours: Answers, theirs: Answers | None) -> Row:
    """Returns the line of a case."""
    draft = f"{case.run}, {case.damage.__name__}" if case.damage else case.run
    draft += ", vLLM as released" if case.is_released else ""
    draft = f"control: {draft}" if case.is_control else draft
    labels = [case.format, draft, "reduced" if case.run == "reduced" else "full", case.dtype]
    return Row(labels, ours, theirs, is_control=case.is_control, is_fault=case.is_released, by_number=True)


def new_parser(description: str | None, names: Sequence[str]) -> argparse.ArgumentParser:
    """Returns the options that checks of several cases have in common; makes transformers print errors only."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine-python", type=Path, required=True, help="interpreter of the environment with vLLM")
    parser.add_argument("--only", nargs="*", choices=names, help="only these cases")
    return parser


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
    from train.job.api import compose, run

    begin = time.monotonic()
    run(compose(*TRAINING, *RUNS[name], f"run.dir={runs / name}"))
    return f"trained {name}: {time.monotonic() - begin:.0f} s"


class Lab:
    """Target, prompts, drafts, and one process of vLLM per core; a context manager.

    Args:
        scratch: receives prompts, exports and logs.
        runs: folder of the training runs.
        python: interpreter of the engine's environment.
    """

    def __init__(self, scratch: Path, runs: Path, python: Path) -> None:
        self.scratch, self.runs, self.python = scratch, runs, python
        self.target = sage.load_target(TARGET, dtype=torch.float32)
        self.prompts, self.prompts_file = write_prompts(self.target, pocket_prompts(NUM_PROMPTS), scratch)
        self._threads = ThreadPoolExecutor(len(available_cores()))
        self._engines: queue.SimpleQueue[Engine] = queue.SimpleQueue()
        self._started = ExitStack()

    def __enter__(self) -> Lab:
        for core in available_cores():
            engine = Engine(self.scratch / f"core_{core}", self.python, core, MAX_NEW_TOKENS)
            self._engines.put(self._started.enter_context(engine))
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._started.close()

    def serve(self, cases: Sequence[Case]) -> list[Future[Answers | None]]:
        """Exports and serves each case as soon as an engine is free; None if vLLM fails."""
        return [self._threads.submit(self._serve, case) for case in cases]

    def decode(self, run: str, dtype: str) -> Answers:
        """Decodes all prompts with the trained draft, its weights rounded to `dtype`, on our side."""
        draft = sage.load_draft(self.runs / run / DRAFT, self.target)
        draft.to(DTYPES[dtype]).to(torch.float32)
        return decode_chain(self.target, draft, self.prompts, DEPTH, MAX_NEW_TOKENS)

    def _serve(self, case: Case) -> Answers | None:
        engine, begin = self._engines.get(), time.monotonic()
        try:
            answers = engine.trace(self._setting(case), self.prompts_file, case.is_released)
        finally:
            self._engines.put(engine)
        print(f"served {case.name}: {time.monotonic() - begin:.0f} s", flush=True)
        return answers

    def _setting(self, case: Case) -> EngineSetting:
        """Exports the draft of a case."""
        folder = self.scratch / case.name
        format_ = next(one for one in variants([case.format]) if "vLLM" in one.engines and case.flavour in (None, one.flavour))
        options = ExportOptions(target=str(TARGET), dtype=DTYPES[case.dtype], flavour=format_.flavour)
        export(self.runs / case.run / DRAFT, folder, case.format, options)
        if case.damage:
            case.damage(folder)
        return EngineSetting(
            target=str(TARGET),
            draft=folder,
            depth=DEPTH,
            speculative=format_.vllm_options,
            is_compiled=False,
        )


class Engine:
    """vLLM in one process on one core, for the prompts of one target after the other; a context manager."""

    def __init__(self, scratch: Path, python: Path, core: int, max_new_tokens: int) -> None:
        self.scratch, self.python, self.core, self.max_new_tokens = scratch, python, core, max_new_tokens
        self.scratch.mkdir(parents=True, exist_ok=True)
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
            options = {"max_new_tokens": self.max_new_tokens, "cores": [self.core], "is_released": is_released}
            self._process = VllmProcess(self.python, file, log, **options)
        try:
            return trace(self._process, setting)
        except EngineFailed as error:
            print(error, flush=True)
            self.last_error = str(error)
            self.__exit__()
            return None


def trace(engine: VllmProcess, setting: EngineSetting) -> Answers:
    """Returns the answers of vLLM, whose own metrics of each request must agree with what it emitted; raises EngineFailed."""
    engine.load(setting)
    answers = engine.trace()
    for one in answers:  # the last round emits less than it accepts where the answer ends
        assert [emitted - 1 for emitted in one["rounds"][:-1]] == one["accepted"][: len(one["rounds"]) - 1]
    return Answers([one["tokens"] for one in answers], [one["rounds"] for one in answers], setting.depth)


@dataclass(frozen=True)
class Row:
    """A line of the table: the answers of both sides.

    Attributes:
        theirs: None if vLLM failed.
        is_control: vLLM must accept less than our decoder.
        is_fault: a fault of vLLM, whose rounds must differ from ours.
        is_refused: whether vLLM refused, where it must.
        by_number: rounds are compared by their number, not one by one.
    """

    labels: list[str]
    ours: Answers
    theirs: Answers | None
    is_control: bool = False
    is_fault: bool = False
    is_refused: bool | None = None
    by_number: bool = False

    def problems(self) -> list[str]:
        """Returns what is wrong."""
        ours, theirs = self.ours, self.theirs
        if self.is_refused is not None:
            return [] if self.is_refused else ["vLLM does not refuse it"]
        if theirs is None:
            return ["vLLM failed, see above"]
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


if __name__ == "__main__":
    sys.exit(main())
