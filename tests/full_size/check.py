"""`make full-size`: the commands on folders with published sizes and layouts, random weights, and pictures of published sizes.

For each target: a folder in the layout of its release, logits beside transformers', data, a plan, three steps of training with
a validation, an export and its check, a generation, and a request to the server. Each step is a process, whose peak memory is
measured. Writes figures.json beside this file and the table of docs/plan.md. Takes 14 GiB of memory and disk; the folder of a
target is deleted when its steps are done.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures import fill_blocks
from sage.bench.report import machine
from sage.io.files import read_json, write_json, write_text
from sage.io.tables import markdown_table

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
STAGES = Path(__file__).with_name("stages.py")
LIMIT_S = 3600
MAX_EXCESS = 0.15  # of the plan's memory on a CPU, either way
GIB_OF_KIB = 2**20


@dataclass(frozen=True)
class Size:
    """How a target is run: its dtype, the tokens that a picture of 1920 x 1080 needs, and the conversations of its steps."""

    dtype: str
    max_length: int
    rows: str


SIZES = {
    "llava_onevision_0_5b": Size("fp32", 8192, "large,several,photo"),
    "qwen3_vl_2b": Size("bf16", 4096, "video,several,photo"),
    "qwen2_5_vl_3b": Size("bf16", 4096, "large,video,several"),
}


STEPS_OF_TRAINING = (
    "draft=eagle3 draft.draft_vocab_size=32000 train.max_steps=3 train.log_every=1 train.global_batch_size=1 "
    "train.micro_batch_size=1 launch.device=cpu"
)
EVERY_ROW = "data.max_length=4096 data.holdout=0 own=0"  # some are too long
DECODE = "decode.num_prompts=1 decode.max_new_tokens=6 decode.warmup=0 decode.traces=0 decode.baselines=[]"


def commands(name: str, work: Path, is_small: bool) -> dict[str, str]:
    """Returns the command of every step of a target, without `python`."""
    size = SIZES[name]
    target, run, export, image = (work / part for part in ("target", "run", "export", "media/photo.jpg"))
    data = f"target.path={target} target.dtype={size.dtype} data=messages"
    held = f"data/validation=mmspec data.validation.mmspec.kind=messages data.validation.mmspec.path={work}/held.jsonl"
    learn = f"{STEPS_OF_TRAINING} {DECODE} train.precision={size.dtype} run.dir={run}"
    train = f"-m sage.training train {data} data.max_length={size.max_length} data.path={work}/train.jsonl {held} {learn}"
    return {
        "build": f"-m benchmarks.published {name} {work} {'--small' if is_small else ''}",
        "logits": f"{STAGES} logits {target} {work}/held.jsonl {size.dtype}",
        "data": f"-m sage.training data {data} data.path={work}/all.jsonl {EVERY_ROW} out={work}/data.html",
        "plan": f"{train} launch.plan=true",
        "train": f"{train} decode.policies=[chain]",
        "compared": f"{STAGES} compared {run} {target} {work}/plan.log",
        "validate": f"-m sage.training validate checkpoint={run} {DECODE} decode.policies=[sage] launch.device=cpu",
        "export": f"-m sage.training export {run} --format eagle3 --allow-unserved --out {export}",
        "check": f"-m sage.training export --check {export} --target {target}",
        "generate": f"-m sage --draft {run} --image {image} --prompt What? --max-new-tokens 6 --dtype {size.dtype}",
        "serve": f"{STAGES} serve {run} {image} {size.dtype}",
    }


def check(name: str, work: Path, rows: str, is_small: bool) -> Iterator[dict[str, Any]]:
    """Runs the steps of a target; yields after each one seconds, peak memory and last line of all, and the plan's memory."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    subprocess.run([sys.executable, str(STAGES), "data", str(work), rows], check=True, cwd=ROOT, env=_environment())
    steps: dict[str, Any] = {}
    try:
        for step, words in commands(name, work, is_small).items():
            found = steps[step] = _measured([sys.executable, *words.split()], work / f"{step}.log")
            line = f"{name:22} {step:9} {found['seconds']:7.1f} s {found['peak_gib']:6.2f} GiB  exit code {found['code']}"
            print(line, flush=True)
            if found["code"]:
                print((work / f"{step}.log").read_text()[-4000:], file=sys.stderr)
            dropped = _found(r"(?<=dropped, )\d+%", work / "data.log")
            yield {"steps": steps, "planned_gib": _planned_gib(work / "plan.log"), "rows": rows, "dropped": dropped}
    finally:
        for folder in (work / "target", work / "run", work / "export"):
            shutil.rmtree(folder, ignore_errors=True)


