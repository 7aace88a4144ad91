"""`python -m benchmarks.serving`: many requests to sage-serve, each compared with its text alone; a small random target.

Server and clients share one process, whose memory is printed.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers.utils import logging

import sage
from benchmarks.engines.measure import question
from data_prep.config import Images
from data_prep.pocket import architecture
from data_prep.server.client import MediaPolicy, request_messages
from sage.commands.cli import new_parser, run
from sage.serving.server import running
from sage.serving.service import new_service
from sage.serving.settings import ServerLimits

MODEL, FAMILY = "random", "qwen2_5_vl"
FAMILIES = ("text", "question", "compare")  # of prompts: without an image, with one, and with two
NUM_PROMPTS, NUM_REPORTS = 48, 10


@dataclass
class Case:
    """A request and its text alone."""

    body: dict[str, Any]
    text: str


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the load; returns 1 if an answer differs or is lost."""
    parser = new_parser("python -m benchmarks.serving", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000, help="requests (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=8, help="at the same time (default: %(default)s)")
    parser.add_argument("--policy", default="chain", help="policy (default: %(default)s)")
    args = parser.parse_args(argv)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        architecture.save_random(FAMILY, Path(folder))
        target = sage.load_target(folder, dtype=torch.float32)  # as sage-serve on a CPU; in bf16, near-ties flip
        draft = sage.new_draft(target, "eagle")
        limits = ServerLimits(max_requests=args.concurrency, queue=args.concurrency, max_context=400)
        cases = [_case(target, number) for number in range(NUM_PROMPTS)]
        with running(new_service(target, draft, args.policy, limits, MODEL)) as (_, url):
            return asyncio.run(_load(url, cases, args.requests, args.concurrency))


def _case(target: sage.Target, number: int) -> Case:
    """A question of the pocket world about no image, one or two, greedy or sampled, with an answer of 4 to 24 tokens."""
    random_ = random.Random(number)
    options: dict[str, Any] = {"temperature": random_.choice([0.0, 0.7, 1.2]), "seed": number}
    max_tokens = random_.randrange(4, 25)
    messages = question("test", number, FAMILIES[number % len(FAMILIES)]).messages
    inputs = target.prepare(messages)
    expected = sage.generate(target, None, inputs, policy="autoregressive", max_new_tokens=max_tokens, **options)
    sent = request_messages(messages, MediaPolicy((), Images.inline))
    return Case({"messages": sent, "max_tokens": max_tokens, **options}, expected.text)


async def _load(url: str, cases: list[Case], count: int, concurrency: int) -> int:
    numbers, wrong, done = iter(range(count)), 0, 0
    start = time.perf_counter()

    async def work(client: httpx.AsyncClient) -> None:
        nonlocal wrong, done
        for number in numbers:
            case = cases[random.Random(number).randrange(len(cases))]
            reply = await client.post("/v1/chat/completions", json=case.body)
            wrong += not (reply.is_success and reply.json()["choices"][0]["message"]["content"] == case.text)
            done += 1
            if done % max(1, count // NUM_REPORTS) == 0:
                seconds = time.perf_counter() - start
                print(f"{done:>6} answers, {wrong} wrong or lost, {done / seconds:.0f}/s, {rss_mb():.0f} MB", flush=True)

    print(f"     0 answers, {rss_mb():.0f} MB", flush=True)
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        await asyncio.gather(*(work(client) for _ in range(concurrency)))
    return int(wrong > 0 or done != count)


def rss_mb() -> float:
    """Returns the resident memory of this process in MB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1000


if __name__ == "__main__":
    sys.exit(run(main))
