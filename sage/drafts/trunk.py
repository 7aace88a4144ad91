"""The trunk of a block: the path on which each level has its most probable token below the level before.

Drafts follow it mostly. One computation of several levels then replaces a call per level, whose cost is that of a call.

Shapes: R requests, T levels, D hidden, U draft vocabulary, r rank of the conditional.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sage.drafts.block_heads import PathHead
from sage.runtime.joint import Call
from sage.runtime.pass_function import CALLS, Argument, Dim, JointFunction, PassFunction, Result, Value
from sage.targets import Target
from sage.targets.tree_passes import describe_target, without_paths

if TYPE_CHECKING:
    from sage.drafts.block import BlockDraft


def trunk_levels(num_levels: int) -> int:
    """Returns the levels of a part of the trunk: many rounds end in the first half of a block of more than four levels."""
    return num_levels // 2 if num_levels > 4 and num_levels % 2 == 0 else num_levels


class Trunk(nn.Module):
    """Computes a part of the trunk of several requests.

    Args:
        to_logits: map from the state of the conditional to the logits.
    """

    def __init__(self, draft: BlockDraft, target: Target, to_logits: nn.Linear) -> None:
        super().__init__()
        self.draft, self.embed_tokens, self.to_logits = draft, target.embed_tokens, to_logits
        self.num_levels = trunk_levels(draft.num_levels)

    def forward(self, tokens: Tensor, parents: Tensor, hidden: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns logits [R, T, U] below the nodes of the part, and their most probable tokens, LongTensor [R, T].

        Args:
            tokens, parents: LongTensor [R], the first node of the part, the root at first, and the token before it.
            hidden, logits: results [R, T, D] and [R, T, U] of the block.
        """
        head = self.draft.path_head
        slots = None if head is None else head.hidden(hidden)
        above, rows, found = self._parts(parents)[1], [], []
        for level in range(self.num_levels):
            own, below = self._parts(tokens)
            state = own if slots is None else nn.functional.silu(own + above + slots[:, level])
            row = logits[:, level] + self.to_logits(state)
            best = row.argmax(-1)
            tokens, above = best + self.draft.d2t.index_select(0, best), below
            rows.append(row)
            found.append(tokens)
        return torch.stack(rows, 1), torch.stack(found, 1)

    def _parts(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what tokens [R] add to the state of their node and to those of the nodes below, [R, r] each."""
        if self.draft.path_head is None:
            assert self.draft.markov_head is not None
            state = self.draft.markov_head(tokens)
            return state, state
        return self.draft.path_head.parts(self.embed_tokens(tokens).to(self.draft.dtype))


class TrunkPass(PassFunction):
    """A part of the trunk after the one that the block's pass computes."""

    def __init__(
        self,
        draft: BlockDraft,
        target: Target,
        trunk: Trunk,
        name: str = "the draft's correction of the most probable path",
        requests: Dim | int = 1,
    ) -> None:
        levels, size, num_tokens = trunk.num_levels, draft.config.hidden_size, draft.num_draft_tokens
        arguments = (
            Argument("tokens", (requests,), torch.long),
            Argument("parents", (requests,), torch.long),
            Argument("hidden", (requests, levels, size), draft.dtype),
            Argument("logits", (requests, levels, num_tokens), draft.dtype),
        )
        results = (Result((requests, levels, num_tokens)), Result((requests, levels)))
        facts, modules = (describe_target(target), without_paths(draft.config)), (type(draft).__module__, PathHead.__module__)
        super().__init__("draft", (name, name), arguments, results, facts, modules)
        self.draft, self._target, self.trunk = draft, target, trunk

    def _new_joint(self) -> JointFunction | None:
        return JointTrunkPass(self.draft, self._target, self.trunk)

    def forward(self, tokens: Tensor, parents: Tensor, hidden: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns logits [R, T, U] and tokens [R, T]; arguments as of `Trunk.forward`."""
        found: tuple[Tensor, Tensor] = self.trunk(tokens, parents, hidden, logits)
        return found


class JointTrunkPass(TrunkPass, JointFunction):
    """A part of the trunk of several requests, which have a row each in every argument."""

    def __init__(self, draft: BlockDraft, target: Target, trunk: Trunk) -> None:
        super().__init__(draft, target, trunk, "the draft's correction of the most probable paths", CALLS)

    def join(self, calls: Sequence[Call], num_rows: int) -> Sequence[Value]:
        return [torch.cat(parts) for parts in zip(*(call.values for call in calls), strict=True)]

    def split(self, calls: Sequence[Call], results: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        return list(zip(*(result.split(1) for result in results), strict=True))
