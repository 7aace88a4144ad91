"""Figures of a measurement while it runs, from sums over the runs so far; those of the report are in sage.bench.summary."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from sage.bench.runners import Runner, TimedRun


class RunningFigures:
    """Tokens per target pass and speedup so far of every runner that drafts.

    Args:
        runners: of the measurement; the fastest autoregressive one so far is the baseline.
        shown: names of the runners to describe; those that do not draft are left out.
    """

    def __init__(self, runners: Sequence[Runner], shown: Sequence[str]) -> None:
        self._baselines = [runner.name for runner in runners if runner.is_autoregressive]
        self._shown = [name for name in shown if name not in self._baselines]
        self._tokens: defaultdict[str, float] = defaultdict(float)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._passes: defaultdict[str, float] = defaultdict(float)
        self._pass_tokens: defaultdict[str, float] = defaultdict(float)

    def add(self, runs: Mapping[str, TimedRun]) -> None:
        """Adds the runs of one prompt, by runner."""
        for name, run in runs.items():
            self._tokens[name] += run.decode_tokens
            self._seconds[name] += run.decode_s
            if name in self._shown:
                self._passes[name] += run.stats.target_passes
                self._pass_tokens[name] += run.stats.tokens_per_target_pass * run.stats.target_passes

    def __str__(self) -> str:
        """`sage 2.31 tokens/pass 1.85x, chain 2.10 tokens/pass 1.60x`; empty before the first run."""
        base = max((self._rate(name) for name in self._baselines), default=0.0)
        parts = []
        for name in self._shown:
            if self._passes[name]:
                speedup = f" {self._rate(name) / base:.2f}x" if base else ""
                parts.append(f"{name} {self._pass_tokens[name] / self._passes[name]:.2f} tokens/pass{speedup}")
        return ", ".join(parts)

    def _rate(self, name: str) -> float:
        return self._tokens[name] / self._seconds[name] if self._seconds[name] else 0.0
