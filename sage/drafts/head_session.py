"""Sessions of draft heads: KV cache and tree of one request, and its re-synchronization with the target's features.

Shapes: F frontier nodes of one tree level, P parents, M tokens committed, S slots, K levels, D hidden, U draft vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sage.drafts.draft import Candidates, DraftSession
from sage.drafts.head import DraftHead
from sage.drafts.layer import Angles, LastQuery
from sage.drafts.registry import ImageInputs
from sage.drafts.slots import SlotHead
from sage.drafts.spans import HeadInput, PairMasks, ends_of_turn
from sage.runtime.cache import TreeCache
from sage.runtime.executors import executor_of
from sage.runtime.host_tensors import Tokens, TokenStagingBuffer, read_together
from sage.runtime.packing import BoundPass, Pass, run_passes
from sage.runtime.pass_function import EAGER, PROMPT
from sage.targets import Features, Prompt, Target


class PairSession(DraftSession):
    """Base class of sessions of a head: pair t = (feature of token t, embedding of token t + 1) at the position of token t.

    A draft in training runs eagerly. So does the prefill of a prompt that is long, pruned or compressed; others are read in the
    same way as accepted tokens.

    Args:
        capacity: of the cache, in tokens, for prompt, answer and one drafted tree.
    """

    cache: TreeCache
    _num_slots = 0  # behind accepted tokens

    def __init__(self, draft: DraftHead, target: Target, capacity: int) -> None:
        self.draft: Any = draft
        self.target = target
        self.device, self.dtype = draft.device, draft.dtype  # a model searches its modules for them
        self._executor = EAGER if draft.training else executor_of(target.passes)
        commit, *others = draft.pass_functions(target)
        self._commit = BoundPass(self._executor, commit, self.device)
        self._level = BoundPass(self._executor, others[0], self.device) if others else None
        self.levels, self.token_map = draft.levels, draft.token_map
        self.committed = self.depth = self.offset = 0
        self._staging = TokenStagingBuffer(self.device)
        self.cache = self._executor.new_cache(draft, capacity, draft.new_cache)
        self._set_capacity(capacity)

    def _set_capacity(self, capacity: int) -> None:
        self.capacity = capacity
        self.cache.grow_to(self._executor.capacity(capacity))
        self._steps = torch.arange(self.cache.capacity, device=self.device)

    def _set_origin(self, position: Tensor) -> None:
        """Precomputes the rope of all positions from `position` [1] on; the root is at index `offset`, a level is a slice."""
        positions = self.draft.decode_positions(position + self._steps[: self.capacity], self.target)
        self.offset = 0
        self.cos, self.sin = self.draft.rope(positions, self.dtype)

    @property
    def context(self) -> int:
        return self.committed

    def _rope(self, start: int, length: int) -> Angles:
        return self.cos.narrow(2, start, length), self.sin.narrow(2, start, length)

    @torch.no_grad()
    def prefill(self, prompt: Prompt, features: Features, root: Tensor) -> Tensor:
        prompt = self.draft.placed(prompt)
        self._set_origin(prompt.next_position)
        is_short = PROMPT.minimum <= prompt.input_ids.shape[1] <= self._executor.max_prompt
        if is_short and prompt.kept is None and self.draft.compressor is None:
            rope = self.draft.rope(prompt.position_ids, self.dtype)
            logits: Tensor = run_passes([self._read(self._next_embeds(prompt, root), features, rope)])[0]
            return logits
        pairs = self._pairs_of_prompt(prompt, features, root)
        more = pairs.features.shape[1] - prompt.input_ids.shape[1]
        if more > 0:  # tiny images become longer
            self._set_capacity(self.capacity + more)
            self._set_origin(prompt.next_position)
        return self._start_tree(self._read_prompt(pairs))

    def commit_pass(self, features: Features, tokens: Tokens) -> Pass:
        self.cache.crop_to(self.committed)
        rope = self._rope(self.offset, len(tokens))
        self.offset += len(tokens)
        return self._read(self.target.embed_tokens(self._staging.stage(tokens))[None], features, rope)

    def _read(self, embeds: Tensor, features: Features, rope: Angles) -> Pass:
        """Returns the pass that appends pairs to the cache and starts a tree; `offset` is the index behind the last pair."""
        length = embeds.shape[1]
        first = self.cache.reserve(length + self._num_slots)
        self.committed = first + length
        tensors = {
            "embeds": embeds,
            "last": features.last,
            "levels": features.levels,
            "cos": rope[0],
            "sin": rope[1],
            "columns": self._steps.narrow(0, first, length),
            "steps": self._steps.narrow(0, 0, self.committed + self._num_slots),
        }
        return Pass(self._commit, length, tensors | self._slots(), self._start_tree, self.cache)

    def _slots(self) -> dict[str, Tensor]:
        """Returns further arguments of the pass over accepted tokens."""
        return {}

    @abstractmethod
    def _read_prompt(self, pairs: HeadInput) -> Sequence[Tensor]:
        """Reads pairs into the empty cache, eagerly; returns the results of the pass over accepted tokens."""

    @abstractmethod
    def _start_tree(self, results: Sequence[Tensor]) -> Tensor:
        """Starts a tree from the results of the pass over accepted tokens; returns the logits [1, U] below the root."""

    def set_synthetic_state(self, context: int, width: int) -> None:
        self.cache.zero_to(context)
        self._set_origin(torch.zeros(1, dtype=torch.long, device=self.device))
        self.committed, self.depth = context, 0

    def _pairs_of_prompt(self, prompt: Prompt, features: Features, root: Tensor) -> HeadInput:
        """Returns the pairs of a prompt and the first token [1] as the head reads them, without pruned tokens or compressed."""
        embeds, positions, fused = self._next_embeds(prompt, root), prompt.position_ids, self.draft.fuse(features)
        if prompt.kept is not None:  # pair t belongs to token t, so the last pair is always kept
            embeds, fused, positions = embeds[:, prompt.kept], fused[:, prompt.kept], positions[..., prompt.kept]
        if self.draft.compressor is None:
            return HeadInput(embeds, fused, positions)
        assert prompt.kept is None, "check_draft refuses pruning for a draft with a compressor"
        tokens = torch.cat((prompt.input_ids, root[None]), 1)
        is_answer = torch.zeros_like(tokens, dtype=torch.bool)
        visual = torch.cat((prompt.visual_mask, is_answer[:, :1]), 1)
        is_answer[:, -1] = True
        masks = PairMasks.of(visual, ends_of_turn(tokens, self.target.eos_token_ids), is_answer)
        compressed: HeadInput = self.draft.compressor(embeds, fused, positions, masks)
        return compressed

    def _next_embeds(self, prompt: Prompt, root: Tensor) -> Tensor:
        """Returns the embeddings [1, T, D] of the prompt's second to last token and of the root, as the head reads them."""
        embeds = prompt.embeds
        if getattr(self.draft.config, "image_inputs", ImageInputs.embed) == ImageInputs.token:
            embeds = torch.where(prompt.visual_mask[..., None], self.target.embed_tokens(prompt.input_ids), embeds)
        return torch.cat((embeds[:, 1:], self.target.embed_tokens(root)[None]), 1)


