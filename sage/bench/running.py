"""Figures of a measurement while it runs, from the runs so far; those of the report are in sage.bench.summary."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from sage.bench.runners import Runner, TimedRun
from sage.bench.summary import Runs, decode_rate, pooled_counts


class RunningFigures:
    """Tokens per target pass and speedup so far of every runner that drafts.

    Args:
        runners: of the measurement; the fastest autoregressive one so far is the baseline.
        shown: names of the runners to describe; those that do not draft are left out.
    """

    def __init__(self, runners: Sequence[Runner], shown: Sequence[str]) -> None:
        self._baselines = [runner.name for runner in runners if runner.is_autoregressive]
        self._shown = [name for name in shown if name not in self._baselines]
        self._runs: defaultdict[str, Runs] = defaultdict(list)

    def add(self, runs: Mapping[str, TimedRun]) -> None:
        """Adds the runs of one prompt, by runner."""
        for name, run in runs.items():
            self._runs[name].append([run])

    def __str__(self) -> str:
        """`sage 2.31 tokens/pass 1.85x, chain 2.10 tokens/pass 1.60x`; empty before the first run."""
        base = max((decode_rate(self._runs[name]) for name in self._baselines), default=0.0)
        parts = []
        for name in self._shown:
            if tokens := pooled_counts(self._runs[name])["tokens_per_target_pass"]:
                speedup = f" {decode_rate(self._runs[name]) / base:.2f}x" if base else ""
                parts.append(f"{name} {tokens:.2f} tokens/pass{speedup}")
        return ", ".join(parts)
