"""The decoding process: requests join and leave between rounds, and end without touching one another.

Before the first request, the memory of the caches is checked, and a few tokens are decoded in every way that rounds can take:
no request waits for a pass that is compiled.

A compiled pass keeps Python's lock, so in one process the server would neither receive nor send during a pass, and each pass
would wait for the server; and every thread with parallel work of torch has worker threads of its own, which stop waiting
actively for each other where there are more of them than processors.

Commands and events are tuples on a connection, and name a request by its number:

    from the server   ("add", number, arrays, sampling, options); ("remove", number), which may have ended already;
                      closing the connection ends the process
    to the server     [(number, event), ..] once per round: tokens and log-probabilities; or the end of the request, which is
                      `Stats`, `ValueError` for one that cannot be decoded, or `RuntimeError` for a fault, which is logged
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers.utils import logging as transformers_logging

import sage
from sage.commands.cli import load_options, plain_warnings
from sage.costs.measure import known_costs
from sage.decoding.answer import Stats
from sage.decoding.batch import BatchDecoder
from sage.decoding.generation import Generation
from sage.decoding.settings import Sampling
from sage.decoding.verify import Logprobs
from sage.drafts.draft import Draft, new_session
from sage.io.machine import free_bytes
from sage.planning.base import Policy
from sage.runtime.modes import MANY_ANSWERS, PassMode, resolve_pass_mode
from sage.runtime.timing import frozen_heap
from sage.serving.settings import DEFAULT_CONTEXT, ServerLimits
from sage.targets import Target
from sage.targets.tree_passes import TreePasses
from sage.trees import AUTOREGRESSIVE
from sage.trees import policy as new_policy

logger = logging.getLogger(__name__)
STOP_S = 3.0  # seconds that the process has to end
Emitted = tuple[list[int], Sequence[Logprobs]]
Event = Emitted | Stats | Exception
SHORTEST = 64  # tokens; costs of passes are measured from here on
WARM_UP_TOKENS = 20
WARM_UP_POLICIES = (AUTOREGRESSIVE, "chain", "eagle2")  # trees of one node, paths, and wide trees
NOTICE_S = 5.0  # the warm-up logs its progress if it takes longer
GB = 1e9


@dataclass(frozen=True)
class Plan:
    """What is to be decoded, once it has been loaded and tried.

    Attributes:
        new_decoder: creates the decoder, at the start and after a fault of the decoder itself.
        policy: its copies decode all requests, and share what they learn.
        max_context: tokens of a prompt and its answer.
        end_token_ids: ids that end an answer.
    """

    new_decoder: Callable[[], BatchDecoder]
    policy: Policy
    max_context: int
    end_token_ids: tuple[int, ...]


class DecoderProcess:
    """The decoding process as the server sees it; it starts at once and loads what it decodes.

    Args:
        load: loads it; a function of a module, called in the process with `args`.
        in_thread: whether it is a thread of this process instead, for a target that is loaded already.

    Attributes:
        connection: yields lists of events; EOFError or OSError once the process has ended.
        pid: number of the process; None for a thread.
    """

    def __init__(self, load: Callable[..., Plan], *args: Any, in_thread: bool = False) -> None:
        context = get_context("spawn")
        self.connection, far_end = context.Pipe()
        start: Any = threading.Thread if in_thread else context.Process
        self._worker = start(target=decode, args=(far_end, load, args, in_thread), name="decoding", daemon=True)
        self._worker.start()
        self.pid: int | None = None if in_thread else self._worker.pid
        if not in_thread:
            far_end.close()
        self._sender = ThreadPoolExecutor(1, "to decoding")

    def wait(self) -> tuple[int, tuple[int, ...]]:
        """Waits until all is loaded; returns `max_context` and `end_token_ids`. ValueError for a mistake that `load` found."""
        try:
            result: str | tuple[int, tuple[int, ...]] = self.connection.recv()
        except EOFError as error:
            self._worker.join()
            raise ValueError(f"the decoding process has ended with exit code {self._worker.exitcode}") from error
        if isinstance(result, str):
            raise ValueError(result)
        return result

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return bool(self._worker.is_alive())

    def send(self, *command: Any) -> None:
        """Sends a command, in a thread of its own: many pixels take time."""

        def send() -> None:
            with suppress(OSError):  # the process has ended, which the next event reports
                self.connection.send(command)

        self._sender.submit(send)

    def close(self) -> None:
        """Ends the process after the round in progress; answers in progress are dropped."""
        self._sender.submit(self.connection.close)
        self._sender.shutdown(wait=False)
        self._worker.join(STOP_S)
        self.kill()

    def kill(self) -> None:
        """Ends the process at once."""
        if self.pid is not None:
            self._worker.kill()
            self._worker.join()


def decode(connection: Connection, load: Callable[..., Plan], args: tuple[Any, ...], in_thread: bool) -> None:
    """Loads, sends `max_context` and `end_token_ids` of the plan, or the user's mistake as text; then decodes."""
    if not in_thread:
        plain_warnings()
        for number in (signal.SIGINT, signal.SIGTERM):  # are the server's to obey
            signal.signal(number, signal.SIG_IGN)
    with connection, suppress(EOFError, OSError):  # the server has closed the connection, or is gone
        try:
            plan = load(*args)
        except (ValueError, OSError) as error:
            connection.send(" ".join(str(error).split()))
            return
        with frozen_heap():  # before the server listens: collecting what a compiler has left takes longer than an answer
            connection.send((plan.max_context, plan.end_token_ids))
            _Loop(plan, connection).run()