class HeadSession(PairSession):
    """Session of a head that drafts level by level.

    `visible` [F, X] is what the frontier sees of the X columns of the tree; a child inherits its parent's row. It is None as
    long as every level has a single node, because then all columns are ancestors.
    """

    _level: BoundPass

    def __init__(self, draft: DraftHead, target: Target, capacity: int) -> None:
        super().__init__(draft, target, capacity)
        self.hidden = torch.zeros(1, draft.config.hidden_size, dtype=self.dtype, device=self.device)
        self.visible: Tensor | None = None

    def _read_prompt(self, pairs: HeadInput) -> Sequence[Tensor]:
        hidden = self.draft(pairs.embeds_next, pairs.features, pairs.position_ids, cache=LastQuery(self.cache))[0]
        self.committed = self.cache.length
        return hidden, self.draft.logits(hidden, self.target)

    def expand_pass(self, rows: Tensor, tokens: Tokens) -> Pass:
        width = len(rows)
        first = self.cache.reserve(width)
        visible, start = self._visible_to(rows, first)
        cos, sin = self._rope(self.offset + self.depth, 1)
        self.depth += 1
        if width > 1 and len(self.hidden) == 1:
            rows = rows.new_zeros(width)  # a view of one number is not contiguous
        tensors = {
            "tokens": self._staging.stage(tokens),
            "parents": rows,
            "hidden": self.hidden,
            "cos": cos,
            "sin": sin,
            "columns": self._steps.narrow(0, first, width),
            "visible": visible,
            "near": self._steps.narrow(0, start, visible.shape[1]).unsqueeze(0),
            "steps": self._steps.narrow(0, 0, first + width),
        }
        return Pass(self._level, width, tensors, self._start_level, self.cache)

    def _start_level(self, results: Sequence[Tensor]) -> Tensor:
        self.hidden, logits = results
        return logits

    def _visible_to(self, rows: Tensor, first: int) -> tuple[Tensor, int]:
        """Updates `visible` for the children of `rows` [F], whose first column is `first`; returns what they see, [F, X], and
        the first of these columns.
        """
        itself = torch.eye(len(rows), dtype=torch.bool, device=self.device)  # siblings do not see each other
        if self.visible is None:
            if len(rows) == 1:
                return itself, first
            self.visible = torch.ones(len(self.hidden), first - self.committed, dtype=torch.bool, device=self.device)
        self.visible = torch.cat((self.visible.index_select(0, rows), itself), 1)
        return self.visible, self.committed

    def _start_tree(self, results: Sequence[Tensor]) -> Tensor:
        self.depth, self.visible = 0, None
        return self._start_level(results)

    def set_synthetic_state(self, context: int, width: int) -> None:
        super().set_synthetic_state(context, width)
        self.hidden, self.visible = self.hidden.new_zeros(width, self.draft.config.hidden_size), None


