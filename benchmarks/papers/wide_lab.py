"""The lab of a study on a widened target: the target is another one, drafts, prompts and recordings are those of its source."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import sage
from benchmarks.papers.figures import Json
from benchmarks.papers.lab import Lab
from data_prep.pocket.widen import wide_target
from sage.bench.measurement import BenchPrompt
from sage.replay.recording import Recording
from sage.targets import Target


class WideLab(Lab):
    """A lab with one target, widened.

    Args:
        source: the lab of the target before it is widened.
        name: of the target in the settings.
        megabytes: of weights that a pass reads, as for `wide_target`.
        policies: the policies to tune, as far as the settings have a grid for them.

    Attributes:
        path: folder of the widened target.
    """

    def __init__(self, source: Lab, name: str, megabytes: float, policies: Collection[str]) -> None:
        super().__init__(source.settings, source.store)
        self.path = str(wide_target(source.settings.targets[name], megabytes, "regimes.megabytes"))
        self._source = source
        tuning = source.sizes["tuning"]
        grids = {policy: grid for policy, grid in tuning["grids"].items() if policy in policies}
        self.sizes = {**source.sizes, "tuning": {**tuning, "grids": grids}}

    def target(self, name: str) -> Target:
        passes = self.settings.passes
        return self._cached(("target", name), lambda: sage.load_target(self.path, dtype=torch.float32, passes=passes))

    def recordings(self, target: str, prompts: Sequence[BenchPrompt]) -> list[Recording]:
        """Returns recordings of the source, whose answers and drafts are the same."""
        key = ("recordings", target, *(prompt.name for prompt in prompts))
        return self._source._cached(key, lambda: self._source.recordings(target, prompts))

    def figures(self, study: str, name: str, measure: Callable[[], Json], names: Sequence[str] = (), /, **inputs: Any) -> Json:
        """Returns figures that other studies keep in a file of their own; here they are part of the caller's."""
        return self._cached(("figures", name), measure)


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Sets torch's number of threads, of which each reads a part of the weights."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
