"""`python -m benchmarks.serving.beside_vllm`: sage-serve and vLLM's server under the load of `vllm bench serve`, in turns.

Both servers have the same cores, target, draft, and prompts with one image each; decoding is greedy, in float32. vLLM runs as
released, in an environment of its own (`make engines-env`). Each text is compared with that of one request at a time.

The generator shares the cores with the servers. Tokens per second are those of all answers, median and range of the turns. The
time of the first token counts from sending the request, that per token from the first one to the end of an answer, and that of
a chunk from the one before; a chunk holds the tokens of a round. Percentiles, in ms, are those of all requests of all turns.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from benchmarks.engines.comparison import SETTLE_S
from benchmarks.engines.measure import ENGINE_PYTHON, FORMAT, pocket_prompts
from benchmarks.figures import counts
from benchmarks.serving.servers import OURS, VLLM, Lab, Load, ServerSetting, load, serving
from benchmarks.wide import add_widen_option, widened
from checkpoints.export.exporter import ExportOptions, export
from data_prep.config import Images
from data_prep.server.client import MediaPolicy, request_messages
from sage.bench.measurement import rotated
from sage.bench.options import names
from sage.bench.report import display_name, machine
from sage.commands.cli import new_parser, run
from sage.drafts.location import DRAFT_HELP, find_draft, target_of
from sage.io.files import write_json, write_text
from sage.io.machine import available_cores
from sage.io.tables import markdown_table
from sage.trees import check_name
from train.serve_check.vllm_process import check_engine

logger = logging.getLogger(__name__)
TIMES = ("first token p50", "p95", "per token p50", "p95", "chunk p50", "p95")
HEAD = ("requests", "server", "tokens/s", "range", *TIMES, "same text")


@dataclass
class Turns:
    """All turns of a server at one number of concurrent requests."""

    concurrency: int
    setting: ServerSetting
    loads: list[Load] = field(default_factory=list)

    def figures(self, texts: Sequence[str]) -> dict[str, Any]:
        """Returns the figures; `texts` are those of one request at a time."""
        speeds = [one.tokens_per_s for one in self.loads]
        return {
            "requests": self.concurrency,
            "server": self.setting.label,
            "tokens_per_s": median(speeds),
            "range": [min(speeds), max(speeds)],
            "first_token_s": percentiles(seconds for one in self.loads for seconds in one.first_token_s),
            "token_s": percentiles(seconds for one in self.loads for seconds in one.token_s),
            "chunk_s": percentiles(seconds for one in self.loads for seconds in one.interval_s),
            "same_text": min(sum(a == b for a, b in zip(one.texts, texts, strict=True)) for one in self.loads),
            "texts": len(texts),
        }


def percentiles(values: Iterable[float]) -> list[float]:
    """Returns the 50th and the 95th percentile."""
    found = quantiles(values, n=20, method="inclusive")
    return [found[9], found[18]]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table, and writes the figures to `--out`; returns 1 if a text differs."""
    args = parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    version = check_engine(args.engine_python).version
    settings, numbers = _settings(args), counts(args.concurrency)
    with tempfile.TemporaryDirectory() as scratch:
        lab = _lab(args, max(numbers), args.logs or Path(scratch))
        rows = measure(lab, settings, numbers, args)
    print(table(rows))
    found = {"target": display_name(lab.target), "vllm": version, "figures": rows, "machine": machine("cpu")}
    if args.out:
        write_json(args.out, found)
    return int(any(row["same_text"] < row["texts"] for row in rows))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = new_parser("python -m benchmarks.serving.beside_vllm", description=__doc__)
    parser.add_argument("--draft", metavar="RUN", required=True, help=f"{DRAFT_HELP}, an eagle3, which vLLM gets exported")
    parser.add_argument("--target", metavar="DIR", help="folder of the target; default: the one the draft was trained for")
    add_widen_option(parser)
    parser.add_argument("--policies", default="cost_aware", metavar="A,B", help="of sage-serve (default: %(default)s)")
    text = "of vLLM, 0 for no draft, none to measure sage-serve alone (default: %(default)s)"
    parser.add_argument("--num-speculative-tokens", default="3", metavar="N,N", help=text)
    text = "requests at the same time (default: %(default)s)"
    parser.add_argument("--concurrency", default="1,2,4,8,16", metavar="N,..", help=text)
    parser.add_argument("--prompts", type=int, default=48, help="prompts of a turn (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="turns of every server (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="of an answer (default: %(default)s)")
    parser.add_argument("--engine-python", type=Path, default=ENGINE_PYTHON, help="with vLLM (default: %(default)s)")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="existing folder for logs; default: a temporary one")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    return parser.parse_args(argv)


