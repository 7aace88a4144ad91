"""The passes of a draft head in decoding as functions of tensors, over the rows of one request or of several.

Shapes: T nodes or tokens of all requests, P parents, R requests, N nodes of one at most, B cache rows, S keys, D hidden, A
feature levels, U draft vocabulary, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sage.drafts.layer import LastQuery
from sage.runtime.cache import PackedCache, Queries, by_row, tile_mask
from sage.runtime.packing import CachedInputs
from sage.runtime.pass_function import (
    NEAR,
    NODES,
    PARENTS,
    REQUESTS,
    ROWS,
    Padding,
    PassFunction,
    PassInputs,
    argument,
)
from sage.targets import Features, Target
from sage.targets.tree_passes import NodeInputs, describe_target, without_paths


@dataclass(kw_only=True)
class LevelInputs(NodeInputs):
    """Arguments of a pass over one level of trees.

    Attributes:
        tokens, parents: LongTensor [T], of each node its token, and its parent as a row of `hidden`.
        hidden: [P, D], the outputs of the last pass.
        numbers: LongTensor [T], the request of each node.
        cos, sin: [1, 1, R, d], rope of the level of each request.
    """

    visible: Tensor = argument(NODES, NEAR, dtype=torch.bool, padding=Padding.masked)
    near: Tensor = argument(ROWS, NEAR, padding=Padding.spare)
    tokens: Tensor = argument(NODES)
    parents: Tensor = argument(NODES, indexes="hidden")
    hidden: Tensor = argument(PARENTS, "hidden_size", dtype=None)
    numbers: Tensor = argument(NODES)
    cos: Tensor = argument(1, 1, REQUESTS, "head_dim", dtype=None)
    sin: Tensor = argument(1, 1, REQUESTS, "head_dim", dtype=None)

    @property
    def rope(self) -> tuple[Tensor, Tensor]:
        """Cos and sin of every node, [1, 1, T, d], or of all nodes alike, [1, 1, 1, d]."""
        if self.queries is None:
            return self.cos, self.sin
        return self.cos.index_select(2, self.numbers), self.sin.index_select(2, self.numbers)


@dataclass(kw_only=True)
class PairInputs(CachedInputs):
    """Arguments of a pass over pairs of tokens that the target has read.

    Attributes:
        embeds: [1, T, D], embeddings of the second tokens.
        last, levels: `Features` of the first ones, 1 + A tensors [1, T, D].
        cos, sin: [1, 1, T, d].
        ends: LongTensor [R], the last pair of each request.
    """

    embeds: Tensor = argument(1, NODES, "target_size", dtype=None)
    last: Tensor = argument(1, NODES, "target_size", dtype=None)
    levels: Sequence[Tensor] = argument(1, NODES, "target_size", dtype=None, count="num_levels")
    cos: Tensor = argument(1, 1, NODES, "head_dim", dtype=None)
    sin: Tensor = argument(1, 1, NODES, "head_dim", dtype=None)
    ends: Tensor = argument(REQUESTS)

    @property
    def features(self) -> Features:
        return Features(self.last, tuple(self.levels))


@dataclass(kw_only=True)
class CommitInputs(PairInputs):
    """Arguments of a `CommitPass`; `requests`: LongTensor [B], the request of each cache row, 0 for none."""

    requests: Tensor = argument(ROWS)


class HeadPass(PassFunction):
    """A pass of a `DraftHead`, such as its `level of` one token; inputs and results as of a `PassFunction`."""

    def __init__(self, draft: Any, target: Target, name: str, inputs: type[PassInputs], results: Any, **sizes: int) -> None:
        names = (f"the draft's {name} one token", f"the draft's {name} several tokens")
        config = draft.config
        sizes |= {
            "kv_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "num_layers": draft.num_layers,
            "hidden_size": config.hidden_size,
            "target_size": target.hidden_size,
            "num_levels": len(draft.levels),
        }
        facts = (describe_target(target), without_paths(config))
        super().__init__("draft", names, inputs, sizes, draft.dtype, results, facts)
        self.draft, self.embed_tokens, self.lm_head = draft, target.embed_tokens, target.lm_head
        self._target = target

    def tiled(self, visible: Tensor) -> Tensor:
        """Returns the additive mask of what queries see, Bool [Q, S] or [B, N, S]."""
        config = self.draft.config
        return tile_mask(visible, config.num_attention_heads // config.num_key_value_heads, self.draft.dtype)


class LevelPass(HeadPass):
    """A draft head's pass over one level of the trees."""

    def __init__(self, draft: Any, target: Target) -> None:
        results = ((NODES, draft.config.hidden_size), (NODES, draft.num_draft_tokens))
        super().__init__(draft, target, "level of", LevelInputs, results)

    def compute(self, inputs: LevelInputs) -> tuple[Tensor, Tensor]:
        """Returns outputs [T, D] and logits [T, U]."""
        embeds, hidden = self.embed_tokens(inputs.tokens)[None], inputs.hidden.index_select(0, inputs.parents)[None]
        is_single = not torch.compiler.is_exporting() and inputs.queries is None and inputs.visible.shape[1] == 1
        mask = None if is_single else self.tiled(by_row(inputs.seen(), inputs.queries))
        out = self.draft.read(embeds, hidden, inputs.rope, mask, inputs.cache())[0]
        return out, self.draft.logits(out, self._target)


class CommitPass(HeadPass):
    """A draft head's pass over the tokens that the target accepted, or over a prompt."""

    def __init__(self, draft: Any, target: Target) -> None:
        results = ((REQUESTS, draft.config.hidden_size), (REQUESTS, draft.num_draft_tokens))
        super().__init__(draft, target, "commit of", CommitInputs, results)

    def compute(self, inputs: CommitInputs) -> tuple[Tensor, Tensor]:
        """Returns the output of the last pair of each request [R, D], and its logits [R, U]."""
        owners, columns, ends = inputs.owners, inputs.columns, inputs.ends
        queries = Queries.of(owners.index_select(0, ends), torch.zeros_like(ends), inputs.requests[:, None])
        cache = PackedCache(inputs.keys, inputs.values, owners, columns, inputs.steps.shape[0], queries)
        mask = self.tiled(by_row(inputs.steps <= columns.index_select(0, ends)[:, None], queries))
        fused, rope = self.draft.fuse(inputs.features), (inputs.cos, inputs.sin)
        out = self.draft.read(inputs.embeds, fused, rope, mask, LastQuery(cache, ends))[0]
        return out, self.draft.logits(out, self._target)
