"""Metrics as sums and counts, reduced over ranks once per log step; and the clock of pure training time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from train.ranks import Ranks
from train.resume import TrainState

NAMES = ("loss", "loss_ce", "loss_feature", "agreement", "acceptance")  # the sums of objective.Sums but its count


class Meter:
    """Adds up what steps report until the next log step.

    Args:
        loader: its `wait_s` is read where it has one, to report the share of time spent waiting for data.
    """

    def __init__(self, loader: Any, tokens: int = 0) -> None:
        self.loader = loader
        self.latest: dict[str, float] = {}
        self._sums: Tensor | None = None
        self._tokens = tokens
        self._waited = self._wait_s()
        self._start = time.perf_counter()

    def add(self, sums: Tensor) -> None:
        """Takes `Sums.detached()` of one micro-batch; stays on the device."""
        self._sums = sums if self._sums is None else self._sums + sums

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is no training time."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._start += time.perf_counter() - begin

    def reduce(self, ranks: Ranks, state: TrainState, **facts: float) -> dict[str, float | int]:
        """Global means since the last call, as one line of metrics.jsonl. Every rank has to call it."""
        assert self._sums is not None, "reduce() before any step"
        *sums, count = ranks.sum(self._sums).tolist()
        now = time.perf_counter()
        elapsed = now - self._start
        state.time_s += elapsed
        means = {name: value / count for name, value in zip(NAMES, sums, strict=True)}
        line: dict[str, float | int] = {
            "step": state.step,
            "tokens": state.tokens,
            **means,
            **facts,
            "tokens_per_s": (state.tokens - self._tokens) / elapsed,
            "time_s": state.time_s,
            "data_wait": (self._wait_s() - self._waited) / elapsed,
        }
        if ranks.device.type == "cuda":
            line["memory_gib"] = torch.cuda.max_memory_allocated(ranks.device) / 2**30
        self._sums, self._tokens, self._waited, self._start = None, state.tokens, self._wait_s(), now
        self.latest = {key: float(value) for key, value in line.items()}
        return line

    def _wait_s(self) -> float:
        return float(getattr(self.loader, "wait_s", 0.0))
