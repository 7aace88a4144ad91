"""The scheduler with a decoder that repeats its prompt, in a process of its own."""

import asyncio
import gc
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

import sage
from sage.decoding.answer import Stats
from sage.decoding.settings import Sampling
from sage.runtime.compiled import CompiledFunction
from sage.runtime.modes import PassMode
from sage.serving.decoder_process import DecoderProcess, Plan, decode, greeting, plan_decoding
from sage.serving.errors import ApiError
from sage.serving.scheduler import Metrics, Scheduler, Ticket
from sage.serving.settings import ServerLimits

ENDLESS, UNWANTED = 0, 13  # tokens of a prompt


@dataclass(eq=False)
class Repeated:
    """A request whose answer is its prompt, a token in every round."""

    left: list[int]
    is_endless: bool
    error: None = None
    stats: Stats = field(default_factory=Stats)

    @property
    def is_over(self) -> bool:
        return not self.left and not self.is_endless


class Repeater:
    def __init__(self) -> None:
        self.requests: list[Repeated] = []

    def add(self, inputs: Any, policy: str, sampling: Sampling) -> Repeated:
        tokens = inputs["input_ids"][0].tolist()
        if UNWANTED in tokens:
            raise ValueError("prompt: unwanted")
        self.requests.append(Repeated(tokens, ENDLESS in tokens))
        return self.requests[-1]

    def step(self) -> Sequence[Any]:
        return [(one, SimpleNamespace(tokens=[one.left.pop(0)] if one.left else [], logprobs=())) for one in self.requests]

    def remove(self, request: Repeated) -> None:
        self.requests.remove(request)


def plan() -> Plan:
    return Plan(Repeater, "", max_context=64, end_token_ids=(7,))  # type: ignore[arg-type]


def no_plan() -> Plan:
    raise ValueError("target: none,\ngive one")


def run(test: Callable[[DecoderProcess], Coroutine[Any, Any, None]]) -> None:
    process = DecoderProcess(plan)
    assert process.wait() == (64, (7,))
    asyncio.run(asyncio.wait_for(test(process), 60))
    process.close()
    assert not process.is_alive


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def started(process: DecoderProcess) -> Scheduler:
    scheduler = Scheduler(process, max_requests=2, queue=2, metrics=Metrics())
    scheduler.start()
    return scheduler


def answer(scheduler: Scheduler, *tokens: int) -> asyncio.Task[list[Any]]:
    """All results for a prompt."""

    async def collect() -> list[Any]:
        inputs = {"input_ids": torch.tensor([tokens]), "text": "kept"}
        async with aclosing(scheduler.decode(Ticket(), inputs, Sampling())) as results:
            return [result async for result in results]

    return asyncio.create_task(collect())


@pytest.mark.slow
def test_requests_end_on_their_own() -> None:
    async def test(process: DecoderProcess) -> None:
        scheduler = started(process)
        *tokens, stats = await answer(scheduler, 5, 6)
        assert tokens == [([5], ()), ([6], ())] and isinstance(stats, Stats)
        endless = answer(scheduler, ENDLESS)
        with pytest.raises(ApiError, match="unwanted") as refused:
            await answer(scheduler, UNWANTED)
        assert refused.value.status_code == 400
        other, waiting = answer(scheduler, ENDLESS, 3), answer(scheduler, 4)
        await until(lambda: (len(scheduler.running), scheduler.num_waiting) == (2, 1))
        endless.cancel()
        assert (await waiting)[0] == ([4], ())  # in the place of the one that has left
        third, late = answer(scheduler, ENDLESS), answer(scheduler, 4)
        await until(lambda: scheduler.num_waiting == 1)
        drained = asyncio.create_task(scheduler.drain(60))
        with pytest.raises(ApiError, match="stopping"):
            await late
        with pytest.raises(ApiError, match="stopping"), scheduler.reserved():
            pass
        assert not drained.done() and len(scheduler.running) == 2
        other.cancel(), third.cancel()
        await drained
        assert len(scheduler.running) == 0

    run(test)


@pytest.mark.slow
def test_a_process_that_is_killed_ends_its_requests_and_the_server() -> None:
    async def test(process: DecoderProcess) -> None:
        scheduler, stopped = started(process), asyncio.Event()
        scheduler.on_failure = stopped.set
        requests = [answer(scheduler, ENDLESS) for _ in range(3)]
        await until(lambda: len(scheduler.running) == 2)
        process.kill()
        for request in requests:
            with pytest.raises(ApiError, match="failed") as failed:
                await request
            assert failed.value.status_code == 500
        await stopped.wait()
        assert scheduler.has_failed and not scheduler.process.is_alive
        with pytest.raises(ApiError, match="stopping"), scheduler.reserved():
            pass

    run(test)


@pytest.mark.slow
def test_a_mistake_that_the_process_finds_is_raised() -> None:
    with pytest.raises(ValueError, match="^target: none, give one$"):
        DecoderProcess(no_plan).wait()


def test_what_loading_has_left_is_collected_before_the_server_listens() -> None:
    connection, frozen = MagicMock(), list[int]()
    connection.send.side_effect = lambda _: frozen.append(gc.get_freeze_count())
    connection.poll.side_effect = EOFError
    decode(connection, plan, (), in_thread=True)
    assert len(frozen) == 1 and frozen[0] > gc.get_freeze_count()


def test_no_pass_is_compiled_after_the_start(models: tuple[sage.Target, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = models
    met: set[Any] = set()

    def eagerly(self: CompiledFunction, inputs: Any) -> Any:
        met.add((self._function, self._function.variant(inputs)))
        return self._function.compute(inputs)

    monkeypatch.setattr(CompiledFunction, "__call__", eagerly)
    monkeypatch.setattr(target, "passes", PassMode.compiled)
    monkeypatch.setattr(draft, "training", False)  # whose passes are eager
    plan = plan_decoding(target, draft, "chain", ServerLimits(max_requests=3, max_context=100))
    warm, decoder = set(met), plan.new_decoder()
    inputs = target.prepare([{"role": "user", "content": "Hello"}])
    for policy in ("autoregressive", "chain", "sage"):
        requests = [decoder.add(inputs, policy, max_new_tokens=length) for length in (4, 8, 12)]
        while not all(request.is_over for request in requests):
            decoder.step()
    assert warm and met == warm


@pytest.mark.parametrize(("room", "expected"), [(100, True), (10, False)])
def test_the_warm_up_has_an_image_where_its_tokens_fit(models: tuple[sage.Target, Any], room: int, expected: bool) -> None:
    assert ("pixel_values" in greeting(models[0], room)) is expected
