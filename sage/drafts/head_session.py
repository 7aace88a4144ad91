"""Sessions of draft heads: KV cache and tree of one request, and its re-synchronization with the target's features.

Shapes: F frontier nodes of one tree level, P parents, M tokens committed, S slots, K levels, D hidden, U draft vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from sage.drafts.compressor.spans import HeadInput, PairMasks, ends_of_turn
from sage.drafts.head import DraftHead
from sage.drafts.layer import LastQuery, fuse_linears
from sage.drafts.options import ImageInputs
from sage.drafts.session import JointSession
from sage.drafts.slots import SlotHead
from sage.runtime.attention import tile_mask
from sage.runtime.executors import EAGER, executor_of
from sage.runtime.host_tensors import Tokens, TokenStagingBuffer
from sage.runtime.joint import COMMIT_ORDER, LEVEL_ORDER, BoundPass, Steps, alone
from sage.runtime.pass_function import PROMPT
from sage.targets import Features, Prompt, Target


class PairSession(JointSession):
    """Base class of sessions of a head that reads pairs: pair t = (feature of token t, embedding of token t + 1) at the
    position of token t.

    A draft in training runs eagerly. So does the prefill of a prompt that is long, pruned or compressed; others are read in the
    same way as accepted tokens.

    Args:
        target: provides embedding, lm_head and pass mode.
        capacity: capacity of the cache for prompt, answer and one drafted tree, in tokens.
    """

    def __init__(self, draft: DraftHead, target: Target, capacity: int) -> None:
        self.draft: Any = draft
        self.target = target
        self.device, self.dtype = draft.device, draft.dtype  # a model searches its modules for them
        if not draft.training:
            fuse_linears(draft)
        self._executor = EAGER if draft.training else executor_of(target.passes)
        commit, *others = draft.pass_functions(target)
        self._commit = BoundPass(self._executor, commit, COMMIT_ORDER)
        self._level = BoundPass(self._executor, others[0], LEVEL_ORDER) if others else None
        self.levels, self.token_map = draft.levels, draft.token_map
        self.committed = self.depth = self.offset = 0
        self._staging = TokenStagingBuffer(self.device)
        self.cache = self._executor.new_cache(draft, capacity, draft.new_cache)
        self._set_capacity(capacity)

    def _set_capacity(self, capacity: int) -> None:
        """Makes room for `capacity` tokens."""
        self.capacity = capacity
        self.cache.grow_to(self._executor.capacity(capacity))
        self._steps = torch.arange(self.cache.capacity, device=self.device)

    def _set_origin(self, position: Tensor, before: Tensor | None = None) -> None:
        """Precomputes the rope of all positions from `position` [1] on, and of those `before`, as far as they are given; the
        root is at index `offset`, a level is a slice.
        """
        positions = self.draft.decode_positions(position + self._steps[: self.capacity], self.target)
        self.offset = 0 if before is None else before.shape[-1]
        if before is not None:
            positions = torch.cat((before, positions), -1)
        self.cos, self.sin = self.draft.rope(positions, self.dtype)

    @property
    def context(self) -> int:
        return self.committed

    def _rope(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        return self.cos.narrow(2, start, length), self.sin.narrow(2, start, length)

    @torch.no_grad()
    def prefill(self, prompt: Prompt, features: Features, root: Tensor) -> Tensor:
        prompt = self.draft.placed(prompt)
        if self._is_read_as_tokens(prompt):
            embeds = next_embeds(self.draft, self.target, prompt, root)
            self._set_origin(prompt.next_position, before=prompt.position_ids)
            return alone(self._read_steps(embeds, features, *self._rope(0, self.offset)))
        pairs = pairs_of_prompt(self.draft, self.target, prompt, features, root)
        more = pairs.features.shape[1] - prompt.input_ids.shape[1]
        if more > 0:  # tiny images become longer
            self._set_capacity(self.capacity + more)
        self._set_origin(prompt.next_position)
        return alone(self._read_pairs(pairs))

    def _is_read_as_tokens(self, prompt: Prompt) -> bool:
        is_short = PROMPT.minimum <= prompt.input_ids.shape[1] <= self._executor.max_prompt
        return is_short and prompt.kept is None and self.draft.compressor is None

    def commit_steps(self, features: Features, tokens: Tokens) -> Steps[Tensor]:
        self.cache.crop_to(self.committed)
        length = len(tokens)
        embeds = self.target.embed_tokens(self._staging.stage(tokens))[None]
        rope = self._rope(self.offset, length)
        self.offset += length
        logits = yield from self._read_steps(embeds, features, *rope)
        return logits

    @abstractmethod
    def _read_pairs(self, pairs: HeadInput) -> Steps[Tensor]:
        """Reads a prompt into the empty cache, eagerly, and starts a tree; returns the logits [1, U] below the root."""

    @abstractmethod
    def _read_steps(self, embeds: Tensor, features: Features, cos: Tensor, sin: Tensor) -> Steps[Tensor]:
        """Appends pairs to the cache, `offset` being the index behind the last one, and starts a tree; returns the logits
        [1, U] below its root.
        """


class HeadSession(PairSession):
    """Session of a head that drafts level by level."""

    _level: BoundPass

    def __init__(self, draft: DraftHead, target: Target, capacity: int) -> None:
        super().__init__(draft, target, capacity)
        self.hidden = torch.zeros(1, draft.config.hidden_size, dtype=self.dtype, device=self.device)
        self.visible: Tensor | None = None
        self._siblings: dict[int, Tensor] = {}

    def _set_capacity(self, capacity: int) -> None:
        super()._set_capacity(capacity)
        self._zeros = torch.zeros(1, self.cache.capacity, dtype=self.dtype, device=self.device)

    def _read_pairs(self, pairs: HeadInput) -> Steps[Tensor]:
        yield from ()
        hidden = self.draft(pairs.embeds_next, pairs.features, pairs.position_ids, cache=LastQuery(self.cache))[0]
        self._start_tree(hidden)
        logits: Tensor = self.draft.logits(hidden, self.target)
        return logits

    def expand_steps(self, rows: Tensor, tokens: Tokens) -> Steps[Tensor]:
        width = len(rows)
        first = self.cache.reserve(width)
        visible = self._visible_to(rows, first)
        mask = self._zeros.narrow(1, 0, first + 1) if visible is None else visible
        cos, sin = self._rope(self.offset + self.depth, 1)
        self.depth += 1
        if len(self.hidden) == 1 and width > 1:
            rows = rows.new_zeros(width)  # a view of one number is not contiguous
        self.hidden, logits = yield from self._level.steps(
            self.cache,
            self._staging.stage(tokens),
            rows,
            self.hidden,
            cos,
            sin,
            self._steps.narrow(0, first, width),
            mask,
            self.cache.keys,
            self.cache.values,
        )
        return logits

    def _visible_to(self, rows: Tensor, first: int) -> Tensor | None:
        """Updates `visible` for the children of `rows` [F], whose first cache row is `first`; returns it, [F, first + F], or
        None if they see all rows up to their own.
        """
        if self.visible is None:
            if len(rows) == 1:
                return None
            self.visible = self.hidden.new_zeros(len(self.hidden), first)
        self.visible = torch.cat((self.visible.index_select(0, rows), self._only_itself(len(rows))), 1)
        return self.visible

    def _read_steps(self, embeds: Tensor, features: Features, cos: Tensor, sin: Tensor) -> Steps[Tensor]:
        length = embeds.shape[1]
        first = self.cache.reserve(length)
        hidden, logits = yield from self._commit.steps(
            self.cache,
            embeds,
            features.last,
            features.levels,
            cos,
            sin,
            self._steps.narrow(0, first, length),
            self._zeros.narrow(1, 0, first + length),
            self.cache.keys,
            self.cache.values,
        )
        self._start_tree(hidden)
        return logits

    def set_synthetic_state(self, context: int, width: int) -> None:
        self.cache.zero_to(context)
        self._set_origin(torch.zeros(1, dtype=torch.long, device=self.device))
        self.committed, self.depth, self.visible = context, 0, None
        self.hidden = self.hidden.new_zeros(width, self.draft.config.hidden_size)

    def _start_tree(self, hidden: Tensor) -> None:
        """Starts a tree from the output [1, D] of the last pair, which belongs to the root, and commits its cache row.

        `visible` [F, S] is the additive mask of the frontier over all cached rows; a child inherits its parent's row. It is
        None as long as every level has a single node, because then all cached rows are ancestors.
        """
        self.committed, self.depth, self.hidden, self.visible = self.cache.length, 0, hidden, None

    def _only_itself(self, width: int) -> Tensor:
        """Additive mask [F, F] among the nodes of one level: siblings do not attend to each other."""
        if width not in self._siblings:
            eye = torch.eye(width, dtype=torch.bool, device=self.hidden.device)
            self._siblings[width] = tile_mask(eye, 1, self.dtype)[0, 0]
        return self._siblings[width]


class SlotSession(PairSession):
    """Session of a head with slots: keys and values of pairs stay in the cache, those of slots are dropped again.

    The pass over accepted tokens returns what K levels have in common; a level is a look-up, and with a conditional a small
    correction for each node.
    """

    def __init__(self, draft: SlotHead, target: Target, capacity: int) -> None:
        super().__init__(draft, target, capacity + draft.num_slots)
        self.max_depth = draft.num_levels
        self._last = torch.zeros(2, dtype=torch.long, device=self.device)  # the token before the root, and the root
        if draft.has_conditional:
            draft.pass_functions(target)[1].correction.refresh()

    @torch.no_grad()
    def prefill(self, prompt: Prompt, features: Features, root: Tensor) -> Tensor:
        self._last = torch.cat((prompt.input_ids[0, -1:], root))
        return super().prefill(prompt, features, root)

    def commit_steps(self, features: Features, tokens: Tokens) -> Steps[Tensor]:
        staged = self._staging.stage(tokens)
        self._last = torch.cat((self._last, staged))[-2:]
        logits = yield from super().commit_steps(features, staged)
        return logits

    def _read_pairs(self, pairs: HeadInput) -> Steps[Tensor]:
        """Reads a prompt; causal attention needs no mask, whose size would be that of the prompt squared."""
        slots, length, function = self.draft.num_slots, pairs.features.shape[1], self._commit.function
        parts = zip(self.draft.rope(pairs.position_ids, self.dtype), self._rope(0, slots), strict=True)
        cos, sin = (torch.cat(both, 2) for both in parts)
        steps = self._steps.narrow(0, 0, length + slots)
        mask = None if self.draft.computes_tokens else function.mask(steps[:length], steps[length:], steps)
        self.committed = length
        results = function.run(pairs.embeds_next, pairs.features, (cos, sin), mask, self.cache)
        logits = yield from self._start_tree(*results)
        return logits

    def _read_steps(self, embeds: Tensor, features: Features, cos: Tensor, sin: Tensor) -> Steps[Tensor]:
        length, slots = embeds.shape[1], self.draft.num_slots
        first = self.cache.reserve(length + slots)
        self.committed = first + length
        results = yield from self._commit.steps(
            self.cache,
            embeds,
            features.last,
            features.levels,
            cos,
            sin,
            self._steps.narrow(0, first, length),
            *self._rope(self.offset, slots),
            self._steps.narrow(0, first + length, slots),
            self._steps.narrow(0, 0, first + length + slots),
            self.cache.keys,
            self.cache.values,
        )
        logits = yield from self._start_tree(*results)
        return logits

    def _start_tree(self, hidden: Tensor, logits: Tensor) -> Steps[Tensor]:
        """Starts a tree from the block's hidden states [K, D] and logits [K, U]; returns the logits [1, U] below the root."""
        self._hidden, self._logits = hidden, logits
        self._frontier, self.depth = self._last[1:], 0
        below = yield from self._below(self._frontier, self._last[:1])
        return below

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
        if self._level is None:
            return logits.expand(len(tokens), -1)
        (corrected,) = yield from self._level.steps(None, tokens, parents, self._hidden.narrow(0, self.depth, 1), logits)
        return corrected

    def set_synthetic_state(self, context: int, width: int) -> None:
        draft = self.draft
        self.cache.zero_to(context)
        self._set_origin(torch.zeros(1, dtype=torch.long, device=self.device))
        self.committed, self.depth = context, 0
        self._hidden = torch.zeros(draft.num_levels, draft.config.hidden_size, dtype=self.dtype, device=self.device)
        self._logits = self._hidden.new_zeros(draft.num_levels, draft.num_draft_tokens)
        self._last = torch.zeros(2, dtype=torch.long, device=self.device)
        self._frontier = self._last.new_zeros(width)


