"""`python -m benchmarks.gpu_quarter_hour`: what was never measured on a GPU, within a time budget, the most valuable first.

Each step is a process group with a limit of its own: a hung CUDA call ends only with its process. In
--out, `results.json` and `figures.json` are replaced after every step, and `log.txt` grows as the steps print, so that whatever
ends this process loses nothing but the running step.

Exit code: 0 if every step ran, 1 if one failed, was killed at its limit or skipped, 3 after SIGTERM or Ctrl-C.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import yaml

from sage.commands.cli import EXIT_CRASH, EXIT_DONE, EXIT_STOPPED, new_parser, run
from sage.io.files import write_json

ROOT = Path(__file__).parents[1]
RAN, RUNNING, NOT_STARTED = "ran", "running", "not started"
RESULTS, FIGURES, LOG = "results.json", "figures.json", "log.txt"
KEPT = ("*.json", "metrics.jsonl", "validation/*/report.json")  # of a step's folder
MAX_BYTES, MAX_LINES = 2_000_000, 60  # of a kept file, and of a step's output
# How a step is ended, and its seconds: benchmarks report what they have at SIGINT, Python prints its stack at SIGABRT.
SIGNALS = ((signal.SIGINT, 5.0), (signal.SIGABRT, 2.0), (signal.SIGKILL, 5.0))
ENVIRONMENT = {"DS_BUILD_OPS": "0", "HF_HUB_OFFLINE": "1", "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
ENVIRONMENT |= {"TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "offline"}
LARGE = "qwen2_5_vl_7b"
STEP_BATCH, STEP_LENGTH = 2, 2048  # sequences and tokens of the timed step
TIMED_STEP = f"experiment=eagle3 train.global_batch_size={STEP_BATCH} train.micro_batch_size={STEP_BATCH}"
CONTEXTS = (4096, 16384)
NODES = (1, 8, 32, 64)
# a real run at full size; benchmarks.gpu_page plans it with the same words
TRAIN_LARGE = (
    "draft=eagle3 draft.draft_vocab_size=32000 data=messages data.max_length=4096 train.global_batch_size=8 "
    "train.micro_batch_size=2 train.max_steps=8 train.log_every=1 decode.num_prompts=2 decode.max_new_tokens=48 "
    "decode.policies=[chain,cost_aware] decode.baselines=[hf_generate] decode.warmup=0 decode.traces=0"
)


# -- steps --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command; it starts if its estimate fits into the budget, and is killed at its limit."""

    name: str
    estimate_s: float
    limit_s: float
    command: Sequence[str]  # keeps its files in a folder of the step's name
    shows: str  # what its success proves, or what it measures


def steps(work: Path, is_gpu: bool) -> list[Step]:
    """Returns the steps of gpu_steps.yaml, with published sizes on a GPU and pocket sizes on a CPU; some need a GPU."""
    table = yaml.safe_load(Path(__file__).with_name("gpu_steps.yaml").read_text(encoding="utf-8"))
    constants: dict[str, Any] = {"LARGE": LARGE, "NODES": ",".join(map(str, NODES)), "STEP_LENGTH": STEP_LENGTH}
    constants |= {"TIMED_STEP": TIMED_STEP, "TRAIN_LARGE": TRAIN_LARGE, "work": shlex.quote(str(work.resolve()))}
    words: dict[str, Any] = constants | table["words"] | table["gpu" if is_gpu else "cpu"]
    found = []
    for row in table["steps"]:
        if row.get("is_for_gpus") and not is_gpu:
            continue
        command: str = row["command"]
        while "{" in command:  # words consist of words
            command = command.format(**words, **row, folder=f"{words['work']}/{row['name']}")
        likely_s, limit_s = row["seconds"]
        argv = [sys.executable, "-m", *shlex.split(command)]
        limit_s = limit_s if is_gpu else 2 * limit_s
        found.append(Step(name=row["name"], estimate_s=likely_s, limit_s=limit_s, command=argv, shows=row["shows"]))
    return found


# -- running them -------------------------------------------------------------------------------------------------------


def run_steps(todo: Sequence[Step], out: Path, work: Path, budget_s: float) -> int:
    """Runs the steps that fit into the budget; returns the exit code.

    Args:
        out: receives results, figures and log.
        work: holds a folder per step with what it writes.
    """
    begin = time.monotonic()
    rows = [{**asdict(step), "outcome": NOT_STARTED, "started_s": None, "seconds": None} for step in todo]
    outputs = dict.fromkeys((step.name for step in todo), "")
    try:
        for step, row in zip(todo, rows, strict=True):
            left_s = budget_s - (time.monotonic() - begin)
            if left_s < step.estimate_s:
                row["outcome"] = f"skipped, {left_s:.0f} s left"
            else:
                row |= {"outcome": RUNNING, "started_s": round(budget_s - left_s, 1)}
                keep(rows, outputs, out, work)
                _run(step, row, outputs, out, min(step.limit_s, left_s))
            keep(rows, outputs, out, work)
            print(f"{step.name:16} {row['outcome']:24} {row['seconds'] or 0:6.1f} s", flush=True)
    except KeyboardInterrupt:
        keep(rows, outputs, out, work)
        print(f"stopped; results so far: {out / RESULTS}", file=sys.stderr)
        return EXIT_STOPPED
    return EXIT_DONE if all(row["outcome"] == RAN for row in rows) else EXIT_CRASH


