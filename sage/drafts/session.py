"""Draft sessions: KV cache and tree of one request, and re-synchronization with the target's features.

Shapes: F frontier nodes of one tree level, E nodes drafted so far this round, M tokens committed, D hidden, U draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from sage.drafts.compressor.spans import PairMasks, ends_of_turn
from sage.drafts.eagle import EagleDraft
from sage.drafts.eagle3 import Eagle3Draft
from sage.drafts.layer import fuse_linears
from sage.runtime.attention import causal_mask, repeat_mask, tile_mask
from sage.runtime.cache import TreeCache
from sage.runtime.host_tensors import Tokens, TokenStagingBuffer
from sage.targets import Features, Prompt, Target


class DraftSession(ABC):
    """Interface of the decoder to a draft of any kind, for one request.

    Attributes:
        levels: indices k of the target's hidden_states[k] that the draft reads in addition to the last.
        token_map: LongTensor [U], draft id -> target id; None when the draft vocabulary is the target's (U = V).
    """

    levels: tuple[int, ...] = ()
    token_map: Tensor | None = None

    @property
    @abstractmethod
    def context(self) -> int:
        """Committed rows in the draft's cache; drafted nodes are not counted."""

    @abstractmethod
    def prefill(self, prompt: Prompt, features: Features, root: Tensor) -> Tensor:
        """Reads the prompt and the first token [1]; returns the logits below it, [1, U]."""

    @abstractmethod
    def expand(self, rows: Tensor, tokens: Tokens) -> Tensor:
        """Drafts one level deeper.

        Args:
            rows: LongTensor [F], each node's parent as a row of the previous call's result.
            tokens: [F], the nodes' tokens.

        Returns:
            [F, U], the logits below each node.
        """

    @abstractmethod
    def commit(self, features: Features, tokens: Tokens) -> Tensor:
        """Drops the tree and reads the tokens that the target accepted since the last call.

        Args:
            features: the target's features [1, M, D] of the old root and the accepted tokens, without the next root.
            tokens: [M], the token after each of them, the next root last.

        Returns:
            [1, U], the logits below the next root.
        """

    def propose(self, scores: Tensor, num_candidates: int) -> tuple[Tensor, Tensor]:
        """Selects the best next tokens below each node.

        Args:
            scores: [F, U], the result of `prefill`, `expand` or `commit`, or `TargetSampler.coupled` of it.
            num_candidates: K, at most U of them are returned.

        Returns:
            softmax of the scores (float32) and target token ids, [F, K] each, in descending order. The softmax is the draft's
            probability of a token, or with noise a confidence that the token is the target's draw.
        """
        probs, tokens = scores.float().softmax(-1).topk(min(num_candidates, scores.shape[-1]))
        return probs, tokens if self.token_map is None else self.token_map[tokens]

    def set_synthetic_state(self, context: int, width: int) -> None:
        """Sets a context of `context` rows and a frontier of `width` nodes, both of zeros, so that `expand` can be timed."""
        raise NotImplementedError


def new_draft_cache(draft: EagleDraft | Eagle3Draft, capacity: int) -> TreeCache:
    """Returns an empty cache of one layer for a draft head."""
    config = draft.config
    return TreeCache([draft.device], config.num_key_value_heads, config.head_dim, capacity, draft.dtype)


