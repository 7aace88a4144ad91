"""Draft sessions in the pass mode of their target.

Shapes: F frontier nodes, M tokens committed, S keys, D hidden, U draft vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim

from sage.drafts.eagle import EagleDraft
from sage.drafts.eagle3 import Eagle3Draft
from sage.drafts.head import DraftHead
from sage.drafts.session import EagleSession
from sage.passes.functions import CommitPass, LevelPass
from sage.passes.package import Run, compiled
from sage.passes.target_passes import (
    EXAMPLE_CAPACITY,
    EXAMPLE_KEYS,
    EXAMPLE_NODES,
    MAX_KEYS,
    MAX_NODES,
    SPARE_ROWS,
    describe_target,
    without_paths,
)
from sage.runtime.host_tensors import Tokens
from sage.targets import Features, Target


class HeadPasses:
    """Passes of a draft head: levels and commits."""

    def __init__(self, draft: DraftHead, target: Target) -> None:
        self.draft, self.target = draft, target
        self._level, self._commit = LevelPass(draft, target), CommitPass(draft, target)
        self._runs: dict[tuple[str, bool], Run] = {}

    def refresh(self) -> None:
        """Looks up the addresses of the weights again."""
        for run in self._runs.values():
            run.refresh()

    def level(self, is_wide: bool) -> Run:
        """Returns the pass over one node or several of a level; flat arguments of `LevelPass`."""
        return self._run("level", is_wide)

    def commit(self, is_long: bool) -> Run:
        """Returns the pass over one accepted token or several; flat arguments of `CommitPass`."""
        return self._run("commit", is_long)

    def _run(self, name: str, is_many: bool) -> Run:
        if (name, is_many) not in self._runs:
            config = without_paths(self.draft.config)
            example = self._example_level if name == "level" else self._example_commit
            label = f"the draft's {name} of " + ("several tokens" if is_many else "one token")
            module = self._level if name == "level" else self._commit
            self._runs[name, is_many] = compiled(
                module, partial(example, is_many), label, (describe_target(self.target), config)
            )
        return self._runs[name, is_many]

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.draft.dtype, device=self.draft.device)

    def _example(self, is_many: bool) -> tuple[Any, ...]:
        """Example numbers, mask and buffers that both passes have, and their dynamic dimensions."""
        config = self.draft.config
        count = EXAMPLE_NODES if is_many else 1
        numbers = torch.arange(count, device=self.draft.device)
        buffers = [[self._zeros(1, config.num_key_value_heads, EXAMPLE_CAPACITY, config.head_dim)] for _ in "kv"]
        of_count = {0: Dim("tokens", min=2, max=MAX_NODES)} if is_many else None
        of_keys = Dim("keys", min=2, max=MAX_KEYS)
        of_mask = {**(of_count or {}), 1: of_keys}
        of_buffer = [{2: Dim("capacity", min=2, max=MAX_KEYS)}]
        return numbers, self._zeros(count, EXAMPLE_KEYS), buffers, of_count, of_mask, of_buffer

    def _example_level(self, is_many: bool) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        numbers, mask, buffers, of_count, of_mask, of_buffer = self._example(is_many)
        hidden, rope = self._zeros(3, self.draft.config.hidden_size), self._zeros(1, 1, 1, self.draft.config.head_dim)
        args = (numbers.clone(), numbers * 0, hidden, rope, rope.clone(), numbers.clone(), mask, *buffers)
        of_hidden = {0: Dim("parents", min=1, max=MAX_NODES)}
        return args, (of_count, of_count, of_hidden, None, None, of_count, of_mask, of_buffer, of_buffer)

    def _example_commit(self, is_many: bool) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        numbers, mask, buffers, of_count, of_mask, of_buffer = self._example(is_many)
        count, width = len(numbers), self.target.hidden_size
        rope = self._zeros(1, 1, count, self.draft.config.head_dim)
        last = torch.zeros(1, count, width, dtype=self.target.dtype, device=self.target.device)
        levels = [last.clone() for _ in self.draft.levels]
        args = (numbers.clone(), last, levels, rope, rope.clone(), numbers.clone(), mask, *buffers)
        of_rope = {2: of_count[0]} if of_count else None
        of_features = {1: of_count[0]} if of_count else None
        return args, (
            of_count,
            of_features,
            [of_features] * len(levels),
            of_rope,
            of_rope,
            of_count,
            of_mask,
            of_buffer,
            of_buffer,
        )


class FunctionSession(EagleSession):
    """Session of a draft head whose passes are functions of tensors."""

    def __init__(self, draft: EagleDraft | Eagle3Draft, target: Target, capacity: int, passes: HeadPasses) -> None:
        super().__init__(draft, target, capacity + SPARE_ROWS)
        self.passes = passes
        self.passes.refresh()
        self._reserve(self.capacity)

    def _reserve(self, capacity: int) -> None:
        self._steps = torch.arange(capacity, device=self.draft.device)
        self._zeros = torch.zeros(1, capacity, dtype=self.dtype, device=self.draft.device)

    @torch.no_grad()
    def expand(self, rows: Tensor, tokens: Tokens) -> Tensor:
        width = len(rows)
        first = self.cache.reserve(width)
        visible = self._visible_to(rows, first)
        mask = self._zeros.narrow(1, 0, first + 1) if visible is None else visible
        cos, sin = self._rope(self.offset + self.depth, 1)
        self.depth += 1
        tokens, written = self._staging.stage(tokens), self._steps.narrow(0, first, width)
        if len(self.hidden) == 1 and width > 1:
            rows = rows.new_zeros(width)
        args = [tokens, rows, self.hidden, cos, sin, written, mask, *self.cache.keys, *self.cache.values]
        self.hidden, logits = self.passes.level(width > 1)(args)
        return logits

    @torch.no_grad()
    def commit(self, features: Features, tokens: Tokens) -> Tensor:
        self.cache.crop_to(self.committed)
        if self.cache.capacity > len(self._steps):
            self._reserve(self.cache.capacity)
        tokens = self._staging.stage(tokens)
        length = len(tokens)
        first = self.cache.reserve(length)
        cos, sin = self._rope(self.offset, length)
        mask = self._commit_mask(first, length)
        rows = self._steps.narrow(0, first, length)
        args = [tokens, features.last, *features.levels, cos, sin, rows, mask, *self.cache.keys, *self.cache.values]
        hidden, logits = self.passes.commit(length > 1)(args)
        self.offset += length
        self.committed, self.depth, self.hidden, self.visible = self.cache.length, 0, hidden, None
        return logits

    def _commit_mask(self, first: int, length: int) -> Tensor:
        """Returns the additive causal mask [M, S]."""
        if length == 1:
            return self._zeros.narrow(1, 0, first + 1)
        mask = self._zeros.new_zeros(length, first + length)
        lowest = torch.finfo(self.dtype).min
        mask.narrow(1, first, length).copy_(mask.new_full((length, length), lowest).triu_(1))
        return mask
