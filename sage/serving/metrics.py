"""Counts and times of the server in Prometheus' format. What a round has done is counted when its answer ends."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector

from sage.decoding.answer import Stats

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKENS = [2**power for power in range(18)]


class Metrics:
    """The metrics of one server; `pid` is that of the decoding process, if it has one."""

    def __init__(self, model: str = "", pid: int | None = None) -> None:
        self.registry = CollectorRegistry()
        Info("sage_model", "The target", registry=self.registry).info({"name": model})
        ProcessCollector(registry=self.registry)
        if pid is not None:
            ProcessCollector("sage_decoder", lambda: pid, registry=self.registry)
        self.responses = self._counter("responses", "Chat completion requests by status", "status")
        self._ends = self._counter("answers", "Started answers by their end", "end")
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts")
        self._generated = self._counter("generated_tokens", "Tokens of answers")
        self._rounds = self._counter("rounds", "Draft-and-verify rounds")
        self._drafted = self._counter("drafted_tokens", "Nodes of verified trees")
        self._accepted = self._counter("accepted_tokens", "Rounds that accepted a drafted token at this depth", "depth")
        self._stages = self._counter("stage_seconds", "Seconds per stage of decoding", "stage")
        self._answer_s = self._histogram("answer_seconds", "From the queue to the end")
        self._first_token_s = self._histogram("first_token_seconds", "From the queue to the first token")
        self._token_s = self._histogram("token_seconds", "From one token to the next, the mean of each round")
        self._prompt_length = self._histogram("prompt_length", "Tokens of a prompt", TOKENS)
        self._answer_length = self._histogram("answer_length", "Tokens of an answer", TOKENS)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"sage_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float] = SECONDS) -> Histogram:
        return Histogram(f"sage_{name}", text, registry=self.registry, buckets=buckets)

    def watch(self, name: str, text: str, number: Callable[[], int]) -> None:
        """Adds a gauge whose value is that of a function."""
        Gauge(f"sage_{name}", text, registry=self.registry).set_function(number)

    def emitted(self, count: int, seconds: float, is_first: bool) -> None:
        """Counts new tokens of an answer, `seconds` after those before."""
        self._generated.inc(count)
        (self._first_token_s if is_first else self._token_s).observe(seconds if is_first else seconds / count)

    def answered(self, stats: Stats, seconds: float) -> None:
        """Counts a complete answer."""
        self.ended("complete")
        self._prompt.inc(stats.prompt_tokens)
        self._prompt_length.observe(stats.prompt_tokens)
        self._answer_length.observe(stats.new_tokens)
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
