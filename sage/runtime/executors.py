"""Executors: how pass functions run. Targets and drafts bind their functions to one and do not know which."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sage.runtime.cache import TreeCache
from sage.runtime.pass_function import PassFunction


class Run(Protocol):
    """A pass function bound to an executor and to the present weights of its model."""

    def __call__(self, inputs: Any) -> Sequence[Tensor]:
        """Runs the function on its described arguments, a dataclass of the type `PassFunction.inputs`."""


class Executor(ABC):
    """Runs pass functions in one way.

    Attributes:
        max_prompt: tokens of the longest prompt that it reads; in longer ones, products take most of the time.
        has_buckets: whether sizes are padded to buckets, so that the time of a pass grows in steps.
    """

    max_prompt = 0
    has_buckets = False

    @abstractmethod
    def bind(self, function: PassFunction) -> Run:
        """Returns what runs `function`. Call it for every request: weights may have moved since the last one."""

    def splits_keys(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
        """Whether a target's pass attends to its keys in two parts (see `sage.runtime.prefix_attention`)."""
        return False

    def describe(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
        """Returns how passes of a target run, for reports."""
        return type(self).__name__.lower()

    def capacity(self, num_tokens: int) -> int:
        """Returns the capacity of a cache that is to hold `num_tokens` tokens."""
        return num_tokens

    def new_cache(self, owner: Any, num_tokens: int, make: Callable[[int], TreeCache]) -> TreeCache:
        """Returns an empty cache for `num_tokens` tokens of a request.

        Args:
            owner: target or draft, whose caches all have the same layers.
            make: returns a new cache of a capacity.
        """
        return make(self.capacity(num_tokens))

    def release(self) -> None:  # noqa: B027
        """Frees the memory that is kept for further requests."""


class Eager(Executor):
    """Kernel by kernel: the reference."""

    def bind(self, function: PassFunction) -> Run:
        return function.compute


EAGER = Eager()