def _settings(args: argparse.Namespace) -> list[ServerSetting]:
    """Returns the servers; ValueError for an option that cannot be used."""
    for option in ("prompts", "repeats"):
        if getattr(args, option) < 1:
            raise ValueError(f"--{option}: {getattr(args, option)} is not allowed; give at least 1")
    if args.max_new_tokens < 2:  # noqa: PLR2004
        raise ValueError(f"--max-new-tokens: {args.max_new_tokens} is not allowed; give at least 2")
    words = [] if args.num_speculative_tokens == "none" else args.num_speculative_tokens.split(",")
    depths = [0 if word == "0" else counts(word)[0] for word in words]
    for name in names(args.policies):
        check_name(name)
    ours = [ServerSetting(side=OURS, policy=name) for name in names(args.policies)]
    return [*ours, *(ServerSetting(side=VLLM, depth=depth) for depth in depths)]


def _lab(args: argparse.Namespace, max_requests: int, scratch: Path) -> Lab:
    draft = find_draft(args.draft, "--draft")
    target = str(Path(widened(args.target or target_of(draft, "--target"), args)).resolve())
    folder = scratch / "export"
    export(draft, folder, FORMAT, ExportOptions(target=target, dtype=torch.float32))
    python = args.engine_python.absolute()
    places = {"target": target, "draft": draft, "export": folder, "python": python, "scratch": scratch}
    return Lab(**places, cores=available_cores(), max_requests=max_requests)


def measure(
    lab: Lab, settings: Sequence[ServerSetting], numbers: Sequence[int], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Loads every server at every concurrency, in turns that rotate from repeat to repeat; returns the figures of each."""
    file = lab.scratch / "prompts.jsonl"
    policy = MediaPolicy((), Images.inline)
    messages = [request_messages(one.messages, policy) for one in pocket_prompts(args.prompts)]
    write_text(file, "".join(json.dumps({"content": one[-1]["content"]}) + "\n" for one in messages))
    sizes = file, args.prompts
    with ExitStack() as servers:
        addresses = {}
        for one in settings:  # one after the other, as sage-serve measures the costs of passes when it starts
            server = servers.enter_context(serving(one, lab))
            server.wait()
            addresses[one] = server.address
            logger.info("%s is up", one.label)
        for address in addresses.values():
            load(lab, address, *sizes, max(numbers), args.max_new_tokens)
        found = [Turns(number, one) for number in numbers for one in settings]
        for repeat in range(args.repeats):
            for place in range(0, len(found), len(settings)):
                for turns in rotated(found[place : place + len(settings)], repeat):
                    time.sleep(SETTLE_S)
                    done = load(lab, addresses[turns.setting], *sizes, turns.concurrency, args.max_new_tokens)
                    turns.loads.append(done)
                    logger.info("%s, %d requests: %.0f tokens/s", turns.setting.label, turns.concurrency, done.tokens_per_s)
        alone = Turns(1, settings[0], [load(lab, addresses[settings[0]], *sizes, 1, args.max_new_tokens)])
    return [turns.figures(alone.loads[0].texts) for turns in found]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the figures as a table; times are in ms."""
    cells = [
        [
            str(row["requests"]),
            row["server"],
            f"{row['tokens_per_s']:.0f}",
            "-".join(f"{bound:.0f}" for bound in row["range"]),
            *(f"{1e3 * seconds:.3g}" for key in ("first_token_s", "token_s", "chunk_s") for seconds in row[key]),
            f"{row['same_text']}/{row['texts']}",
        ]
        for row in rows
    ]
    return markdown_table(HEAD, cells, "><>")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the servers end as well
    sys.exit(run(main))
