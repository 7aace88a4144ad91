"""Session of a draft that drafts all levels of a round in one pass.

The draft's pass reads the accepted tokens, whose keys and values stay in the cache, and behind them S slots, whose rows are
dropped again. It returns what K levels have in common; a level then takes a look-up, and with a conditional a small correction
for each node.

Shapes: T prompt tokens, M tokens committed, F nodes of one tree level, S slots, K levels, D hidden, U draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sage.drafts.layer import fuse_linears
from sage.drafts.session import JointSession
from sage.runtime.executors import EAGER, executor_of
from sage.runtime.host_tensors import Tokens, TokenStagingBuffer
from sage.runtime.joint import COMMIT_ORDER, LEVEL_ORDER, BoundPass, Steps, alone
from sage.runtime.pass_function import PROMPT, Value
from sage.targets import Features, Prompt, Target


class BlockSession(JointSession):
    """Session of a draft with `num_slots` and `num_levels`.

    Its `pass_functions` are the pass over accepted tokens and slots (`BlockPass`), which gives hidden states [K, D] and logits
    [K, U], and optionally the correction of a level (`ConditionalPass`). A subclass may read the prompt in another way
    (`_read_prompt`) or have other rope positions (`_set_origin`).

    Without a conditional, all nodes of a level have the block's logits.

    A draft in training runs eagerly. So does the prefill of a prompt that is long or pruned; others are read in the same way as
    accepted tokens.

    Args:
        target: provides embedding, lm_head and pass mode.
        capacity: tokens of prompt, answer and one drafted tree.
    """

    def __init__(self, draft: Any, target: Target, capacity: int) -> None:
        self.draft, self.target = draft, target
        self.device, self.dtype = draft.device, draft.dtype  # a model searches its modules for them
        if not draft.training:
            fuse_linears(draft)
        self._executor = EAGER if draft.training else executor_of(target.passes)
        self._function, *conditional = draft.pass_functions(target)
        self._block = BoundPass(self._executor, self._function, COMMIT_ORDER)
        self._correction = BoundPass(self._executor, conditional[0], LEVEL_ORDER) if conditional else None
        self.levels, self.token_map, self.max_depth = draft.levels, draft.token_map, draft.num_levels
        self.committed = self.depth = self.offset = 0
        self._staging = TokenStagingBuffer(self.device)
        self.cache = self._executor.new_cache(draft, capacity + draft.num_slots, draft.new_cache)
        self._set_capacity(capacity + draft.num_slots)
        self._set_origin(0, torch.zeros(1, dtype=torch.long, device=self.device))
        self.set_synthetic_state(0, 1)

    def _set_capacity(self, capacity: int) -> None:
        """Makes room for `capacity` tokens, slots included."""
        self.capacity = capacity
        self.cache.grow_to(self._executor.capacity(capacity))
        self._steps = torch.arange(self.cache.capacity, device=self.device)

    @property
    def context(self) -> int:
        return self.committed

    def _set_origin(self, length: int, position: Tensor) -> None:
        """Provides the rope of what follows a prompt of `length` tokens, from index `offset` on.

        Args:
            position: LongTensor [1], the target's rope position there.
        """
        self.cos, self.sin = self.draft.rope.table(length + self.capacity, self.device, self.dtype)
        self.offset = length

    def _rope(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        return self.cos.narrow(2, start, length), self.sin.narrow(2, start, length)

    @torch.no_grad()
    def prefill(self, prompt: Prompt, features: Features, root: Tensor) -> Tensor:
        self.committed = 0
        results = self._read_prompt(prompt, features, root)
        return alone(self._start_tree(results, root, prompt.input_ids[0, -1:]))

    def _read_prompt(self, prompt: Prompt, features: Features, root: Tensor) -> Sequence[Tensor]:
        """Sets the origin and runs the pass over the prompt, or the tokens of it that the draft reads, and the first slots;
        returns the results of the pass.
        """
        length = prompt.input_ids.shape[1]
        self._set_origin(length, prompt.next_position)
        rope = self._rope(0, length)
        if prompt.kept is None and PROMPT.minimum <= length <= self._executor.max_prompt:
            tokens = torch.cat((prompt.input_ids[0, 1:], root))
            return alone(self._block.steps(self.cache, *self._arguments(tokens, features, rope, length)))
        if prompt.kept is not None:
            cos, sin = (table.index_select(2, prompt.kept) for table in rope)
            features, rope, length = features.at(prompt.kept), (cos, sin), len(prompt.kept)
        results: Sequence[Tensor] = self._function(*self._arguments(root, features, rope, length))
        return results

    def commit_steps(self, features: Features, tokens: Tokens) -> Steps[Tensor]:
        length = len(tokens)
        staged = self._staging.stage(tokens)
        parent = self._root if length == 1 else staged[-2:-1].clone()
        rope = self._rope(self.offset, length)
        self.offset += length
        arguments = self._arguments(staged, features, rope, length)
        results = yield from self._block.steps(self.cache, *arguments)
        logits = yield from self._start_tree(results, staged[-1:].clone(), parent)
        return logits

    def _arguments(self, tokens: Tensor, features: Features, rope: tuple[Tensor, Tensor], length: int) -> Sequence[Value]:
        """Commits `length` tokens at `rope`; returns the arguments of the pass over them and the slots from `offset` on."""
        slots = self.draft.num_slots
        self.cache.crop_to(self.committed)
        first = self.cache.reserve(length + slots)
        self.committed = first + length
        return (
            tokens,
            features.last,
            features.levels,
            *rope,
            *self._rope(self.offset, slots),
            self._steps.narrow(0, first, length),
            self._steps.narrow(0, first + length, slots),
            self._steps.narrow(0, 0, first + length + slots),
            self.cache.keys,
            self.cache.values,
        )

    def _start_tree(self, results: Sequence[Tensor], root: Tensor, parent: Tensor) -> Steps[Tensor]:
        """Starts a tree from the pass's results; returns the logits [1, U] below `root`.

        Args:
            root, parent: LongTensor [1], the last token and the one before it.
        """
        self._hidden, self._logits = results
        self._root, self._frontier, self.depth = root, root, 0
        logits = yield from self._below(root, parent)
        return logits

    def expand_steps(self, rows: Tensor, tokens: Tokens) -> Steps[Tensor]:
        staged = self._staging.stage(tokens)
        parents = self._frontier.index_select(0, rows)
        self._frontier = staged if isinstance(tokens, Tensor) else staged.clone()
        self.depth += 1
        logits = yield from self._below(staged, parents)
        return logits

    def _below(self, tokens: Tensor, parents: Tensor) -> Steps[Tensor]:
        """Returns the logits [F, U] below nodes of the current depth."""
        assert self.depth < self.draft.num_levels, "the decoder drafts at most `max_depth` levels"
        logits = self._logits.narrow(0, self.depth, 1)
        if self._correction is None:
            return logits.expand(len(tokens), -1)
        (corrected,) = yield from self._correction.steps(None, tokens, parents, self._hidden.narrow(0, self.depth, 1), logits)
        return corrected

    def set_synthetic_state(self, context: int, width: int) -> None:
        draft = self.draft
        self.cache.zero_to(context)
        self.committed, self.depth, self.offset = context, 0, 0
        self._hidden = torch.zeros(draft.num_levels, draft.config.hidden_size, dtype=self.dtype, device=self.device)
        self._logits = self._hidden.new_zeros(draft.num_levels, draft.num_draft_tokens)
        self._root = torch.zeros(1, dtype=torch.long, device=self.device)
        self._frontier = self._root.new_zeros(width)
