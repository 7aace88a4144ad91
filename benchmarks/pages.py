"""`python -m benchmarks.pages`: size and first paint of a large trace page, and what recording a trace costs.

    PYTHONPATH=tests python -m benchmarks.pages page          a hand-made trace, opened in Chromium
    python -m benchmarks.pages overhead --draft RUN           decoding with and without recording, interleaved

The floor of recording is one log-softmax over the logits of every round (N nodes x V vocabulary), and one copy of N numbers to
the host at the end. Building the page is no part of it.
"""

from __future__ import annotations

import importlib
import math
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import sage
from benchmarks.engines.prompts import question
from benchmarks.training.measuring import describe_machine
from data_prep.pocket import world
from sage.bench.options import names
from sage.bench.runners import on_device
from sage.commands import cli
from sage.decoding.generation import start
from sage.decoding.sampling import Sampling
from sage.io.dtypes import torch_dtype
from sage.planning.base import Policy
from sage.replay.trace import TraceRecorder

PAINTS = "return Object.fromEntries(performance.getEntriesByType('paint').map((one) => [one.name, one.startTime]))"
PAINT = "first-contentful-paint"


def measure_page(num_tokens: int, num_nodes: int, repeats: int) -> str:
    """Returns size and first paint of the page of a trace with random trees, under the light and the dark style."""
    browsers, traces = (importlib.import_module(f"support.{name}") for name in ("browser", "traces"))  # of the tests
    page = traces.made_trace(num_tokens, num_nodes).html()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        path.write_text(page, encoding="utf-8")
        browser = browsers.Browser()
        try:
            browser.look(1400)
            paints = [_first_paint(browser, path) for _ in range(repeats)]
        finally:
            browser.close()
    size = f"{num_tokens} tokens, {num_nodes} nodes per round: {len(page.encode()) / 2**20:.2f} MiB"
    return f"{size}; first paint {statistics.median(paints):.0f} ms (median of {repeats}, at most {max(paints):.0f} ms)"


def _first_paint(browser: Any, path: Path) -> float:
    browser.open(path)
    while PAINT not in (found := browser.run(PAINTS)):
        time.sleep(0.02)
    return float(found[PAINT])


@torch.inference_mode()
def decode_s(target: Any, draft: Any, inputs: Any, policy: Policy, sampling: Sampling, has_trace: bool) -> tuple[float, int]:
    """Returns the seconds of one request after the target's prefill, recording included, and its rounds."""
    generation = start(target, draft, inputs, policy, sampling=sampling)
    recorder = TraceRecorder(generation) if has_trace else None
    begin = 0.0
    for emitted in generation.rounds():
        if emitted.tree is None:
            begin = time.perf_counter()
        if recorder is not None:
            recorder.add(emitted)
    return time.perf_counter() - begin, generation.stats.rounds


def measure_overhead(
    target: Any, draft: Any, name: str, prompts: Sequence[Any], sampling: Sampling, repeats: int
) -> list[tuple[tuple[float, int], tuple[float, int]]]:
    """Returns seconds and rounds of every prompt, without and with recording, each of the shortest repeat.

    Both variants alternate on every prompt, the first one in turn; each has a policy of its own that learns from its rounds.
    """
    policies = [sage.policy(name), sage.policy(name)]
    shortest = [[(math.inf, 0)] * len(prompts), [(math.inf, 0)] * len(prompts)]
    for repeat in range(repeats + 1):  # the first one warms up
        for place, inputs in enumerate(prompts):
            for variant in ((0, 1), (1, 0))[(place + repeat) % 2]:
                found = decode_s(target, draft, inputs, policies[variant], sampling, bool(variant))
                if repeat:
                    shortest[variant][place] = min(shortest[variant][place], found)
    return list(zip(*shortest, strict=True))


def _overhead(pairs: Sequence[tuple[tuple[float, int], tuple[float, int]]]) -> str:
    plain, recorded = (sum(seconds for seconds, _ in column) for column in zip(*pairs, strict=True))
    own, others = (1e3 * sum(row[0] for row in column) / sum(row[1] for row in column) for column in zip(*pairs, strict=True))
    ratios = sorted(with_trace[0] / without[0] - 1 for without, with_trace in pairs)
    what = f"{plain:.3f} s of decoding {len(pairs)} answers; {own:.3f} ms per round, {others:.3f} ms with recording"
    return f"recording adds {recorded / plain - 1:+.1%} ({ratios[0]:+.1%} to {ratios[-1]:+.1%} by prompt) to {what}"


def report_overhead(args: Namespace) -> str:
    """Returns one line per policy."""
    path, folder = cli.find_models(args)
    if folder is None:
        raise ValueError("--draft: missing; give a draft whose rounds are recorded")
    target = sage.load_target(path, dtype=torch_dtype(args.dtype), device=cli.resolve_device(args.device), passes=args.passes)
    draft = sage.load_draft(folder, target)
    talks = [question("test", number, world.FAMILIES[number % len(world.FAMILIES)]) for number in range(args.prompts)]
    prompts = [on_device(target.prepare(talk.messages), target.device) for talk in talks]
    lines = [describe_machine(target.device)]
    for name in names(args.policies):
        pairs = measure_overhead(target, draft, name, prompts, Sampling(max_new_tokens=128), args.repeats)
        lines.append(f"{name}: {_overhead(pairs)}, the shortest of {args.repeats} each")
    return "\n".join(lines)


def main() -> int:
    parser = cli.new_parser("python -m benchmarks.pages", description=__doc__)
    parser.add_argument("what", choices=("page", "overhead"))
    cli.add_model_options(parser)
    parser.add_argument("--tokens", type=int, default=512, metavar="N", help="of the page; default %(default)s")
    parser.add_argument("--nodes", type=int, default=64, metavar="N", help="per round of the page; default %(default)s")
    parser.add_argument("--policies", default="chain,sage,cost_aware", metavar="NAME,..", help="default %(default)s")
    parser.add_argument("--prompts", type=int, default=12, metavar="N", help="pocket prompts; default %(default)s")
    parser.add_argument("--repeats", type=int, default=9, metavar="N", help="default %(default)s")
    parser.add_argument("--passes", default="eager", help="default %(default)s")
    cli.add_dtype_option(parser, "fp32", "dtype of target and draft (default %(default)s)")
    cli.add_device_option(parser, "auto")
    args = parser.parse_args()
    if min(args.tokens, args.nodes, args.prompts, args.repeats) < 1:
        raise ValueError("--tokens, --nodes, --prompts, --repeats: give at least 1")
    print(measure_page(args.tokens, args.nodes, args.repeats) if args.what == "page" else report_overhead(args))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
