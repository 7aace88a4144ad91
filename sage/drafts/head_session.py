"""A draft head in decoding: its session (KV cache and tree of one request, re-synchronization with the target's features), and
its passes as functions of tensors.

Shapes: F frontier nodes of one tree level, P parents, M tokens committed, S keys, C cache capacity, D hidden, A feature levels,
U draft vocabulary, H KV heads, d head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sage.drafts.compressor.spans import HeadInput, PairMasks, ends_of_turn
from sage.drafts.layer import LastQuery, fuse_linears
from sage.drafts.session import JointSession
from sage.runtime.attention import tile_mask
from sage.runtime.executors import EAGER, executor_of
from sage.runtime.host_tensors import Tokens, TokenStagingBuffer
from sage.runtime.joint import COMMIT_ORDER, LEVEL_ORDER, BoundPass, Steps, alone
from sage.runtime.pass_function import PROMPT
from sage.targets import Features, Prompt, Target

if TYPE_CHECKING:
    from sage.drafts.head import DraftHead


class HeadSession(JointSession):
    """Session of a head that drafts level by level: pair t = (feature of token t, embedding of token t + 1) at the position of
    token t.

    A draft in training runs eagerly. So does the prefill of a prompt that is long, pruned or compressed; others are read in the
    same way as accepted tokens.

    Args:
        target: provides embedding, lm_head and pass mode.
        capacity: capacity of the cache for prompt, answer and one drafted tree, in tokens.
    """

    def __init__(self, draft: DraftHead, target: Target, capacity: int) -> None:
        self.draft, self.target = draft, target
        self.device, self.dtype = draft.device, draft.dtype  # a model searches its modules for them
        if not draft.training:
            fuse_linears(draft)
        self._executor = EAGER if draft.training else executor_of(target.passes)
        level, commit = draft.pass_functions(target)
        self._level = BoundPass(self._executor, level, LEVEL_ORDER)
        self._commit = BoundPass(self._executor, commit, COMMIT_ORDER)
        self.levels, self.token_map = draft.levels, draft.token_map
        self.hidden = torch.zeros(1, draft.config.hidden_size, dtype=self.dtype, device=self.device)
        self.visible: Tensor | None = None
        self.committed = self.depth = self.offset = 0
        self._siblings: dict[int, Tensor] = {}
        self._staging = TokenStagingBuffer(self.device)
        self.cache = self._executor.new_cache(draft, capacity, draft.new_cache)
        self._set_capacity(capacity)

    def _set_capacity(self, capacity: int) -> None:
        """Makes room for `capacity` tokens."""
        self.capacity = capacity
        self.cache.grow_to(self._executor.capacity(capacity))
        self._steps = torch.arange(self.cache.capacity, device=self.device)
        self._zeros = torch.zeros(1, self.cache.capacity, dtype=self.dtype, device=self.device)

    def _set_origin(self, position: Tensor, before: Tensor | None = None) -> None:
        """Precomputes the rope of all positions from `position` [1] on, and of those `before`, as far as they are given; the
        root is at index `offset`, a level is a slice.
        """
        positions = self.target.family.decode_positions(position + self._steps[: self.capacity])
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
        if self._is_read_as_tokens(prompt):
            embeds = next_embeds(self.draft, self.target, prompt, root)
            self._set_origin(prompt.next_position, before=prompt.position_ids)
            hidden, logits = alone(self._read_steps(embeds, features, *self._rope(0, self.offset)))
            self._start_tree(hidden)
            return logits
        pairs = pairs_of_prompt(self.draft, self.target, prompt, features, root)
        more = pairs.features.shape[1] - prompt.input_ids.shape[1]
        if more > 0:  # tiny images become longer
            self._set_capacity(self.capacity + more)
        hidden = self.draft(pairs.embeds_next, pairs.features, pairs.position_ids, cache=LastQuery(self.cache))[0]
        self._set_origin(prompt.next_position)
        self._start_tree(hidden)
        return self.draft.logits(hidden, self.target)

    def _is_read_as_tokens(self, prompt: Prompt) -> bool:
        is_short = PROMPT.minimum <= prompt.input_ids.shape[1] <= self._executor.max_prompt
        return is_short and prompt.kept is None and self.draft.compressor is None

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

    def commit_steps(self, features: Features, tokens: Tokens) -> Steps[Tensor]:
        self.cache.crop_to(self.committed)
        length = len(tokens)
        embeds = self.target.embed_tokens(self._staging.stage(tokens))[None]
        hidden, logits = yield from self._read_steps(embeds, features, *self._rope(self.offset, length))
        self.offset += length
        self._start_tree(hidden)
        return logits

    def _read_steps(self, embeds: Tensor, features: Features, cos: Tensor, sin: Tensor) -> Steps[tuple[Tensor, Tensor]]:
        """Appends pairs to the cache; returns the output [1, D] of the last one and its logits [1, U]."""
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
        return hidden, logits

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
    if draft.config.image_inputs == "token":
        embeds = torch.where(prompt.visual_mask[..., None], target.embed_tokens(prompt.input_ids), embeds)
    return torch.cat((embeds[:, 1:], target.embed_tokens(root)[None]), 1)


def _pair_masks(target: Target, prompt: Prompt, root: Tensor) -> PairMasks:
    """Returns the masks of the prompt's pairs; the second token of the last pair is the root, the first of the answer."""
    tokens = torch.cat((prompt.input_ids, root[None]), 1)
    is_answer = torch.zeros_like(tokens, dtype=torch.bool)
    visual = torch.cat((prompt.visual_mask, is_answer[:, :1]), 1)
    is_answer[:, -1] = True
    return PairMasks.of(visual, ends_of_turn(tokens, target.eos_token_ids), is_answer)
