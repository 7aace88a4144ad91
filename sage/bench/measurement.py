"""Prompts of a measurement, and interleaved side-by-side measurement in one process.

Every repeat iterates over all prompts. Every runner runs once per prompt, in an order that rotates from prompt to prompt: a
machine that warms up, throttles or has other load affects all runners alike, and a policy that learns processes all other
prompts before a prompt recurs.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from sage.bench.options import MeasurementSettings
from sage.bench.runners import PolicyRunner, Runner, TimedRun
from sage.decoding.settings import Sampling
from sage.io.ranges import check_fields
from sage.runtime.timing import frozen_heap

T = TypeVar("T")
logger = logging.getLogger(__name__)

WARMUP_TOKENS = 32
BATCHES = 8  # that a policy decodes in a row: as a prompt ends, the next one takes its place
Messages = list[dict[str, Any]]
MEDIA = ("image", "video")

TEXTS = (
    "Explain in a few sentences how a lighthouse works.",
    "Describe what a busy market street looks like on a rainy morning.",
    "Write a short, friendly note that invites a neighbour to dinner.",
    "What are the steps to change a bicycle tyre? Answer in detail.",
)


@dataclass(frozen=True, kw_only=True)
class BenchPrompt:
    """Model-ready inputs of batch 1."""

    name: str
    inputs: Mapping[str, Tensor]
    family: str = ""  # groups prompts of one task in the report; empty for none
    seed: int | None = None  # replaces that of the sampling parameters, so that prompts do not share their noise
    messages: Sequence[Mapping[str, Any]] = ()  # of `inputs`, which a report shows; empty if they are not known

    @classmethod
    def of(
        cls, target: Any, messages: Sequence[Mapping[str, Any]], name: str, family: str = "", where: str = ""
    ) -> BenchPrompt:
        """Prepares chat messages; ValueError with `where` and the name for those that cannot be prepared."""
        try:
            return cls(name=name, family=family, inputs=target.prepare(messages), messages=messages)
        except ValueError as error:
            raise ValueError(f"{where}{name}: {error}") from error

    def seeded(self, sampling: Sampling) -> Sampling:
        """Returns the sampling parameters with the prompt's own seed, if it has one."""
        return sampling if self.seed is None else replace(sampling, seed=self.seed)


class Interrupted(Exception):
    """Ends a measurement early; raised by its `progress` after a signal."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What an interrupted measurement was to contain."""

    prompts: int
    repeats: int


@dataclass(kw_only=True)
class Measurement:
    """Results: `runs[runner][prompt][repeat]`, and in `failed` the reasons of excluded runners.

    An interrupted measurement, whose `planned` is not None, contains the prompts that every runner completed; the first
    ones may have one repeat more.
    """

    prompts: list[BenchPrompt]
    sampling: Sampling
    repeats: int
    runs: dict[str, list[list[TimedRun]]]
    autoregressive: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    planned: Planned | None = None
    batch_size: int = 1


@frozen_heap()
def measure(
    runners: Sequence[Runner],
    prompts: Sequence[BenchPrompt],
    sampling: Sampling,
    repeats: int = 3,
    warmup: int = 1,
    progress: Callable[[int, int], None] | None = None,
    observe: Callable[[Mapping[str, TimedRun]], None] | None = None,
    ends: tuple[type[BaseException], ...] = (Interrupted,),
    batch_size: int = 1,
) -> Measurement:
    """Runs every runner `repeats` times on every prompt, interleaved. Raises ValueError for no prompt, a name used twice, no
    autoregressive runner, or a count out of range.

    Args:
        warmup: untimed runs of each runner on the first prompt, of at most `WARMUP_TOKENS` tokens.
        progress: called with (done, total), counting prompts once per repeat.
        observe: called before `progress` with the runs of the prompt, by runner.
        ends: exceptions that end the measurement early if a prompt is complete; before that they are raised.
        batch_size: prompts that a policy decodes together.
    """
    _check(runners, prompts, sampling, repeats, warmup, batch_size)
    failed: dict[str, str] = {}
    short = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, WARMUP_TOKENS))
    for runner in [*runners] * warmup:  # first calls allocate, fill caches and calibrate
        logger.debug("warming up %s", runner.name)
        _run_group(runner, prompts[:1], short, failed)
    runs: dict[str, list[list[TimedRun]]] = {runner.name: [[] for _ in prompts] for runner in runners}
    done, total = 0, repeats * len(prompts)
    try:
        while done < total:
            first = done % len(prompts)
            group = prompts[first : first + (batch_size * BATCHES if batch_size > 1 else 1)]
            results = {
                runner.name: _run_group(runner, group, sampling, failed, batch_size) for runner in rotated(runners, done)
            }
            for index in range(len(group)):
                latest = {name: group_runs[index] for name, group_runs in results.items() if group_runs is not None}
                for name, run in latest.items():
                    runs[name][first + index].append(run)
                done += 1
                if observe is not None:
                    observe(latest)
                if progress is not None:
                    progress(done, total)
    except ends:
        if not done:
            raise
    measured = min(done, len(prompts))
    return Measurement(
        prompts=list(prompts[:measured]),
        sampling=sampling,
        repeats=-(-done // len(prompts)),
        runs={name: by_prompt[:measured] for name, by_prompt in runs.items() if name not in failed},
        autoregressive=[runner.name for runner in runners if runner.is_autoregressive and runner.name not in failed],
        failed=failed,
        planned=None if done == total else Planned(prompts=len(prompts), repeats=repeats),
        batch_size=batch_size,
    )


def rotated(items: Sequence[T], shift: int) -> list[T]:
    shift %= len(items)
    return [*items[shift:], *items[:shift]]


def _run_group(
    runner: Runner, prompts: Sequence[BenchPrompt], sampling: Sampling, failed: dict[str, str], batch_size: int = 1
) -> list[TimedRun] | None:
    """Returns a run of every prompt, `batch_size` of them decoded together if the runner can; None if it fails or has failed
    before.
    """
    samplings = [prompt.seeded(sampling) for prompt in prompts]
    if len(prompts) > 1 and isinstance(runner, PolicyRunner) and runner.name not in failed:
        return runner.run_batch([prompt.inputs for prompt in prompts], samplings, batch_size)
    runs = []
    for prompt, seeded in zip(prompts, samplings, strict=True):
        if runner.name in failed:
            return None
        try:
            runs.append(runner.run(prompt.inputs, seeded))
        except Exception as error:  # any error of another library
            if not runner.may_fail:
                raise
            failed[runner.name] = f"{type(error).__name__} on prompt {prompt.name}: {' '.join(str(error).split())[:300]}"
            logger.warning("%s is excluded: %s", runner.name, failed[runner.name])
    return None if runner.name in failed else runs


def _check(
    runners: Sequence[Runner], prompts: Sequence[BenchPrompt], sampling: Sampling, repeats: int, warmup: int, batch_size: int
) -> None:
    names = [runner.name for runner in runners]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"bench: {', '.join(twice)} is given twice; name every policy and baseline once")
    if not any(runner.is_autoregressive for runner in runners):
        raise ValueError("bench: speedups need an autoregressive runner; add 'autoregressive'")
    if not prompts:
        raise ValueError("bench: no prompts; give at least one")
    if sampling.stop or sampling.bad_words or sampling.logits_processor:
        raise ValueError("sampling: stop, bad_words and logits_processor are not supported by every runner; remove them")
    counts = MeasurementSettings(max_new_tokens=sampling.max_new_tokens, repeats=repeats, warmup=warmup, batch_size=batch_size)
    check_fields(counts)