class _Loop:
    """Obeys commands between rounds, until the connection is closed."""

    def __init__(self, plan: Plan, connection: Connection) -> None:
        self._plan, self._connection = plan, connection
        self._decoder = plan.new_decoder()
        self._running: dict[int, Generation] = {}
        self._events: list[tuple[int, Event]] = []

    def run(self) -> None:
        """Runs until the connection is closed; EOFError or OSError then."""
        while True:
            while self._connection.poll(None if not (self._running or self._events) else 0):
                command, number, *arguments = self._connection.recv()
                if command == "add":
                    self._add(number, *arguments)
                elif number in self._running:  # else it has ended
                    self._decoder.remove(self._running.pop(number))
            try:
                self._step()
            except Exception:
                logger.exception("the decoder failed; its requests end and it starts anew")
                self._events += [(number, RuntimeError()) for number in self._running]
                self._running, self._decoder = {}, self._plan.new_decoder()
            self._connection.send(self._events)  # if there are none, a sign of life
            self._events = []

    def _add(self, number: int, arrays: Mapping[str, Any], sampling: Sampling, options: Mapping[str, Any]) -> None:
        """Starts a request; the decoder reads its prompt in parts, so that others do not wait for all of it."""
        inputs = {key: torch.from_numpy(value) if hasattr(value, "__array__") else value for key, value in arrays.items()}
        try:
            self._running[number] = self._decoder.add(inputs, self._plan.policy, sampling=sampling, **options)
        except ValueError as error:
            self._events.append((number, ValueError(str(error))))
        except Exception:
            logger.exception("a request could not be started")
            self._events.append((number, RuntimeError()))

    def _step(self) -> None:
        """Runs a round; passes on what the requests have emitted, and which have ended."""
        numbers = {request: number for number, request in self._running.items()}
        for request, round_ in self._decoder.step() if numbers else ():
            if round_.tokens:
                self._events.append((numbers[request], (list(round_.tokens), round_.logprobs)))
            if request.is_over:
                self._decoder.remove(self._running.pop(numbers[request]))
                if request.error is not None:
                    logger.error("a request failed", exc_info=request.error)
                self._events.append((numbers[request], RuntimeError() if request.error else request.stats))


# -- what it decodes with --------------------------------------------------------------------------------------------------


