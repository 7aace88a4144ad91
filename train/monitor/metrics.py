"""The lines of metrics.jsonl: sums and counts of micro-batches, reduced over ranks once per log step, and the training time."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sage.trees.chain import Chain
from train.config.schema import DecodeConfig
from train.distill.objective import METRIC_NAMES
from train.launch.ranks import Ranks
from train.state.resume import TrainState


def chain_depth(decode: DecodeConfig) -> int:
    return int(decode.options.get("chain", {}).get("depth", Chain.depth))


class ChainEstimate:
    """Collects agreements without device synchronization, and simulates chains of `depth` drafted tokens once per log step."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._batches: list[tuple[Tensor, Tensor]] = []
        self._counts: Tensor | None = None

    def add(self, agreements: Tensor, mask_BP: Tensor) -> None:
        """Adds one micro-batch.

        Args:
            agreements: BoolTensor [K, S], whether draft and target have the same most probable token; row s of step k is about
                the same token as row s of step 0, drafted k steps deep. With chains from anchors, the counts [2, K] of
                `train.distill.objective.chain_counts`.
            mask_BP: BoolTensor, the S supervised pairs.
        """
        if agreements.dtype is torch.bool:
            self._batches.append((agreements, mask_BP))
        else:
            self._counts = agreements if self._counts is None else self._counts + agreements

    def pop(self) -> Tensor:
        """Returns [2] float64, tokens and target passes of all chains simulated since the last call."""
        batches, self._batches = self._batches, []
        counts, self._counts = self._counts, None
        simulated = (simulate(agree_KS.cpu(), mask_BP.cpu(), self.depth) for agree_KS, mask_BP in batches)
        expected = torch.zeros(2, dtype=torch.float64) if counts is None else expect(counts.cpu(), self.depth)
        return sum(simulated, expected)


def simulate(agree_KS: Tensor, mask_BP: Tensor, depth: int) -> Tensor:
    """Returns [2] float64: supervised tokens, and target passes needed by chains of `depth` (see the module's example)."""
    rows = agree_KS.tolist()
    passes = 0
    for start, end in answers(mask_BP):
        position = start
        while position < end:
            accepted = 0
            while accepted < depth and position + accepted < end and rows[min(accepted, len(rows) - 1)][position + accepted]:
                accepted += 1
            position += accepted + 1
            passes += 1
    return torch.tensor([agree_KS.shape[1], passes], dtype=torch.float64)


def expect(counts_2K: Tensor, depth: int) -> Tensor:
    """Returns [2] float64: expected tokens of chains of `depth` from anchors, and their number, the target passes."""
    reached_K, agreed_K = counts_2K
    share_K = agreed_K / reached_K.clamp(min=1)
    deeper = share_K[-1:].expand(max(0, depth - len(share_K)))
    passes = reached_K[0].clamp(min=1)  # there may be none: a chain that starts before the answer has no first token
    return torch.stack((passes * (1 + torch.cat((share_K[:depth], deeper)).cumprod(0).sum()), passes))


def answers(mask_BP: Tensor) -> list[tuple[int, int]]:
    """Returns ranges [start, end) of the supervised positions that are contiguous in one sequence."""
    batch_S, pair_S = mask_BP.nonzero(as_tuple=True)
    if not len(pair_S):
        return []
    is_first_S = torch.ones_like(pair_S, dtype=torch.bool)
    is_first_S[1:] = (batch_S[1:] != batch_S[:-1]) | (pair_S[1:] != pair_S[:-1] + 1)
    starts = is_first_S.nonzero()[:, 0].tolist()
    return list(zip(starts, [*starts[1:], len(pair_S)], strict=True))


class TrainingMetrics:
    """Accumulates the metrics of micro-batches until the next log step; `latest` is the last line.

    `tokens` were processed before this start. `wait_s`, `num_tokens` and `num_padded_tokens` of the loader are read if present,
    for the shares of data wait and padding; `depth` is that of the chains that estimate tokens per target pass.
    """

    def __init__(self, loader: Any, tokens: int = 0, depth: int = Chain.depth) -> None:
        self.loader = loader
        self.estimate = ChainEstimate(depth)
        self.latest: dict[str, float] = {}
        self._sums: Tensor | None = None
        self._last_tokens = tokens
        self._last_wait_s = self._wait_s()
        self._last_loaded = self._loaded_tokens()
        self._elapsed_s, self._ticked = 0.0, time.perf_counter()

    def add(self, sums: Tensor, agreements: Tensor, mask_BP: Tensor) -> None:
        """Adds `LossSums.sums` of a micro-batch without device synchronization; for the others see `ChainEstimate.add`."""
        self._sums = sums if self._sums is None else self._sums + sums
        self.estimate.add(agreements, mask_BP)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the enclosed block from the training time."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._ticked += time.perf_counter() - begin

    def tick(self) -> float:
        """Returns the seconds of training on this rank since the last call."""
        last, self._ticked = self._ticked, time.perf_counter()
        self._elapsed_s += self._ticked - last
        return self._ticked - last

    def reduce(self, ranks: Ranks, state: TrainState, **extra: float) -> dict[str, float | int]:
        """Returns global means since the last call, as a line of metrics.jsonl. Collective: call it on every rank."""
        assert self._sums is not None, "reduce() before any step"
        loaded = self._loaded_tokens()
        own_s = torch.tensor([self.tick()], dtype=torch.float64)
        totals = ranks.sum(torch.cat((self._sums.cpu(), self.estimate.pop(), loaded - self._last_loaded, own_s)))
        *sums, count, chain_tokens, chain_passes, real, padded, all_s = totals.tolist()
        elapsed_s, self._elapsed_s = self._elapsed_s, 0.0
        state.time_s += all_s / ranks.world_size
        line: dict[str, float | int] = {
            "step": state.step,
            "tokens": state.tokens,
            **{name: value / count for name, value in zip(METRIC_NAMES, sums, strict=True)},
            "estimated_tokens_per_pass": chain_tokens / chain_passes,
            **extra,
            "tokens_per_s": (state.tokens - self._last_tokens) / elapsed_s,
            "time_s": state.time_s,
            "data_wait": (self._wait_s() - self._last_wait_s) / elapsed_s,
            **peak_memory(ranks.device),
        }
        if padded:
            line["padding"] = 1 - real / padded
        self._sums = None
        self._last_tokens, self._last_wait_s, self._last_loaded = state.tokens, self._wait_s(), loaded
        self.latest = {key: float(value) for key, value in line.items()}
        return line

    def _wait_s(self) -> float:
        return float(getattr(self.loader, "wait_s", 0.0))

    def _loaded_tokens(self) -> Tensor:
        """[2] float64, tokens loaded on this rank without and with padding."""
        names = ("num_tokens", "num_padded_tokens")
        return torch.tensor([getattr(self.loader, name, 0) for name in names], dtype=torch.float64)


def peak_memory(device: torch.device) -> dict[str, float]:
    """Returns the peak memory of this process in GiB: allocated and reserved on a GPU, resident on a CPU."""
    if device.type == "cuda":
        allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        return {"memory_gib": allocated / 2**30, "reserved_gib": reserved / 2**30}
    return {"memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}  # Linux counts in KiB