def _run(step: Step, row: dict[str, Any], outputs: dict[str, str], out: Path, limit_s: float) -> None:
    """Runs a step; its outcome, seconds and the end of its output are kept whatever ends it."""
    start = time.monotonic()
    with open(out / LOG, "a+", encoding="utf-8", errors="replace") as log:
        log.write(f"\n===== {step.name}: {' '.join(step.command)}\n")
        log.flush()
        position = log.tell()
        try:
            row["outcome"] = _outcome(step, log, limit_s)
        except KeyboardInterrupt:
            row["outcome"] = "stopped by a signal"
            raise
        finally:
            row["seconds"] = round(time.monotonic() - start, 1)
            log.seek(position)
            outputs[step.name] = "\n".join(log.read().splitlines()[-MAX_LINES:])


def _outcome(step: Step, log: IO[str], limit_s: float) -> str:
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
    try:
        process = subprocess.Popen(step.command, cwd=ROOT, env=os.environ | ENVIRONMENT, start_new_session=True, **streams)
    except OSError as error:
        return f"failed, {error.strerror}"
    try:
        code = process.wait(limit_s)
        return RAN if code == 0 else f"failed, exit code {code}"
    except subprocess.TimeoutExpired:
        return f"killed at {limit_s:.0f} s"
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process with all that it has started; what outlives it is killed at once."""
    for number, grace_s in SIGNALS:
        if process.poll() is not None:
            number = signal.SIGKILL
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)


def keep(rows: Sequence[dict[str, Any]], outputs: dict[str, str], out: Path, work: Path) -> None:
    figures = {name: {"output": text, "files": _files(work / name)} for name, text in outputs.items()}
    write_json(out / FIGURES, figures)
    write_json(out / RESULTS, {"steps": list(rows)})


def _files(folder: Path) -> dict[str, Any]:
    """Returns the figures in the folder of a step, by path: JSON, of JSON Lines a list."""
    found: dict[str, Any] = {}
    for path in sorted(path for pattern in KEPT for path in folder.glob(pattern)):
        with suppress(OSError, ValueError):
            if path.stat().st_size <= MAX_BYTES:
                text = path.read_text(encoding="utf-8")
                read = partial(json.loads, parse_constant=str)  # NaN, which is not JSON
                content = [read(line) for line in text.splitlines()] if path.suffix == ".jsonl" else read(text)
                found[str(path.relative_to(folder))] = content
    return found


def main() -> int:
    parser = new_parser("python -m benchmarks.gpu_quarter_hour", description=__doc__)
    parser.add_argument("--budget", type=float, default=560, metavar="S", help="seconds for all steps; default %(default)g")
    parser.add_argument("--out", type=Path, metavar="DIR", help="results; default runs/gpu_quarter_hour")
    parser.add_argument("--work", type=Path, metavar="DIR", help="files of the steps, 17 GB; default: beside --out")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these steps only")
    parser.add_argument("--list", action="store_true", help="print the steps and their commands")
    parser.add_argument("--cpu", action="store_true", help="pocket sizes on a CPU, to test the steps")
    args = parser.parse_args()
    out = args.out or Path("runs") / ("gpu_quarter_hour_cpu" if args.cpu else "gpu_quarter_hour")
    work = args.work or out.with_name(f"{out.name}_work")
    todo = steps(work, not args.cpu)
    if unknown := sorted({*(args.only or ())} - {step.name for step in todo}):
        raise ValueError(f"--only {unknown[0]}: unknown; choose from {', '.join(step.name for step in todo)}")
    todo = [step for step in todo if args.only is None or step.name in args.only]
    if args.list:
        for step in todo:
            print(f"{step.name:16} {step.estimate_s:4g} s, limit {step.limit_s:g}: {step.shows}\n    {' '.join(step.command)}")
        return EXIT_DONE
    for folder in (out, work):
        folder.mkdir(parents=True, exist_ok=True)
    (out / LOG).write_text("")
    for step in todo:  # what an earlier call has left
        shutil.rmtree(work / step.name, ignore_errors=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
    return run_steps(todo, out, work, args.budget)


if __name__ == "__main__":
    sys.exit(run(main))
