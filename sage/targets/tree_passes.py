"""Tree passes of a target, and their eager form.

Shapes: N tree nodes, X visible rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sage.runtime.cache import TreeCache
from sage.targets.target import Features, Target


@dataclass
class TreeOutput:
    """Result of a tree pass: features of all nodes [1, N, D], logits [N, V], and greedy tokens [N] if computed with them."""

    features: Features
    logits: Tensor
    greedy: Tensor | None = None


class TreePasses(Protocol):
    """Runs tree passes of a target."""

    def __call__(self, tokens: Tensor, positions: Tensor, visible: Tensor, cache: TreeCache) -> TreeOutput:
        """Runs one pass and appends N rows to the cache; arguments as of `Target.tree_pass`."""

    def capacity(self, num_tokens: int) -> int:
        """Returns the capacity of a cache for `num_tokens` tokens."""

    def new_cache(self, num_tokens: int) -> TreeCache:
        """Returns an empty cache for `num_tokens` tokens."""


class EagerTreePasses:
    """Tree passes kernel by kernel; `levels` are indices k of `hidden_states` to return as well."""

    def __init__(self, target: Target, levels: Sequence[int]) -> None:
        self.target, self.levels = target, tuple(levels)

    def capacity(self, num_tokens: int) -> int:
        return num_tokens

    def new_cache(self, num_tokens: int) -> TreeCache:
        return self.target.new_cache(num_tokens)

    def __call__(self, tokens: Tensor, positions: Tensor, visible: Tensor, cache: TreeCache) -> TreeOutput:
        features = self.target.tree_pass(tokens, positions, visible, cache, self.levels)
        return TreeOutput(features, self.target.lm_head(features.last[0]))
