"""Metrics as sums and counts, reduced over ranks once per log step; and the clock of pure training time."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sage.trees.chain import Chain
from train.distill.objective import METRIC_NAMES
from train.launch.ranks import Ranks
from train.monitor.acceptance_estimate import ChainEstimate
from train.state.resume import TrainState


class Meter:
    """Adds up what steps report until the next log step.

    Args:
        loader: its `wait_s`, `num_tokens` and `num_padded_tokens` are read where it has them, to report the share of time
            spent waiting for data and of tokens that are padding.
        tokens: those seen before this start.
        depth: of the chains that estimate tokens per target pass.
    """

    def __init__(self, loader: Any, tokens: int = 0, depth: int = Chain.depth) -> None:
        self.loader = loader
        self.estimate = ChainEstimate(depth)
        self.latest: dict[str, float] = {}
        self._sums: Tensor | None = None
        self._tokens = tokens
        self._waited = self._wait_s()
        self._handed = self._handed_out()
        self._start = time.perf_counter()

    def add(self, sums: Tensor, agree_KS: Tensor, mask_BP: Tensor) -> None:
        """Takes what a micro-batch reports; stays on the device.

        Args:
            sums: `LossSums.stacked()`.
            agree_KS, mask_BP: see `ChainEstimate.add`.
        """
        self._sums = sums if self._sums is None else self._sums + sums
        self.estimate.add(agree_KS, mask_BP)

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
        handed = self._handed_out()
        totals = ranks.sum(torch.cat((self._sums.cpu(), self.estimate.take(), handed - self._handed)))
        *sums, count, kept, passes, real, slots = totals.tolist()
        now = time.perf_counter()
        elapsed = now - self._start
        state.time_s += elapsed
        means = {name: value / count for name, value in zip(METRIC_NAMES, sums, strict=True)}
        line: dict[str, float | int] = {
            "step": state.step,
            "tokens": state.tokens,
            **means,
            "estimated_tokens_per_pass": kept / passes,
            **facts,
            "tokens_per_s": (state.tokens - self._tokens) / elapsed,
            "time_s": state.time_s,
            "data_wait": (self._wait_s() - self._waited) / elapsed,
        }
        line["memory_gib"] = peak_memory(ranks.device) / 2**30
        if slots:
            line["padding"] = 1 - real / slots
        self._sums, self._tokens, self._waited, self._start = None, state.tokens, self._wait_s(), now
        self._handed = handed
        self.latest = {key: float(value) for key, value in line.items()}
        return line

    def _wait_s(self) -> float:
        return float(getattr(self.loader, "wait_s", 0.0))

    def _handed_out(self) -> Tensor:
        """[2] float64, tokens this rank was handed, without and with padding."""
        return torch.tensor(
            [getattr(self.loader, name, 0) for name in ("num_tokens", "num_padded_tokens")], dtype=torch.float64
        )


def peak_memory(device: torch.device) -> int:
    """The most bytes that were in use so far: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
