"""Interleaved side-by-side measurement in one process. Owns the order of runs; knows neither policies nor reports.

All prompts come by once per repeat. At each of them every runner runs once, and the order is rotated from one prompt to the
next, so that a machine that warms up, throttles or is shared with something else treats all contestants alike, and a policy
that learns does not see a prompt again before it has seen all others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from sage.bench.runners import Run, Runner
from sage.sampling import Sampling

logger = logging.getLogger(__name__)

WARMUP_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class BenchPrompt:
    """Model-ready inputs of batch 1. `family` groups prompts of one task in the report; empty for none."""

    name: str
    inputs: Mapping[str, Tensor]
    family: str = ""


@dataclass(kw_only=True)
class Measurement:
    """`runs[runner][prompt][repeat]`, the prompts in the order given; `failed` says why a runner is not among them."""

    prompts: list[BenchPrompt]
    sampling: Sampling
    repeats: int
    runs: dict[str, list[list[Run]]]
    autoregressive: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def measure(
    runners: Sequence[Runner],
    prompts: Sequence[BenchPrompt],
    sampling: Sampling,
    repeats: int = 3,
    warmup: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Measurement:
    """Run every runner `repeats` times on every prompt, interleaved.

    Args:
        runners: contestants with different names, at least one of them autoregressive.
        prompts: at least one.
        warmup: unmeasured runs of each runner on the first prompt, of at most `WARMUP_TOKENS` tokens.
        progress: called with (done, total), counting prompts once per repeat.

    Raises:
        ValueError: no prompt, a name used twice, no autoregressive runner, or a count out of range.
    """
    _check(runners, prompts, sampling, repeats, warmup)
    failed: dict[str, str] = {}
    _warm_up(runners, prompts[0], sampling, warmup, failed)
    runs: dict[str, list[list[Run]]] = {runner.name: [[] for _ in prompts] for runner in runners}
    for repeat in range(repeats):
        for index, prompt in enumerate(prompts):
            done = repeat * len(prompts) + index
            for runner in rotated(runners, done):
                if (run := _run(runner, prompt, sampling, failed)) is not None:
                    runs[runner.name][index].append(run)
            if progress is not None:
                progress(done + 1, repeats * len(prompts))
    return Measurement(
        prompts=list(prompts),
        sampling=sampling,
        repeats=repeats,
        runs={name: own for name, own in runs.items() if name not in failed},
        autoregressive=[runner.name for runner in runners if runner.is_autoregressive and runner.name not in failed],
        failed=failed,
    )


def rotated(runners: Sequence[Runner], shift: int) -> list[Runner]:
    """The runners, starting `shift` places on."""
    shift %= len(runners)
    return [*runners[shift:], *runners[:shift]]


def _run(runner: Runner, prompt: BenchPrompt, sampling: Sampling, failed: dict[str, str]) -> Run | None:
    """One run; None for a runner that has failed, now or before."""
    if runner.name in failed:
        return None
    try:
        return runner.run(prompt.inputs, sampling)
    except Exception as error:  # whatever another library raises; our own decoder and the baseline may not fail
        if not runner.may_fail:
            raise
        failed[runner.name] = f"{type(error).__name__} on prompt {prompt.name}: {' '.join(str(error).split())[:300]}"
        logger.warning("%s is left out: %s", runner.name, failed[runner.name])
        return None


def _warm_up(runners: Sequence[Runner], prompt: BenchPrompt, sampling: Sampling, warmup: int, failed: dict[str, str]) -> None:
    """First calls allocate, fill caches and calibrate; none of that belongs in a median."""
    short = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, WARMUP_TOKENS))
    for _ in range(warmup):
        for runner in runners:
            logger.debug("warming up %s", runner.name)
            _run(runner, prompt, short, failed)


def _check(runners: Sequence[Runner], prompts: Sequence[BenchPrompt], sampling: Sampling, repeats: int, warmup: int) -> None:
    names = [runner.name for runner in runners]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"bench: {', '.join(twice)} would run twice; name every policy and baseline once")
    if not any(runner.is_autoregressive for runner in runners):
        raise ValueError("bench: no autoregressive runner, so there is no baseline for a speedup; add 'autoregressive'")
    if not prompts:
        raise ValueError("bench: no prompt to measure on; give at least one")
    if sampling.max_new_tokens < 2:
        raise ValueError(
            f"max_new_tokens: {sampling.max_new_tokens} leaves nothing to decode, because the prefill yields the first "
            "token; at least 2"
        )
    if sampling.stop or sampling.bad_words or sampling.logits_processor:
        raise ValueError("sampling: stop, bad_words and logits_processor are not supported by every runner; remove them")
    for key, value, least in (("repeats", repeats, 1), ("warmup", warmup, 0)):
        if value < least:
            raise ValueError(f"{key}: {value} is too small; at least {least}")
