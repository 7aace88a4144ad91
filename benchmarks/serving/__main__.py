"""`python -m benchmarks.serving`: many requests to sage-serve, each compared with its text alone; a small random target.

First come 1, 2, .. requests at once, whose times are compared with those of the same requests again. Of the many that follow,
some clients leave, and some bodies are malformed. Memory and descriptors are those of the receiving and the decoding process.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
import torch
from transformers.utils import logging

import sage
from benchmarks.engines.measure import question
from benchmarks.serving.beside_vllm import OURS, Lab, ServerSetting, serving
from data_prep.config import Images
from data_prep.pocket import architecture
from data_prep.server.client import MediaPolicy, request_messages
from sage.commands.cli import new_parser, run
from sage.io.machine import available_cores

FAMILY, CHAT = "qwen2_5_vl", "/v1/chat/completions"
FAMILIES = ("text", "question", "compare")  # of prompts: without an image, with one, and with two
NUM_PROMPTS, NUM_REPORTS, NUM_AGAIN = 48, 10, 9
LEAVING, MALFORMED, STREAMED = 0.05, 0.05, 0.55  # shares of requests; the last one includes the others
HELLO: dict[str, Any] = {"role": "user", "content": "Hello"}
WRONG: tuple[Any, ...] = (
    *({"messages": []}, {"messages": [HELLO], "max_tokens": -1}, {"messages": [HELLO], "unknown": 1}, [1], None),
    *({"messages": [HELLO | {"content": content}]} for content in ("a " * 9000, [{"type": "image_url", "image_url": "x"}])),
)


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
    with tempfile.TemporaryDirectory() as scratch:
        folder, draft = Path(scratch) / "target", Path(scratch) / "draft"
        architecture.save_random(FAMILY, folder)
        target = sage.load_target(folder, dtype=torch.float32)  # as sage-serve on a CPU; in bf16, near-ties flip
        sage.new_draft(target, "eagle").save_pretrained(draft)  # type: ignore[attr-defined]
        cases = [_case(target, number) for number in range(NUM_PROMPTS)]
        cores = available_cores()[: torch.get_num_threads()]
        lab = Lab(
            target=str(folder),
            draft=draft,
            export=draft,
            python=Path(sys.executable),
            cores=cores,
            scratch=Path(scratch),
            max_requests=args.concurrency,
        )
        with serving(ServerSetting(side=OURS, policy=args.policy), lab) as server:
            server.wait()
            return asyncio.run(_load(server.address, cases, args.requests, args.concurrency))


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
    numbers, tally, started = iter(range(count)), Counter[str](), time.perf_counter()
    gaps_s: list[float] = []  # between the chunks of streams, which have one per round

    async def work() -> None:
        for number in numbers:
            random_ = random.Random(number)
            await _send(client, random_.choice(cases), random_, tally, gaps_s)
            if (done := tally.total()) % max(1, count // NUM_REPORTS) == 0:
                print(_line(tally, gaps_s, done / (time.perf_counter() - started), await _metrics(client)), flush=True)

    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        await _metrics(client)  # httpx imports what it needs
        for at_once in range(1, concurrency + 1):
            first, *again = [await _together(client, cases[:at_once]) for _ in range(1 + NUM_AGAIN)]
            print(f"{at_once} at once: {first:.3f} s, again {median(again):.3f} s ({first / median(again):.2f}x)", flush=True)
        started = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(concurrency)))
        await asyncio.sleep(1)  # until the server has seen who has left
        metrics = await _metrics(client)
    is_idle = metrics["sage_running_requests"] == metrics["sage_waiting_requests"] == 0
    return int(tally["wrong"] > 0 or tally.total() != count or not is_idle)


async def _together(client: httpx.AsyncClient, cases: Sequence[Case]) -> float:
    """Returns the seconds until requests that are sent at once are answered."""
    started = time.perf_counter()
    await asyncio.gather(*(client.post(CHAT, json=case.body) for case in cases))
    return time.perf_counter() - started


async def _send(
    client: httpx.AsyncClient, case: Case, random_: random.Random, tally: Counter[str], gaps_s: list[float]
) -> None:
    """Sends a request, or a malformed one, or leaves before its end."""
    kind, text = random_.random(), None
    if kind < MALFORMED:
        reply = await client.post(CHAT, json=random_.choice(WRONG))
        tally["refused" if reply.is_client_error else "wrong"] += 1
        return
    if kind < MALFORMED + LEAVING:
        async with client.stream("POST", CHAT, json=case.body | {"stream": True}) as reply:
            await anext(reply.aiter_lines())
        tally["left"] += 1
        return
    if kind < STREAMED:
        text, times = "", []
        async with client.stream("POST", CHAT, json=case.body | {"stream": True, "return_token_ids": True}) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    choice = json.loads(line.removeprefix("data: "))["choices"][0]
                    text += choice["delta"].get("content") or ""
                    times += [time.perf_counter()] if choice["token_ids"] else []
        gaps_s += [after - before for before, after in pairwise(times)]
    else:
        reply = await client.post(CHAT, json=case.body)
        text = reply.json()["choices"][0]["message"]["content"] if reply.is_success else None
    tally["right" if text == case.text else "wrong"] += 1


async def _metrics(client: httpx.AsyncClient) -> dict[str, float]:
    lines = (await client.get("/metrics")).text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def _line(tally: Counter[str], gaps_s: list[float], per_s: float, metrics: dict[str, float]) -> str:
    words = f"{dict(tally)}, {per_s:.0f}/s"
    if len(gaps_s) > 1:
        cuts = quantiles(gaps_s, n=100, method="inclusive")
        words += f", between chunks p50 {1e3 * cuts[49]:.1f}, p99 {1e3 * cuts[98]:.1f} ms"
    for process in ("process", "sage_decoder_process"):
        megabytes, files = metrics[f"{process}_resident_memory_bytes"] / 1e6, metrics[f"{process}_open_fds"]
        words += f", {megabytes:.0f} MB and {files:.0f} descriptors"
    return words


if __name__ == "__main__":
    sys.exit(run(main))
