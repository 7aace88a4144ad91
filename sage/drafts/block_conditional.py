"""The corrections of a block's logits by the tokens before a node, in decoding, as functions of tensors.

Shapes: F nodes of one tree level, K levels, D hidden, U draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sage.drafts.correction import Correction
from sage.runtime.host_tensors import cached_index
from sage.runtime.joint import Call
from sage.runtime.pass_function import (
    ALL_NODES,
    CALLS,
    NODES,
    Argument,
    Dim,
    JointFunction,
    PassFunction,
    Result,
    Value,
)
from sage.targets import Target
from sage.targets.tree_passes import describe_target, without_paths

if TYPE_CHECKING:
    from sage.drafts.block import BlockDraft


class CorrectionPass(PassFunction):
    """A correction of logits for each node of a level.

    Args:
        nodes: the dimension of the nodes.
        own: arguments after the nodes.
        slots: the dimension of the slots that they are in.
    """

    def __init__(
        self,
        draft: BlockDraft,
        target: Target,
        correction: Correction,
        names: tuple[str, str],
        nodes: Dim,
        own: Sequence[Argument] = (),
        slots: Dim | int = 1,
    ) -> None:
        num_tokens = draft.num_draft_tokens
        arguments = (
            Argument("tokens", (nodes,), torch.long),
            Argument("parents", (nodes,), torch.long),
            *own,
            Argument("hidden", (slots, draft.config.hidden_size), draft.dtype),
            Argument("logits", (slots, num_tokens), draft.dtype),
        )
        facts, modules = (describe_target(target), without_paths(draft.config)), (type(draft).__module__, Correction.__module__)
        super().__init__("draft", names, arguments, (Result((nodes, num_tokens)),), facts, modules)
        self.draft, self._target, self.correction = draft, target, correction


class ConditionalPass(CorrectionPass):
    """Logits below the nodes of one level: those of the slot, corrected for each node."""

    def __init__(self, draft: BlockDraft, target: Target, correction: Correction) -> None:
        names = ("the draft's correction of one node", "the draft's correction of several nodes")
        super().__init__(draft, target, correction, names, NODES)

    def _new_joint(self) -> JointFunction | None:
        return JointConditionalPass(self.draft, self._target, self.correction)

    def forward(self, tokens: Tensor, parents: Tensor, hidden: Tensor, logits: Tensor) -> tuple[Tensor]:
        """Returns logits [F, U].

        Args:
            tokens, parents: LongTensor [F], the nodes' tokens and those of their parents.
            hidden, logits: results [1, D] and [1, U] of the block at the nodes' level.
        """
        return (logits + self.correction(tokens, parents, self.correction.of_slots(hidden)),)


class JointConditionalPass(CorrectionPass, JointFunction):
    """Corrected logits below the nodes of one level of several requests. Shapes: T nodes, R requests."""

    def __init__(self, draft: BlockDraft, target: Target, correction: Correction) -> None:
        names = ("the draft's correction of one node of every request", "the draft's correction of several requests")
        super().__init__(draft, target, correction, names, ALL_NODES, (Argument("slots", (ALL_NODES,), torch.long),), CALLS)

    def forward(self, tokens: Tensor, parents: Tensor, slots: Tensor, hidden: Tensor, logits: Tensor) -> tuple[Tensor]:
        """Returns logits [T, U].

        Args:
            tokens, parents: LongTensor [T], as for `ConditionalPass.forward`.
            slots: LongTensor [T], the request of each node.
            hidden, logits: of the slots, [R, D] and [R, U].
        """
        corrected = self.correction(tokens, parents, self.correction.of_slots(hidden).index_select(0, slots))
        return (logits.index_select(0, slots) + corrected,)

    def join(self, calls: Sequence[Call], num_rows: int) -> Sequence[Value]:
        tokens, parents, hidden, logits = ([call.values[place] for call in calls] for place in range(4))
        numbers = tuple(place for place, one in enumerate(tokens) for _ in range(len(one)))
        slots = cached_index(numbers, tokens[0].device)
        return torch.cat(tokens), torch.cat(parents), slots, torch.cat(hidden), torch.cat(logits)

    def split(self, calls: Sequence[Call], results: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        return [(part,) for part in results[0].split([len(call.values[0]) for call in calls])]
