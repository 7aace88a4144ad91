"""Counts and times of the server in Prometheus' format.

A counter is updated when an answer ends, so a round costs nothing.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from sage.decoding.answer import Stats

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.responses = self._counter("responses", "Chat completion requests by status", "status")
        self._ends = self._counter("answers", "Started answers by their end", "end")
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts")
        self._generated = self._counter("generated_tokens", "Tokens of answers")
        self._rounds = self._counter("rounds", "Draft-and-verify rounds")
        self._drafted = self._counter("drafted_tokens", "Nodes of verified trees")
        self._accepted = self._counter("accepted_tokens", "Rounds that accepted a drafted token at this depth", "depth")
        self._stages = self._counter("stage_seconds", "Seconds per stage of decoding", "stage")
        self._answer_s = self._histogram("answer", "From the queue to the end")
        self.first_token_s = self._histogram("first_token", "From the queue to the first token")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"sage_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"sage_{name}_seconds", text, registry=self.registry, buckets=SECONDS)

    def watch(self, num_waiting: Callable[[], int], num_running: Callable[[], int]) -> None:
        """Sets the functions that count requests."""
        Gauge("sage_waiting_requests", "Requests in the queue", registry=self.registry).set_function(num_waiting)
        Gauge("sage_running_requests", "Requests that are decoded", registry=self.registry).set_function(num_running)

    def answered(self, stats: Stats, seconds: float) -> None:
        """Counts a complete answer."""
        self.ended("complete")
        self._prompt.inc(stats.prompt_tokens)
        self._generated.inc(stats.new_tokens)
        self._rounds.inc(stats.rounds)
        self._drafted.inc(sum(entry["nodes"] for entry in stats.rounds_log))
        for depth, count in Tally(depth for accepted in stats.accepted for depth in range(1, accepted + 1)).items():
            self._accepted.labels(depth).inc(count)
        for stage, time_s in stats.time_s.items():
            self._stages.labels(stage).inc(time_s)
        self._answer_s.observe(seconds)

    def ended(self, how: str) -> None:
        """Counts the end of an answer: complete, cancelled or failed."""
        self._ends.labels(how).inc()
