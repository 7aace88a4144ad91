"""Counts and times of the server in Prometheus' format.

A counter is updated when an answer ends, so a round costs nothing.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from sage.decoding.answer import Stats

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
CONTENT_TYPE = CONTENT_TYPE_LATEST


class Metrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.responses = Counter("sage_responses", "Chat completion requests by status", ["status"], registry=registry)
        self._ends = Counter("sage_answers", "Started answers by their end", ["end"], registry=registry)
        self._prompt = Counter("sage_prompt_tokens", "Tokens of prompts", registry=registry)
        self._generated = Counter("sage_generated_tokens", "Tokens of answers", registry=registry)
        self._rounds = Counter("sage_rounds", "Draft-and-verify rounds", registry=registry)
        self._drafted = Counter("sage_drafted_tokens", "Nodes of verified trees", registry=registry)
        text = "Rounds that accepted a drafted token at this depth"
        self._accepted = Counter("sage_accepted_tokens", text, ["depth"], registry=registry)
        self._stages = Counter("sage_stage_seconds", "Seconds per stage of decoding", ["stage"], registry=registry)
        self._answer_s = Histogram("sage_answer_seconds", "From the queue to the end", registry=registry, buckets=SECONDS)
        text = "From the queue to the first token"
        self.first_token_s = Histogram("sage_first_token_seconds", text, registry=registry, buckets=SECONDS)
        self._waiting = Gauge("sage_waiting_requests", "Requests in the queue", registry=registry)
        self._running = Gauge("sage_running_requests", "Requests that are decoded", registry=registry)

    def watch(self, num_waiting: Callable[[], int], num_running: Callable[[], int]) -> None:
        """Sets the functions that count requests."""
        self._waiting.set_function(num_waiting)
        self._running.set_function(num_running)

    def answered(self, stats: Stats, seconds: float) -> None:
        """Counts a complete answer."""
        self.ended("complete")
        self._prompt.inc(stats.prompt_tokens)
        self._generated.inc(stats.new_tokens)
        self._rounds.inc(stats.rounds)
        self._drafted.inc(sum(entry["nodes"] for entry in stats.rounds_log))
        for depth, count in accepted_by_depth(stats).items():
            self._accepted.labels(depth).inc(count)
        for stage, time_s in stats.time_s.items():
            self._stages.labels(stage).inc(time_s)
        self._answer_s.observe(seconds)

    def ended(self, how: str) -> None:
        """Counts the end of an answer: complete, cancelled or failed."""
        self._ends.labels(how).inc()

    def text(self) -> bytes:
        """Returns all metrics."""
        return generate_latest(self._registry)


def accepted_by_depth(stats: Stats) -> Tally[int]:
    """Returns the rounds that accepted at least 1, 2, .. drafted tokens."""
    return Tally(depth for accepted in stats.accepted for depth in range(1, accepted + 1))
