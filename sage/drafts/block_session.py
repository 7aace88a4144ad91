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
from sage.drafts.session import Candidates, HostCandidates, JointSession
from sage.runtime.executors import EAGER, executor_of
from sage.runtime.host_tensors import Tokens, TokenStagingBuffer, read_together
from sage.runtime.joint import COMMIT_ORDER, LEVEL_ORDER, BoundPass, Steps, alone
from sage.runtime.pass_function import PROMPT, Value
from sage.targets import Features, Prompt, Target


class BlockSession(JointSession):
    """Session of a draft with `num_slots` and `num_levels`.

    Its `pass_functions` are the pass over accepted tokens and slots (`BlockPass`), which gives hidden states [K, D] and logits
    [K, U], and optionally the correction of a level (`ConditionalPass`). A subclass may read the prompt in another way
    (`_read_prompt`) or have other rope positions (`_set_origin`).

    As long as a policy expands nodes of the trunk alone (`Correction.trunk`), their logits and candidates are looked up.
    Without a conditional, those of all nodes are.

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
        self._num_candidates = self.committed = self.depth = self.offset = 0
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
        return self._start_tree(results, root)

    def _read_prompt(self, prompt: Prompt, features: Features, root: Tensor) -> Sequence[Tensor]:
        """Sets the origin and runs the pass over the prompt, or the tokens of it that the draft reads, and the first slots;
        returns the results of the pass.
        """
        length, parent = prompt.input_ids.shape[1], prompt.input_ids[0, -1:]
        self._set_origin(length, prompt.next_position)
        rope = self._rope(0, length)
        if prompt.kept is None and PROMPT.minimum <= length <= self._executor.max_prompt:
            tokens = torch.cat((prompt.input_ids[0, 1:], root))
            return alone(self._block.steps(self.cache, *self._arguments(tokens, parent, features, rope, length)))
        if prompt.kept is not None:
            cos, sin = (table.index_select(2, prompt.kept) for table in rope)
            features, rope, length = features.at(prompt.kept), (cos, sin), len(prompt.kept)
        results: Sequence[Tensor] = self._function(*self._arguments(root, parent, features, rope, length))
        return results

    def commit_steps(self, features: Features, tokens: Tokens) -> Steps[Tensor]:
        length = len(tokens)
        staged = self._staging.stage(tokens)
        parent = self._root if length == 1 else staged[-2:-1].clone()
        rope = self._rope(self.offset, length)
        self.offset += length
        arguments = self._arguments(staged, parent, features, rope, length)
        results = yield from self._block.steps(self.cache, *arguments)
        return self._start_tree(results, staged[-1:].clone())

    def _arguments(
        self, tokens: Tensor, parent: Tensor, features: Features, rope: tuple[Tensor, Tensor], length: int
    ) -> Sequence[Value]:
        """Commits `length` tokens at `rope`; returns the arguments of the pass over them and the slots from `offset` on.

        Args:
            parent: LongTensor [1], the token before the last one.
        """
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
            parent,
            self._steps.narrow(0, 0, first + length + slots),
            self.cache.keys,
            self.cache.values,
        )

    def _start_tree(self, results: Sequence[Tensor], root: Tensor) -> Tensor:
        """Starts a tree from the pass's results; returns the logits [1, U] below `root`, LongTensor [1]."""
        self._hidden, self._logits, *trunk = results
        self._root, self._frontier, self._width, self.depth = root, root, 1, 0
        self._set_trunk(*trunk)
        return self._row_of_trunk()

    def _set_trunk(self, logits: Tensor | None = None, tokens: Tensor | None = None) -> None:
        """Sets the logits [K, U] below the trunk's nodes and the most probable tokens [K] below them.

        Without a conditional, the pass gives neither: all nodes of a level share the block's logits.
        """
        self._trunk_logits, self._trunk_tokens = self._logits if logits is None else logits, tokens
        self._expected: list[int] = tokens.tolist() if tokens is not None and tokens.is_cpu else []  # as far as the host knows
        self._place: int | None = 0  # of the trunk's node in the frontier; None if it is not expanded
        self._row: Tensor | None = None
        self._best: Candidates | None = None  # below the trunk's nodes [K]
        if self._num_candidates:
            self._candidates(self._num_candidates)

    def _candidates(self, num_candidates: int) -> Candidates:
        """Returns the candidates below all nodes of the trunk, also as lists.

        They are selected once, at the start of a tree as many as the policy asked for last: that is part of the start, in
        decoding and where costs are measured. From a GPU, they are read together with the trunk's tokens.
        """
        if self._best is None or num_candidates != self._num_candidates:
            probs, tokens, _ = super().propose(self._trunk_logits, num_candidates)
            host_tokens, expected, host_probs = read_together(tokens, self._trunk_tokens, probs)
            self._best = Candidates(probs, tokens, (host_probs.tolist(), host_tokens.tolist()))
            self._expected = [] if expected is None else expected.tolist()
        self._num_candidates = num_candidates
        return self._best

    def _row_of_trunk(self) -> Tensor:
        """Returns the logits [1, U] below the trunk's node of the current depth."""
        self._row = self._trunk_logits.narrow(0, self.depth, 1)
        return self._row

    def propose(self, scores: Tensor, num_candidates: int) -> Candidates:
        if self._row is None or scores is not self._row:
            return super().propose(scores, num_candidates)
        return self._candidates(num_candidates).below(self.depth)

    def trunk(self, num_candidates: int) -> HostCandidates:
        host = self._candidates(num_candidates).host
        assert host is not None, "candidates of the trunk are read when they are selected"
        probs, tokens = host
        for level, expected in enumerate(self._expected, start=1):
            if tokens[level - 1][0] != expected:  # of two equally probable tokens, the pass followed the other one
                return probs[:level], tokens[:level]
        return probs, tokens

    def follow(self, depth: int) -> None:
        self.depth, self._width, self._place = depth, 1, 0
        self._frontier = None if depth else self._root

    def expand_steps(self, rows: Tensor, tokens: Tokens) -> Steps[Tensor]:
        if self._expected:
            self._place = self._place_on_trunk(rows, tokens)
            self._width = len(tokens)
            if self._place == 0 and self._width == 1:
                self._frontier = None  # the trunk's node alone
                self.depth += 1
                return self._row_of_trunk()
        staged = self._staging.stage(tokens)
        parents = staged
        if self._correction is not None:
            if self._frontier is None:
                assert self._trunk_tokens is not None
                self._frontier = self._trunk_tokens.narrow(0, self.depth - 1, 1)
            parents = self._frontier.index_select(0, rows)
            self._frontier = staged if isinstance(tokens, Tensor) else staged.clone()
        self.depth += 1
        logits = yield from self._below(staged, parents)
        return logits

    def _place_on_trunk(self, rows: Tensor, tokens: Tokens) -> int | None:
        """Returns which of the expanded nodes belongs to the trunk, None if none does or the host does not know."""
        if self._place is None or isinstance(tokens, Tensor):
            return None
        expected = self._expected[self.depth]
        if self._width == 1 == len(tokens):
            return 0 if tokens[0] == expected else None
        if not rows.is_cpu:
            return None
        wanted = (self._place, expected)
        return next((place for place, node in enumerate(zip(rows.tolist(), tokens, strict=True)) if node == wanted), None)

    def _below(self, tokens: Tensor, parents: Tensor) -> Steps[Tensor]:
        """Returns the logits [F, U] below nodes of the current depth."""
        assert self.depth < self.draft.num_levels, "the decoder drafts at most `max_depth` levels"
        if self._correction is None:
            return self._row_of_trunk() if len(tokens) == 1 else self._row_of_trunk().expand(len(tokens), -1)
        self._row = None
        inputs = (self._hidden.narrow(0, self.depth, 1), self._logits.narrow(0, self.depth, 1))
        (corrected,) = yield from self._correction.steps(None, tokens, parents, *inputs)
        return corrected

    def set_synthetic_state(self, context: int, width: int) -> None:
        draft = self.draft
        self.cache.zero_to(context)
        self.committed, self.depth, self.offset = context, 0, 0
        self._hidden = torch.zeros(draft.num_levels, draft.config.hidden_size, dtype=self.dtype, device=self.device)
        self._logits = self._hidden.new_zeros(draft.num_levels, draft.num_draft_tokens)
        self._root = torch.zeros(1, dtype=torch.long, device=self.device)
        self._frontier, self._width = self._root.new_zeros(width), width
        if self._function.has_trunk:
            self._set_trunk(self._logits, self._root.new_zeros(draft.num_levels))
        else:
            self._set_trunk()