def pairs_of_prompt(draft: DraftHead, target: Target, prompt: Prompt, features: Features, root: Tensor) -> HeadInput:
    """Returns the pairs of a prompt and the first token [1] as a head reads them, without pruned tokens or compressed."""
    embeds = next_embeds(draft, target, prompt, root)
    positions, fused = prompt.position_ids, draft.fuse(features)
    if prompt.kept is not None:  # pair t belongs to token t, so the last pair is always kept
        embeds, fused, positions = embeds[:, prompt.kept], fused[:, prompt.kept], positions[..., prompt.kept]
    if draft.compressor is None:
        return HeadInput(embeds, fused, positions)
    assert prompt.kept is None, "check_draft refuses pruning for a draft with a compressor"
    short: HeadInput = draft.compressor(embeds, fused, positions, _pair_masks(target, prompt, root))
    return short


def next_embeds(draft: DraftHead, target: Target, prompt: Prompt, root: Tensor) -> Tensor:
    """Returns the embeddings [1, T, D] of the prompt's second to last token and of the root, as the head reads them."""
    embeds = prompt.embeds
    if getattr(draft.config, "image_inputs", ImageInputs.embed) == ImageInputs.token:
        embeds = torch.where(prompt.visual_mask[..., None], target.embed_tokens(prompt.input_ids), embeds)
    return torch.cat((embeds[:, 1:], target.embed_tokens(root)[None]), 1)


def _pair_masks(target: Target, prompt: Prompt, root: Tensor) -> PairMasks:
    """Returns the masks of the prompt's pairs; the second token of the last pair is the root, the first of the answer."""
    tokens = torch.cat((prompt.input_ids, root[None]), 1)
    is_answer = torch.zeros_like(tokens, dtype=torch.bool)
    visual = torch.cat((prompt.visual_mask, is_answer[:, :1]), 1)
    is_answer[:, -1] = True
    return PairMasks.of(visual, ends_of_turn(tokens, target.eos_token_ids), is_answer)
