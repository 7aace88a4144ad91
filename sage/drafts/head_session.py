"""A draft head in decoding: its session (KV cache and tree of one request, re-synchronization with the target's features), and
its passes as functions of tensors.

Shapes: F frontier nodes of one tree level, P parents, M tokens committed, S keys, C cache capacity, D hidden, A feature levels,
U draft vocabulary, H KV heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sage.drafts.compressor.spans import PairMasks, ends_of_turn
from sage.drafts.layer import fuse_linears
from sage.drafts.session import DraftSession
from sage.runtime.attention import repeat_mask, tile_mask
from sage.runtime.cache import RowCache
from sage.runtime.executors import EAGER, executor_of
from sage.runtime.host_tensors import Tokens, TokenStagingBuffer
from sage.runtime.pass_function import CAPACITY, KEYS, NODES, PARENTS, TOKENS, Argument, Dim, Padding, PassFunction, Result
from sage.targets import Features, Prompt, Target
from sage.targets.tree_passes import describe_target, family_modules, without_paths

if TYPE_CHECKING:
    from sage.drafts.head import DraftHead


class HeadSession(DraftSession):
    """Session of a head that drafts level by level: pair t = (feature of token t, embedding of token t + 1) at the position of
    token t.

    A draft in training runs eagerly. Prefill, whose length varies, is always eager.

    Args:
        target: provides embedding, lm_head and pass mode.
        capacity: capacity of the cache for prompt, answer and one drafted tree, in tokens.
    """

    def __init__(self, draft: DraftHead, target: Target, capacity: int) -> None:
        self.draft, self.target = draft, target
        if not draft.training:
            fuse_linears(draft)
        self._executor = EAGER if draft.training else executor_of(target.passes)
        self._level, self._commit = (self._executor.bind(function) for function in draft.pass_functions(target))
        self.levels, self.token_map = draft.levels, draft.token_map
        self.dtype = draft.dtype
        self.hidden = torch.zeros(1, draft.config.hidden_size, dtype=draft.dtype, device=draft.device)
        self.visible: Tensor | None = None
        self.committed = self.depth = self.offset = 0
        self._siblings: dict[int, Tensor] = {}
        self._staging = TokenStagingBuffer(draft.device)
        self.cache = self._executor.new_cache(draft, capacity, draft.new_cache)
        self._set_capacity(capacity)
        self._set_origin(torch.zeros(1, dtype=torch.long, device=draft.device))

    def _set_capacity(self, capacity: int) -> None:
        """Makes room for `capacity` tokens."""
        self.capacity = capacity
        self.cache.grow_to(self._executor.capacity(capacity))
        self._steps = torch.arange(self.cache.capacity, device=self.draft.device)
        self._zeros = torch.zeros(1, self.cache.capacity, dtype=self.dtype, device=self.draft.device)

    def _set_origin(self, position: Tensor) -> None:
        """Precomputes the rope of all positions from `position` [1] on; the root is at index `offset`, a level is a slice."""
        steps = torch.arange(self.capacity, device=position.device)
        positions = self.target.family.decode_positions(position + steps)
        self.cos, self.sin = self.draft.rope(positions, self.dtype)
        self.offset = 0

    @property
    def context(self) -> int:
        return self.committed

    def _rope(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        return self.cos.narrow(2, start, length), self.sin.narrow(2, start, length)

    @torch.no_grad()
    def prefill(self, prompt: Prompt, features: Features, root: Tensor) -> Tensor:
        embeds = prompt.embeds
        if self.draft.config.image_inputs == "token":
            embeds = torch.where(prompt.visual_mask[..., None], self.target.embed_tokens(prompt.input_ids), embeds)
        embeds = torch.cat((embeds[:, 1:], self.target.embed_tokens(root)[None]), 1)
        positions, fused = prompt.position_ids, self.draft.fuse(features)
        if prompt.kept is not None:  # pair t belongs to token t, so the last pair is always kept
            embeds, fused, positions = embeds[:, prompt.kept], fused[:, prompt.kept], positions[..., prompt.kept]
        if self.draft.compressor is not None:
            assert prompt.kept is None, "check_draft refuses pruning for a draft with a compressor"
            short = self.draft.compressor(embeds, fused, positions, self._pair_masks(prompt, root))
            embeds, fused, positions = short.embeds_next, short.features, short.position_ids
            more = embeds.shape[1] - prompt.input_ids.shape[1]
            if more > 0:  # tiny images become longer
                self._set_capacity(self.capacity + more)
        hidden = self.draft(embeds, fused, positions, cache=self.cache)[0, -1:]
        self._set_origin(prompt.next_position)
        self._start_tree(hidden)
        return self.draft.logits(hidden, self.target)

    def _pair_masks(self, prompt: Prompt, root: Tensor) -> PairMasks:
        """Returns the masks of the prompt's pairs; the second token of the last pair is the root, the first of the answer."""
        tokens = torch.cat((prompt.input_ids, root[None]), 1)
        is_answer = torch.zeros_like(tokens, dtype=torch.bool)
        visual = torch.cat((prompt.visual_mask, is_answer[:, :1]), 1)
        is_answer[:, -1] = True
        return PairMasks.of(visual, ends_of_turn(tokens, self.target.eos_token_ids), is_answer)

    @torch.no_grad()
    def expand(self, rows: Tensor, tokens: Tokens) -> Tensor:
        width = len(rows)
        first = self.cache.reserve(width)
        visible = self._visible_to(rows, first)
        mask = self._zeros.narrow(1, 0, first + 1) if visible is None else visible
        cos, sin = self._rope(self.offset + self.depth, 1)
        self.depth += 1
        if len(self.hidden) == 1 and width > 1:
            rows = rows.new_zeros(width)  # a view of one number is not contiguous
        self.hidden, logits = self._level(
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

    @torch.no_grad()
    def commit(self, features: Features, tokens: Tokens) -> Tensor:
        self.cache.crop_to(self.committed)
        length = len(tokens)
        first = self.cache.reserve(length)
        cos, sin = self._rope(self.offset, length)
        hidden, logits = self._commit(
            self._staging.stage(tokens),
            features.last,
            features.levels,
            cos,
            sin,
            self._steps.narrow(0, first, length),
            self._commit_mask(first, length),
            self.cache.keys,
            self.cache.values,
        )
        self.offset += length
        self._start_tree(hidden)
        return logits

    def _commit_mask(self, first: int, length: int) -> Tensor:
        """Returns the additive causal mask [M, S]."""
        if length == 1:
            return self._zeros.narrow(1, 0, first + 1)
        mask = self._zeros.new_zeros(length, first + length)
        lowest = torch.finfo(self.dtype).min
        mask.narrow(1, first, length).copy_(mask.new_full((length, length), lowest).triu_(1))
        return mask

    def set_synthetic_state(self, context: int, width: int) -> None:
        self.cache.zero_to(context)
        self.committed, self.depth, self.offset, self.visible = context, 0, 0, None
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


class HeadPass(PassFunction):
    """A pass of a draft head over pairs.

    Args:
        count: the dimension of the pairs.
        own: arguments between the tokens and those that every pass of a head has.
        num_positions: of the rope: those of the pairs, or one for all of them.
    """

    def __init__(
        self,
        draft: DraftHead,
        target: Target,
        names: tuple[str, str],
        count: Dim,
        own: Sequence[Argument],
        num_positions: Dim | int,
        results: Sequence[Result],
    ) -> None:
        config, dtype = draft.config, draft.dtype
        buffers = (1, config.num_key_value_heads, CAPACITY, config.head_dim)
        arguments = (
            Argument("tokens", (count,), torch.long),
            *own,
            Argument("cos", (1, 1, num_positions, config.head_dim), dtype),
            Argument("sin", (1, 1, num_positions, config.head_dim), dtype),
            Argument("rows", (count,), torch.long, Padding.spare_row),
            Argument("mask", (count, KEYS), dtype, Padding.masked),
            Argument("keys", buffers, dtype, Padding.cache, 1),
            Argument("values", buffers, dtype, Padding.cache, 1),
        )
        modules = (type(draft).__module__, *family_modules(target))
        super().__init__("draft", names, arguments, results, (describe_target(target), without_paths(config)), modules)
        self.draft, self.embed_tokens, self.lm_head = draft, target.embed_tokens, target.lm_head
        self._target = target

    def _read(
        self,
        tokens: Tensor,
        features: Tensor,
        cos: Tensor,
        sin: Tensor,
        rows: Tensor,
        mask: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> Tensor:
        config = self.draft.config
        cache = RowCache(keys, values, rows, mask.shape[1])
        embeds = self.embed_tokens(tokens)[None]
        group = config.num_attention_heads // config.num_key_value_heads
        return self.draft.read(embeds, features, (cos, sin), repeat_mask(mask, group), cache)[0]


class LevelPass(HeadPass):
    """A draft head's pass over one level of a tree."""

    def __init__(self, draft: DraftHead, target: Target) -> None:
        size = draft.config.hidden_size
        names = ("the draft's level of one token", "the draft's level of several tokens")
        own = (Argument("parents", (NODES,), torch.long), Argument("hidden", (PARENTS, size), draft.dtype))
        results = (Result((NODES, size)), Result((NODES, draft.num_draft_tokens)))
        super().__init__(draft, target, names, NODES, own, 1, results)

    def forward(
        self,
        tokens: Tensor,
        parents: Tensor,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        rows: Tensor,
        mask: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Runs the level.

        Args:
            tokens, parents, rows: LongTensor [F]: the nodes' tokens, their parents as rows of `hidden`, and their cache rows.
            hidden: [P, D], the outputs of the last pass.
            cos, sin: [1, 1, 1, d], rope of the level.
            mask: [F, S], additive.
            keys, values: one buffer each, [1, H, C, d].

        Returns:
            outputs [F, D] and logits [F, U].
        """
        out = self._read(tokens, hidden.index_select(0, parents)[None], cos, sin, rows, mask, keys, values)
        return out, self.draft.logits(out, self._target)


class CommitPass(HeadPass):
    """A draft head's pass over the tokens that the target accepted."""

    def __init__(self, draft: DraftHead, target: Target) -> None:
        names = ("the draft's commit of one token", "the draft's commit of several tokens")
        of_target = (1, TOKENS, target.hidden_size)
        own = (
            Argument("last", of_target, target.dtype),
            Argument("levels", of_target, target.dtype, count=len(draft.levels)),
        )
        results = (Result((1, draft.config.hidden_size)), Result((1, draft.num_draft_tokens)))
        super().__init__(draft, target, names, TOKENS, own, TOKENS, results)

    def forward(
        self,
        tokens: Tensor,
        last: Tensor,
        levels: Sequence[Tensor],
        cos: Tensor,
        sin: Tensor,
        rows: Tensor,
        mask: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Runs the head over M pairs.

        Args:
            tokens, rows: LongTensor [M].
            last, levels: `Features` of the tokens, 1 + A tensors [1, M, D].
            cos, sin: [1, 1, M, d].
            mask: [M, S], additive.
            keys, values: one buffer each, [1, H, C, d].

        Returns:
            the output of the last pair [1, D], and its logits [1, U].
        """
        features = self.draft.fuse(Features(last, tuple(levels)))
        out = self._read(tokens, features, cos, sin, rows, mask, keys, values)[-1:]
        return out, self.draft.logits(out, self._target)
