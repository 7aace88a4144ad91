"""`python -m sage.bench`: compare policies side by side; `python -m sage.bench costs`: what passes cost, without weights."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

import sage
from sage.bench import costs as cost
from sage.bench.measure import measure
from sage.bench.projection import format_projection, project
from sage.bench.prompts import load_prompts
from sage.bench.report import build_report, write_json
from sage.bench.runners import (
    AUTOREGRESSIVE,
    BASELINES,
    HF_ASSISTED,
    HF_GENERATE,
    PolicyRunner,
    Runner,
    Sampling,
    baseline_runner,
)
from sage.bench.shapes import SHAPES, layers_that_fit, shape_named
from sage.bench.table import format_table
from sage.cli import run

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CPU_LAYERS = 2  # a layer of a 7B target takes a CPU about a second per large tree


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; `costs` as the first argument picks the second mode."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    if arguments[:1] == ["costs"]:
        _costs(_costs_parser().parse_args(arguments[1:]))
    else:
        _compare(_compare_parser().parse_args(arguments), shlex.join(["python", "-m", "sage.bench", *arguments]))


def _compare(args: argparse.Namespace, command: str) -> None:
    policies = _policies(args.policies)
    device = _device(args.device)
    target = sage.load_target(args.target, dtype=DTYPES[args.dtype] if args.dtype else None, device=device)
    draft = None if args.draft is None else sage.load_draft(args.draft, target)
    runners = _runners(target, draft, policies, _names(args.baselines), args)
    prompts = load_prompts(target, args.prompts, args.image, args.prompt, args.num_prompts)
    sampling = Sampling(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
    )
    measurement = measure(runners, prompts, sampling, args.repeats, args.warmup, _progress)
    report = build_report(measurement, target, args.draft or "none", policies, command=command)
    print(format_table(report))
    _write(report, args.out)


def _costs(args: argparse.Namespace) -> None:
    shape, device, dtype = shape_named(args.shape), _device(args.device), DTYPES[args.dtype]
    layers, report = args.layers, None if args.project is None else _read_json(args.project)
    if layers is None:
        layers = layers_that_fit(shape, dtype, device)
        layers = layers if device.type == "cuda" else min(layers, CPU_LAYERS)
    grid = {"nodes": _counts(args.nodes), "widths": _counts(args.widths), "contexts": _counts(args.contexts)}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        found = cost.measure_costs(shape, layers, dtype, device, repeats=args.repeats, **grid)
    print(cost.format_costs(found))
    if report is not None:
        found["projection"] = project(report, found)
        print(f"\n{format_projection(found['projection'], shape.name)}")
    _write(found, args.out)


def _runners(
    target: Any, draft: Any, policies: Sequence[str], baselines: Sequence[str], args: argparse.Namespace
) -> list[Runner]:
    assistant = None
    if args.assistant is not None:
        assistant = sage.load_target(args.assistant, dtype=target.dtype, device=target.device).model
    if needing := [name for name in policies if name != AUTOREGRESSIVE and draft is None]:
        raise ValueError(f"--draft: missing, and {', '.join(needing)} need one; give a draft folder")
    wanted = dict.fromkeys([AUTOREGRESSIVE, *baselines, *([HF_ASSISTED] if assistant is not None else [])])
    own: list[Runner] = [PolicyRunner(target, draft, name) for name in policies]
    return own + [baseline_runner(target, name, assistant) for name in wanted if name not in policies]


def _policies(text: str) -> list[str]:
    names = _names(text)
    if unknown := [name for name in names if name not in sage.POLICIES]:
        raise ValueError(f"--policies: {unknown[0]!r} is unknown; choose from {', '.join(sage.POLICIES)}")
    return names


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise ValueError(f"{text!r}: not a list of counts; write positive whole numbers separated by commas")
    return counts


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: no GPU that torch can use; choose cpu")
    return torch.device(name)


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\rmeasuring {done}/{total}", end="\n" if done == total else "", file=sys.stderr, flush=True)


def _read_json(file: str) -> dict[str, Any]:
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"--project {file}: no such file; give a report.json")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"--project {file}: not JSON ({error.msg}); give a report.json") from error
    return found if isinstance(found, dict) else {}


def _write(report: dict[str, Any], out: str | None) -> None:
    if out is not None:
        write_json(report, Path(out))
        print(f"written: {out}")


def _compare_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sage.bench",
        description="Compares decoding policies and Hugging Face decoders side by side, interleaved in one process.",
        epilog="A second mode, `python -m sage.bench costs --help`, measures what passes cost without any weights.",
    )
    parser.add_argument("--target", required=True, metavar="DIR_OR_ID", help="the target model")
    parser.add_argument("--draft", metavar="DIR", help="the draft; not needed for the policy autoregressive alone")
    parser.add_argument(
        "--policies", default="autoregressive,chain,static,sage", metavar="A,B", help=f"of {', '.join(sage.POLICIES)}"
    )
    parser.add_argument("--baselines", default=HF_GENERATE, metavar="A,B", help=f"of {', '.join(BASELINES)}")
    parser.add_argument("--assistant", metavar="DIR_OR_ID", help="a smaller model for Hugging Face assisted generation")
    parser.add_argument("--prompts", metavar="FILE", help="JSONL of chat messages, one conversation per line")
    parser.add_argument("--image", action="append", default=[], metavar="PATH", help="a picture to ask about; may be repeated")
    parser.add_argument("--prompt", metavar="TEXT", help="the question; without a picture, a text-only prompt")
    parser.add_argument("--num-prompts", type=int, metavar="N", help="use at most N prompts")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-k", type=int, default=0, help="0 is off (default)")
    parser.add_argument("--top-p", type=float, default=1.0, help="1 is off (default)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3, help="timed runs per prompt; the median counts")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--dtype", choices=DTYPES, help="default: the checkpoint's own")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--out", metavar="FILE", help="write the report as JSON; `python -m train.report FILE` draws it")
    return parser


def _costs_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sage.bench costs",
        description="Measures verification c_t(nodes, context) and draft levels c_d(width, context) on random weights.",
    )
    parser.add_argument("--shape", required=True, metavar="NAME", help=f"one of {', '.join(SHAPES)}")
    parser.add_argument("--layers", type=int, metavar="N", help="layers to build; default: as many as fit, 2 on a CPU")
    parser.add_argument("--nodes", default=",".join(map(str, cost.NODES)), metavar="N,N")
    parser.add_argument("--widths", default=",".join(map(str, cost.WIDTHS)), metavar="N,N")
    parser.add_argument("--contexts", default=",".join(map(str, cost.CONTEXTS)), metavar="N,N")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--project", metavar="FILE", help="a report.json whose bookkeeping to project to this shape")
    parser.add_argument("--out", metavar="FILE", help="write the tables as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(run(main))