class EagleSession(DraftSession):
    """Session of an EAGLE or EAGLE-3 head: pair t = (feature of token t, embedding of token t + 1) at the position of token t.

    Args:
        target: provides embedding and lm_head.
        capacity: capacity of the cache for prompt, answer and one drafted tree, in tokens.
        cache: an empty cache of at least this capacity; None for a new one.
    """

    def __init__(self, draft: EagleDraft | Eagle3Draft, target: Target, capacity: int, cache: TreeCache | None = None) -> None:
        config = draft.config
        self.draft, self.target = draft, target
        if not draft.training:
            fuse_linears(draft)
        self.levels, self.token_map = draft.levels, draft.token_map
        self.group = config.num_attention_heads // config.num_key_value_heads
        self.cache = new_draft_cache(draft, capacity) if cache is None else cache
        self.capacity = capacity
        self.dtype = draft.dtype
        self.hidden = torch.zeros(1, config.hidden_size, dtype=draft.dtype, device=draft.device)
        self.visible: Tensor | None = None
        self.committed = self.depth = self.offset = 0
        self._set_origin(torch.zeros(1, dtype=torch.long, device=draft.device))
        self._siblings: dict[int, Tensor] = {}
        self._staging = TokenStagingBuffer(draft.device)

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
            more = embeds.shape[1] - prompt.input_ids.shape[1]  # above 0 if tiny images become longer
            self.cache.grow_to(self.capacity + more)
        hidden = self.draft(embeds, fused, positions, cache=self.cache)
        self._set_origin(prompt.next_position)
        return self._start_tree(hidden)

    def _pair_masks(self, prompt: Prompt, root: Tensor) -> PairMasks:
        """Returns the masks of the prompt's pairs; the second token of the last pair is the root, the first of the answer."""
        tokens = torch.cat((prompt.input_ids, root[None]), 1)
        is_answer = torch.zeros_like(tokens, dtype=torch.bool)
        visual = torch.cat((prompt.visual_mask, is_answer[:, :1]), 1)
        is_answer[:, -1] = True
        return PairMasks.of(visual, ends_of_turn(tokens, self.target.eos_token_ids), is_answer)

    @torch.no_grad()
    def expand(self, rows: Tensor, tokens: Tokens) -> Tensor:
        visible = self._visible_to(rows, self.cache.length)
        group = self.group if len(rows) > 1 else 1  # one row serves all heads of a group
        mask = None if visible is None else repeat_mask(visible, group)
        rope = self._rope(self.offset + self.depth, 1)
        self.depth += 1
        tokens = self._staging.stage(tokens)
        embeds = self.target.embed_tokens(tokens)[None]
        parents = self.hidden.expand(len(rows), -1) if len(self.hidden) == 1 else self.hidden.index_select(0, rows)
        self.hidden = self.draft(embeds, parents[None], tokens, mask, self.cache, rope)[0]
        return self.draft.logits(self.hidden, self.target)

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
        tokens = self._staging.stage(tokens)
        length = len(tokens)
        mask = causal_mask(length, self.committed, self.group, self.dtype, tokens.device) if length > 1 else None
        rope = self._rope(self.offset, length)
        embeds = self.target.embed_tokens(tokens)[None]
        hidden = self.draft(embeds, self.draft.fuse(features), tokens, mask, self.cache, rope)
        self.offset += length
        return self._start_tree(hidden)

    def set_synthetic_state(self, context: int, width: int) -> None:
        self.cache.zero_to(context)
        self.committed, self.depth, self.visible = context, 0, None
        self.hidden = self.hidden.new_zeros(width, self.draft.config.hidden_size)

    def _start_tree(self, hidden: Tensor) -> Tensor:
        """Starts a tree from the output of the last pair, which belongs to the root, and commits its cache row.

        `visible` [F, S] is the additive mask of the frontier over all cached rows; a child inherits its parent's row. It is
        None as long as every level has a single node, because then all cached rows are ancestors.
        """
        self.committed = self.cache.length
        self.depth = 0
        self.hidden = hidden[0, -1:]
        self.visible = None
        return self.draft.logits(self.hidden, self.target)

    def _only_itself(self, width: int) -> Tensor:
        """Additive mask [F, F] among the nodes of one level: siblings do not attend to each other."""
        if width not in self._siblings:
            eye = torch.eye(width, dtype=torch.bool, device=self.hidden.device)
            self._siblings[width] = tile_mask(eye, 1, self.dtype)[0, 0]
        return self._siblings[width]