def load_prompts(
    target: Any, file: str | None, images: Sequence[str], text: str | None, limit: int | None, family: str | None = None
) -> list[BenchPrompt]:
    """Returns model-ready prompts from the first given source: `file`, then `images` and `text`, then `TEXTS`. Raises
    ValueError with the file and line, or the image, that cannot be used.

    Args:
        file: JSONL; a line is a list of Hugging Face chat messages, or an object with "messages" and, optionally, "id"
            and "family". A final assistant answer is dropped; relative image paths are relative to the file's folder.
        images: paths or URLs; each is a prompt of its own with `text`.
    """
    if file is not None:
        chats = read_jsonl(Path(file))
    else:
        question = {"type": "text", "text": text or "Describe the image in detail."}
        contents = [(Path(image).name, [{"type": "image", "image": image}, question]) for image in images]
        texts = () if images else TEXTS if text is None else (text,)
        contents += [(f"text-{index}", [{"type": "text", "text": each}]) for index, each in enumerate(texts)]
        chats = [(name, "", [{"role": "user", "content": content}]) for name, content in contents]
    if family is not None:
        known = sorted({own for _, own, _ in chats if own})
        chats = [chat for chat in chats if chat[1] == family]
        if not chats:
            raise ValueError(f"--family {family}: no prompt of this family; families of the file: {', '.join(known) or 'none'}")
    return [BenchPrompt.of(target, messages, name, family) for name, family, messages in chats[:limit]]


def read_jsonl(file: Path) -> list[tuple[str, str, Messages]]:
    """Returns (name, family, messages up to the question) of every line; ValueError for no line or one without messages."""
    if not file.is_file():
        raise ValueError(f"--prompts {file}: no such file; give a JSONL file of chat messages")
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"--prompts {file}: is empty; give one list of chat messages per line")
    return [_line(file, number, line) for number, line in enumerate(lines, start=1)]


def _line(file: Path, number: int, line: str) -> tuple[str, str, Messages]:
    where = f"--prompts {file}, line {number}"
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg}); write one object or list per line") from error
    fields = entry if isinstance(entry, dict) else {"messages": entry}
    messages = fields.get("messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise ValueError(f'{where}: no chat messages; write [{{"role": "user", "content": [...]}}] or {{"messages": [...]}}')
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise ValueError(f"{where}: has no question; end with a user message")
    resolved = [_resolved(message, file.parent) for message in messages]
    return str(fields.get("id", f"{file.stem}-{number}")), str(fields.get("family", "")), resolved


def _resolved(message: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the message with relative paths of images and frames resolved against `folder`."""
    if not isinstance(message.get("content"), list):
        return message
    parts = [
        part | {kind: _below(part[kind], folder) for kind in MEDIA if kind in part} if isinstance(part, dict) else part
        for part in message["content"]
    ]
    return message | {"content": parts}


def _below(source: Any, folder: Path) -> Any:
    if isinstance(source, list):
        return [_below(frame, folder) for frame in source]
    is_path = isinstance(source, str) and not source.startswith(("http://", "https://", "data:", "file:"))
    return str(folder / source) if is_path else source