def _planned_gib(log: Path) -> float | None:
    """Returns the total of a plan."""
    total = _found(r"(?<=total) +[\d.]+(?= GB)", log)
    return None if total is None else float(total) * 1e9 / 2**30


def _found(pattern: str, log: Path) -> str | None:
    found = re.search(pattern, log.read_text() if log.is_file() else "")
    return None if found is None else found[0]


def _environment() -> dict[str, str]:
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}


def _measured(command: Sequence[str], log: Path) -> dict[str, Any]:
    """Runs a command; its peak is that of the largest of its processes."""
    start = time.monotonic()
    with open(log, "w") as output:
        limited = ["timeout", str(LIMIT_S), *command]
        process = subprocess.Popen(limited, cwd=ROOT, env=_environment(), stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    seconds, peak = round(time.monotonic() - start, 1), round(usage.ru_maxrss / GIB_OF_KIB, 2)
    return {
        "code": process.returncode,
        "seconds": seconds,
        "peak_gib": peak,
        "last": "".join(lines[-1:]).replace(f"{log.parent}/", ""),
    }


def table(found: dict[str, Any]) -> str:
    """Returns seconds and peak memory of every step, and what the plan said beside what was measured."""
    targets = {name: found["targets"][name] for name in SIZES if name in found["targets"]}
    every = max((target["steps"] for target in targets.values()), key=len)
    rows = [[step, *(_cell(target["steps"].get(step)) for target in targets.values())] for step in every]
    rows.append(["trained on", *(target["rows"].replace(",", "/") for target in targets.values())])
    plans = [f"{target['planned_gib'] or math.nan:.1f}/{_excess(target):+.0%}" for target in targets.values()]
    rows.append(["plan of training", *plans])
    rows.append(["ms per image/planned", *("/".join(_image_ms(target)) for target in targets.values())])
    rows.append(["dropped at 4,096", *(str(target["dropped"]) for target in targets.values())])
    facts = found["machine"]
    where = f"{facts['cpu']}, {facts['cores']} cores, load {facts['load_average']:.0f}."
    return f"{markdown_table(['seconds/GiB', *targets], rows, '<' + '>' * len(targets))}\n\n{where}"


def _cell(step: dict[str, Any] | None) -> str:
    if step is None:
        return "-"
    return f"{step['seconds']:.0f}/{step['peak_gib']:.1f}" if step["code"] == 0 else f"exit code {step['code']}"


def _excess(target: dict[str, Any]) -> float:
    """Returns the plan of the memory of training relative to the peak, minus 1; NaN if one of them is missing."""
    peak = target["steps"].get("train", {}).get("peak_gib", math.nan)
    return (target["planned_gib"] or math.nan) / peak - 1


def _image_ms(target: dict[str, Any]) -> list[str]:
    """Returns milliseconds of a core per image, measured and planned."""
    return re.findall(r"(\d+) ms", target["steps"].get("compared", {}).get("last", ""))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: {', '.join(SIZES)}")
    parser.add_argument("--rows", metavar="A,B", help="train on these of large, video, several and photo; default: by target")
    parser.add_argument("--small", action="store_true", help="few narrow layers, in a minute each; the documentation stays")
    parser.add_argument("--page-only", action="store_true", help="write the table of what was measured")
    parser.add_argument("--work", type=Path, default=Path("runs/full_size"), metavar="DIR")
    args = parser.parse_args()
    names = args.names or list(SIZES)
    if unknown := sorted({*names} - {*SIZES}):
        parser.error(f"{unknown[0]}: choose from {', '.join(SIZES)}")
    place = STAGES.with_name("figures.json")
    found: dict[str, Any] = read_json(place) if place.is_file() else {"targets": {}}
    if not args.page_only:
        found["machine"] = machine("cpu")
    for name in () if args.page_only else names:
        for latest in check(name, args.work.resolve() / name, args.rows or SIZES[name].rows, args.small):
            found["targets"][name] = latest
            if not args.small:
                write_json(place, found)
    if not args.small:
        page = DOCS / "plan.md"
        write_text(page, fill_blocks(page.read_text(encoding="utf-8"), "table", lambda _: table(found)))
    codes = [step["code"] for name in names for step in found["targets"][name]["steps"].values()]
    print(table(found))
    far = [name for name in names if not args.small and not abs(_excess(found["targets"][name])) <= MAX_EXCESS]
    return int(any(codes) or bool(far))


if __name__ == "__main__":
    sys.exit(main())
