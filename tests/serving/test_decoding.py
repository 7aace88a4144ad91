"""The decoding loop in a thread and in a process of its own, with a decoder that repeats its prompt."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.serving_helpers import wait_until

from sage.decoding.answer import Stats
from sage.decoding.settings import Sampling
from sage.serving.decoding import Decoding, DecodingProcess, DecodingThread, Plan
from sage.serving.errors import ApiError
from sage.serving.metrics import Metrics
from sage.serving.scheduler import Job, Scheduler

ENDLESS, UNWANTED = 0, 13  # tokens of a prompt


@dataclass(eq=False)
class Repeated:
    """A request whose answer is its prompt, a token in every round."""

    left: list[int]
    is_endless: bool
    error: None = None
    generation: Any = field(default_factory=lambda: SimpleNamespace(stats=Stats()))

    @property
    def is_over(self) -> bool:
        return not self.left and not self.is_endless


class Repeater:
    def __init__(self) -> None:
        self.requests: list[Repeated] = []

    def add(self, inputs: Any, sampling: Sampling) -> Repeated:
        tokens = inputs["input_ids"][0].tolist()
        if UNWANTED in tokens:
            raise ValueError("prompt: unwanted")
        self.requests.append(Repeated(tokens, ENDLESS in tokens))
        return self.requests[-1]

    def step(self) -> Sequence[Any]:
        return [(one, SimpleNamespace(tokens=[one.left.pop(0)] if one.left else [])) for one in self.requests]

    def remove(self, request: Repeated) -> None:
        self.requests.remove(request)


def plan() -> Plan:
    return Plan(Repeater, max_requests=2, max_context=64, end_token_ids=(7,))  # type: ignore[arg-type]


def no_plan() -> Plan:
    raise ValueError("target: none,\ngive one")


@pytest.fixture(params=["thread", "process"])
def decoding(request: pytest.FixtureRequest) -> Iterator[Decoding]:
    if request.param == "thread":
        found: Decoding = DecodingThread(plan())
    else:
        found = process = DecodingProcess(plan)
        assert process.wait() == (64, (7,))
    yield found
    found.close()
    assert not found.is_alive


def submit(scheduler: Scheduler, *tokens: int) -> tuple[Job, SimpleQueue[Any]]:
    results: SimpleQueue[Any] = SimpleQueue()
    job = Job({"input_ids": torch.tensor([tokens]), "text": "kept"}, Sampling(), results.put)
    scheduler.submit(job)
    return job, results


def test_requests_end_on_their_own(decoding: Decoding) -> None:
    scheduler = Scheduler(decoding, max_requests=2, queue=2, metrics=Metrics())
    scheduler.start()
    _, first = submit(scheduler, 5, 6)
    assert [first.get(timeout=20) for _ in range(2)] == [[5], [6]] and isinstance(first.get(timeout=20), Stats)
    endless, _ = submit(scheduler, ENDLESS)
    error = submit(scheduler, UNWANTED)[1].get(timeout=20)
    assert isinstance(error, ApiError) and error.status == 400 and "unwanted" in str(error)
    wait_until(lambda: scheduler.num_running == 1)
    other, others = submit(scheduler, ENDLESS, 3)
    assert others.get(timeout=20) == [ENDLESS]
    waiting = submit(scheduler, 4)[1]
    scheduler.cancel(endless)
    assert waiting.get(timeout=20) == [4]  # in the place of the one that has left
    is_drained = threading.Event()
    scheduler.drain(is_drained.set)
    with pytest.raises(ApiError, match="stopping"):
        submit(scheduler, 4)
    assert not is_drained.wait(0.05)
    scheduler.cancel(other)
    assert is_drained.wait(20) and scheduler.num_running == 0


def test_a_process_that_fails() -> None:
    with pytest.raises(ValueError, match="^target: none, give one$"):
        DecodingProcess(no_plan).wait()
    decoding = DecodingProcess(plan)
    decoding.wait()
    scheduler = Scheduler(decoding, max_requests=2, queue=2, metrics=Metrics())
    has_stopped = threading.Event()
    scheduler.on_failure = has_stopped.set
    scheduler.start()
    _, results = submit(scheduler, ENDLESS)
    assert results.get(timeout=20) == [ENDLESS]
    decoding.kill()
    error = results.get(timeout=20)
    assert isinstance(error, ApiError) and error.status == 500 and not scheduler.is_alive
    assert has_stopped.wait(20) and scheduler.has_failed
    with pytest.raises(ApiError, match="stopping"):
        scheduler.reserve()