def start_logging(level: str) -> None:
    """Logs this package from `level` on, and others from warnings on, with the time of each line."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("sage").setLevel(level.upper())


def load_plan(args: argparse.Namespace, path: str, folder: Path | None, limits: ServerLimits) -> Plan:
    """Loads target and draft as the options say; raises ValueError as `plan_decoding` does, or if they cannot be loaded."""
    start_logging(args.log_level)
    transformers_logging.disable_progress_bar()
    target = sage.load_target(path, passes=args.passes, **load_options(args, cpu_dtype="float32"))
    target.passes = resolve_pass_mode(args.passes, target.device.type, MANY_ANSWERS, target.is_plain)
    draft = sage.load_draft(folder, target) if folder is not None else None
    return plan_decoding(target, draft, args.policy, limits)


def plan_decoding(target: Target, draft: Draft | None, policy: str, limits: ServerLimits) -> Plan:
    """Checks the memory, by ValueError, and decodes a few tokens in every way: no request waits for what is done once."""
    longest = int(target.text_config.max_position_embeddings)
    max_context = limits.max_context or min(DEFAULT_CONTEXT, longest)
    if max_context > longest:
        raise ValueError(f"--max-context: {max_context}, and the target's context length is {longest}; give at most that")
    drafting = draft if policy != AUTOREGRESSIVE else None
    shared = new_policy(policy)
    if drafting is not None and shared.needs_costs:
        shared.costs = known_costs(target, drafting, min(SHORTEST, max_context), max_context)
    needed = cache_bytes(target, drafting, max_context, shared.tree_capacity)
    check_caches(needed, free_bytes(target.device), limits.max_requests, max_context)
    new_decoder = partial(BatchDecoder, target, drafting, limits.max_requests, limits.prefill_tokens)
    plan = Plan(new_decoder, shared, max_context, tuple(target.eos_token_ids))
    others = () if target.passes is PassMode.eager else WARM_UP_POLICIES if drafting is not None else (AUTOREGRESSIVE,)
    _warm_up(plan, target, others, min(limits.max_requests, 2))
    return plan


@torch.inference_mode()
def cache_bytes(target: Target, draft: Draft | None, max_context: int, tree_capacity: int) -> int:
    """Returns the memory of the caches of a request of `max_context` tokens, given the nodes of the largest tree."""
    session = None if draft is None else new_session(draft, target, 1)
    rows = TreePasses(target, session.levels if session else ()).capacity(max_context + tree_capacity)
    needed = target.cache_bytes(rows, tree_capacity)
    if session is not None and session.cache is not None:
        needed += rows * sum(buffer.nbytes for buffer in session.cache.buffers) // session.cache.capacity
    return needed


def check_caches(per_request: int, free: int | None, max_requests: int, max_context: int) -> None:
    """Raises ValueError if the caches of all requests do not fit into the free bytes; None: unknown."""
    needed = per_request * max_requests
    if free is None or needed <= free:
        return
    fits = free // per_request
    remedy = f"give at most --max-requests {fits}, or" if fits else "give"
    raise ValueError(
        f"--max-requests {max_requests}: caches for {max_context} tokens each take {needed / GB:.2f} GB, and "
        f"{free / GB:.2f} GB are free; {remedy} a lower --max-context"
    )


def _warm_up(plan: Plan, target: Target, policies: Sequence[str], count: int) -> None:
    """Decodes `count` requests, together and each alone at its beginning or end, with the plan's policy and those named."""
    inputs, started = greeting(target, plan.max_context - WARM_UP_TOKENS), time.monotonic()
    length = min(WARM_UP_TOKENS, plan.max_context - inputs["input_ids"].shape[1])
    options = {"max_new_tokens": length, "min_new_tokens": length}
    samplings = [Sampling(**options), Sampling(**options, temperature=1.0, seed=0)]
    stages: list[Policy | str] = [plan.policy, *policies]
    for done, policy in enumerate(stages, 1):
        decoder = plan.new_decoder()
        requests = [decoder.add(inputs, policy, sampling=sampling) for sampling in samplings[:count]]
        while not all(request.is_over for request in requests):
            decoder.step()
        if error := next((request.error for request in requests if request.error is not None), None):
            raise error
        if (seconds := time.monotonic() - started) > NOTICE_S:
            left = seconds / done * (len(stages) - done)
            print(f"passes: {done} of {len(stages)} kinds of rounds are ready, about {left:.0f} s left", file=sys.stderr)


def greeting(target: Target, room: int) -> Mapping[str, Any]:
    """Returns the inputs of a short prompt, with an image where the target takes one and its tokens fit into `room`."""
    text, image = {"type": "text", "text": "Hello"}, {"type": "image", "image": Image.new("RGB", (64, 64))}
    with suppress(ValueError):  # no images
        inputs = target.prepare([{"role": "user", "content": [image, text]}])
        if inputs["input_ids"].shape[1] <= room:
            return inputs
    return target.prepare([{"role": "user", "content": [text]}])