class SlotSession(PairSession):
    """Session of a head with slots: keys and values of pairs stay in the cache, those of slots are dropped again.

    The pass over accepted tokens returns what K levels have in common, and the logits along the greedy path. A level of this
    path is a look-up; nodes beside it take a small correction each, if the head has a conditional.
    """

    def __init__(self, draft: SlotHead, target: Target, capacity: int) -> None:
        super().__init__(draft, target, capacity + draft.num_slots)
        self._num_levels, self._num_slots = draft.num_levels, draft.num_slots  # a configuration finds its attributes slowly
        self.max_depth = self._num_levels
        self._last = torch.zeros(2, dtype=torch.long, device=self.device)  # the token before the root, and the root
        self._num_candidates = 0  # that the policy asks for
        if draft.has_conditional:
            draft.pass_functions(target)[1].correction.refresh()

    @torch.no_grad()
    def prefill(self, prompt: Prompt, features: Features, root: Tensor) -> Tensor:
        self._last = torch.cat((prompt.input_ids[0, -1:], root))
        return super().prefill(prompt, features, root)

    def commit_pass(self, features: Features, tokens: Tokens) -> Pass:
        staged = self._staging.stage(tokens)
        self._last = torch.cat((self._last, staged))[-2:]
        return super().commit_pass(features, staged)

    def _read_prompt(self, pairs: HeadInput) -> Sequence[Tensor]:
        slots, length, function = self._num_slots, pairs.features.shape[1], self._commit.function
        of_tokens = self.draft.rope(pairs.position_ids, self.dtype)
        rope = tuple(torch.cat(both, 2) for both in zip(of_tokens, self._rope(0, slots), strict=True))
        steps = self._steps.narrow(0, 0, length + slots)
        # causal attention needs no mask, whose size would be that of the prompt squared
        mask = None if self.draft.computes_tokens else function.mask(steps[:length], steps[None, length:], steps)
        self.committed = length
        return function.read_prompt(pairs.embeds_next, pairs.features, rope, mask, self.cache, self._last[None])

    def _slots(self) -> dict[str, Tensor]:
        cos, sin = self._rope(self.offset, self._num_slots)
        columns = self._steps.narrow(0, self.committed, self._num_slots)[None]
        return {"slot_cos": cos, "slot_sin": sin, "slot_columns": columns, "last_tokens": self._last[None]}

    def _start_tree(self, results: Sequence[Tensor]) -> Tensor:
        self._hidden, self._logits, *path = [each[0] for each in results]
        self._set_path(*path)
        self._frontier, self.depth = self._last[1:], 0
        return self._on_path()

    def _set_path(self, logits: Tensor | None = None, tokens: Tensor | None = None) -> None:
        """Sets the logits [K, U] along the greedy path and its tokens [K], which heads without a conditional do not have."""
        self._path_logits, self._path = self._logits if logits is None else logits, tokens
        self._path_tokens: list[int] = tokens.tolist() if tokens is not None and tokens.is_cpu else []  # known to the host
        self._is_on_path, self._best = True, list[Candidates]()

    def _on_path(self) -> Tensor:
        """Returns the logits [1, U] below the path's node of the current depth."""
        self._row = self._path_logits.narrow(0, self.depth, 1)
        return self._row

    def propose(self, scores: Tensor, num_candidates: int) -> Candidates:
        if scores is not self._row:  # the sampler's noise has made other scores of them: `TargetSampler.coupled`
            return super().propose(scores, num_candidates)
        if not self._best or num_candidates > self._num_candidates:
            self._select_best(num_candidates)
        best = self._best[self.depth]
        return best if num_candidates == self._num_candidates else Candidates(*(each[:, :num_candidates] for each in best))

    def _select_best(self, num_candidates: int) -> None:
        """Selects the candidates below all nodes of the path at once; the host reads them together."""
        probs, tokens = super().propose(self._path_logits, num_candidates)
        tokens, path, probs = read_together(tokens, self._path, probs)
        self._path_tokens = [] if path is None else path.tolist()
        self._best = list(map(Candidates, probs[:, None].unbind(), tokens[:, None].unbind()))
        self._num_candidates = num_candidates

    def expand_pass(self, rows: Tensor, tokens: Tokens) -> Pass | Tensor:
        assert self.depth + 1 < self._num_levels, "the decoder drafts at most `max_depth` levels"
        self.depth += 1
        if self._level is None:
            return self._on_path().expand(len(tokens), -1) if len(tokens) > 1 else self._on_path()
        is_host = not isinstance(tokens, Tensor)
        self._is_on_path &= is_host and tokens == self._path_tokens[self.depth - 1 : self.depth]
        if self._is_on_path:
            assert self._path is not None
            self._frontier = self._path.narrow(0, self.depth - 1, 1)
            return self._on_path()
        staged = self._staging.stage(tokens)
        parents = self._frontier.index_select(0, rows)
        self._frontier = staged.clone() if is_host else staged
        tensors = {"tokens": staged, "parents": parents}
        tensors |= {"hidden": self._hidden.narrow(0, self.depth, 1), "logits": self._logits.narrow(0, self.depth, 1)}
        return Pass(self._level, len(tokens), tensors, lambda results: results[0])

    def set_synthetic_state(self, context: int, width: int) -> None:
        super().set_synthetic_state(context, width)
        levels = self._num_levels
        self._hidden = torch.zeros(levels, self.draft.config.hidden_size, dtype=self.dtype, device=self.device)
        self._logits = self._hidden.new_zeros(levels, self.draft.num_draft_tokens)
        self._last, self._frontier = self._last.new_zeros(2), self._last.new_zeros(width)
        self._set_path(*(() if self._level is None else (self._logits, self._last.new_zeros(levels))))
        self._is_on_path = width == 1
        if self._num_candidates:  # a level below another one looks them up
            self._select_best(self._num_candidates)
