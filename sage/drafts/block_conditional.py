"""The corrections of a block's logits by the tokens before a node, in decoding, as functions of tensors.

Shapes: F nodes of one tree level, K levels, D hidden, U draft vocabulary, r rank of the conditional.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sage.drafts.block_heads import PathHead
from sage.drafts.block_passes import lm_head_rows
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
        to_logits: map from the state of the conditional to the logits.
        nodes: the dimension of the nodes.
        own: arguments after the nodes.
        slots: the dimension of the slots that they are in.
    """

    def __init__(
        self,
        draft: BlockDraft,
        target: Target,
        to_logits: nn.Linear,
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
        facts, modules = (describe_target(target), without_paths(draft.config)), (type(draft).__module__, PathHead.__module__)
        super().__init__("draft", names, arguments, (Result((nodes, num_tokens)),), facts, modules)
        self.draft, self._target, self.embed_tokens, self.to_logits = draft, target, target.embed_tokens, to_logits
        self.path_head, self.markov_head = draft.path_head, draft.markov_head

    def state(self, tokens: Tensor, parents: Tensor, hidden: Tensor) -> Tensor:
        """Returns the state [.., r] of nodes with `tokens` [..] below `parents` [..], in slots with `hidden` [.., D]."""
        if self.path_head is None:
            assert self.markov_head is not None
            return self.markov_head(tokens)
        embeds = (self.embed_tokens(part).to(hidden.dtype) for part in (tokens, parents))
        state: Tensor = self.path_head(*embeds, hidden)
        return state


class ConditionalPass(CorrectionPass):
    """Logits below the nodes of one level: those of the slot, corrected for each node."""

    def __init__(self, draft: BlockDraft, target: Target) -> None:
        names = ("the draft's correction of one node", "the draft's correction of several nodes")
        super().__init__(draft, target, self._new_map(draft), names, NODES)
        self._of_version: tuple[int, int] | None = None

    @staticmethod
    def _new_map(draft: BlockDraft) -> nn.Linear:
        if draft.markov_head is not None:
            return draft.markov_head.markov_w2
        with torch.inference_mode(False):
            new = nn.Linear(draft.config.conditional_rank, draft.num_draft_tokens, False, draft.device, draft.dtype)
        return new.requires_grad_(False)

    @torch.no_grad()
    def refresh(self) -> None:
        """Computes the product of lm_head and the path head's `out` anew, if `out` has changed, as it does in training."""
        if self.path_head is None:
            return
        weight = self.path_head.out.weight
        version = weight.data_ptr(), 0 if weight.is_inference() else weight._version
        if version != self._of_version:
            rows = lm_head_rows(self.draft, self._target).weight
            self.to_logits.weight.copy_(rows.float() @ weight.float() if rows.dtype != torch.float64 else rows @ weight)
            self._of_version = version

    def _new_joint(self) -> JointFunction | None:
        return JointConditionalPass(self.draft, self._target, self.to_logits)

    def forward(self, tokens: Tensor, parents: Tensor, hidden: Tensor, logits: Tensor) -> tuple[Tensor]:
        """Returns logits [F, U].

        Args:
            tokens, parents: LongTensor [F], the nodes' tokens and those of their parents.
            hidden, logits: results [1, D] and [1, U] of the block at the nodes' level.
        """
        return (logits + self.to_logits(self.state(tokens, parents, hidden)),)


class JointConditionalPass(CorrectionPass, JointFunction):
    """Corrected logits below the nodes of one level of several requests. Shapes: T nodes, R requests."""

    def __init__(self, draft: BlockDraft, target: Target, to_logits: nn.Linear) -> None:
        names = ("the draft's correction of one node of every request", "the draft's correction of several requests")
        super().__init__(draft, target, to_logits, names, ALL_NODES, (Argument("slots", (ALL_NODES,), torch.long),), CALLS)

    def forward(self, tokens: Tensor, parents: Tensor, slots: Tensor, hidden: Tensor, logits: Tensor) -> tuple[Tensor]:
        """Returns logits [T, U].

        Args:
            tokens, parents: LongTensor [T], as for `ConditionalPass.forward`.
            slots: LongTensor [T], the request of each node.
            hidden, logits: of the slots, [R, D] and [R, U].
        """
        state = self.state(tokens, parents, hidden.index_select(0, slots))
        return (logits.index_select(0, slots) + self.to_logits(state),)

    def join(self, calls: Sequence[Call], num_rows: int) -> Sequence[Value]:
        tokens, parents, hidden, logits = ([call.values[place] for call in calls] for place in range(4))
        numbers = tuple(place for place, one in enumerate(tokens) for _ in range(len(one)))
        slots = cached_index(numbers, tokens[0].device)
        return torch.cat(tokens), torch.cat(parents), slots, torch.cat(hidden), torch.cat(logits)

    def split(self, calls: Sequence[Call], results: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        return [(part,) for part in results[0].split([len(call.values[0]) for call in calls])]
