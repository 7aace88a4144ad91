"""Tree passes of a target in its pass mode.

Shapes: N tree nodes, X visible rows, S keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim
from transformers import PreTrainedConfig

from sage.passes.functions import TreePass
from sage.passes.package import Run, compiled
from sage.runtime.cache import TreeCache
from sage.targets import Features, Target
from sage.targets.tree_passes import EagerTreePasses, TreeOutput

MAX_NODES, MAX_KEYS = 4096, 1 << 20
SPARE_ROWS = 1  # a compiled pass assumes more rows than keys
EXAMPLE_NODES, EXAMPLE_VISIBLE, EXAMPLE_KEYS, EXAMPLE_CAPACITY = 5, 7, 24, 48


class FunctionTreePasses(EagerTreePasses):
    """Tree passes as functions of tensors: one compiled for a single node, one for several."""

    def __init__(self, target: Target, levels: Sequence[int]) -> None:
        super().__init__(target, levels)
        self._steps = torch.empty(0, dtype=torch.long)
        self._runs: dict[bool, Run] = {}
        self._function = TreePass(target, levels)

    def capacity(self, num_tokens: int) -> int:
        return num_tokens + SPARE_ROWS

    def new_cache(self, num_tokens: int) -> TreeCache:
        return self.target.new_cache(self.capacity(num_tokens))

    def refresh(self) -> None:
        """Looks up the addresses of the weights again."""
        for run in self._runs.values():
            run.refresh()

    def __call__(self, tokens: Tensor, positions: Tensor, visible: Tensor, cache: TreeCache) -> TreeOutput:
        nodes, rows = visible.shape
        first = cache.reserve(nodes)
        steps, end = self._arange(cache.capacity), first + nodes
        args = [
            tokens,
            positions,
            steps.narrow(0, first, nodes),
            visible,
            steps.narrow(0, end - rows, rows),
            steps.narrow(0, 0, end),
            *cache.keys,
            *cache.values,
        ]
        greedy, logits, last, *levels = self._run(nodes > 1)(args)
        return TreeOutput(Features(last, tuple(levels)), logits, greedy)

    def _arange(self, count: int) -> Tensor:
        if len(self._steps) < count:
            self._steps = torch.arange(count, device=self.target.device)
        return self._steps

    def _run(self, is_tree: bool) -> Run:
        if is_tree not in self._runs:
            label = "the target's pass over " + ("several nodes" if is_tree else "one node")
            self._runs[is_tree] = compiled(
                self._function, partial(self._example, is_tree), label, (describe_target(self.target), self.levels)
            )
        return self._runs[is_tree]

    def _example(self, is_tree: bool) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Returns example arguments and their dynamic dimensions."""
        target, nodes = self.target, EXAMPLE_NODES if is_tree else 1
        row = torch.arange(nodes, device=target.device)
        states = (1, target.num_kv_heads, EXAMPLE_CAPACITY, target.head_dim)
        buffers = [
            [torch.zeros(states, dtype=target.dtype, device=target.device) for _ in range(target.num_layers)] for _ in "kv"
        ]
        first = EXAMPLE_KEYS - nodes
        columns = torch.arange(EXAMPLE_KEYS, device=target.device)
        seen = columns[-EXAMPLE_VISIBLE:]
        visible = torch.ones(nodes, EXAMPLE_VISIBLE, dtype=torch.bool, device=target.device)
        args = (row.clone(), first + row, first + row, visible, seen.clone(), columns, *buffers)
        of_nodes = {0: Dim("nodes", min=2, max=MAX_NODES)} if is_tree else None
        of_rows = Dim("rows", min=1, max=MAX_NODES)
        of_buffer = [{2: Dim("capacity", min=2, max=MAX_KEYS)}] * target.num_layers
        of_visible, of_keys = {**(of_nodes or {}), 1: of_rows}, {0: Dim("keys", min=2, max=MAX_KEYS)}
        dims = (of_nodes, of_nodes, of_nodes, of_visible, {0: of_rows}, of_keys, of_buffer, of_buffer)
        return args, dims


def describe_target(target: Target) -> dict[str, Any]:
    """Returns what passes of a target depend on, besides weights: the configuration of its text layers."""
    return {"model_type": target.family.model_type, **without_paths(target.text_config)}


def without_paths(config: PreTrainedConfig) -> dict[str, Any]:
    """Returns a configuration without the folders that it came from."""
    return {key: value for key, value in config.to_dict().items() if key not in ("_name_or_path", "target_path")}
