"""The correction of a block's logits by the tokens before a node, in decoding, and its pass as a function of tensors.

Shapes: F nodes, R requests, K levels, D hidden, U draft vocabulary, V target vocabulary, r rank of the conditional.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sage.drafts.slot_passes import lm_head_rows
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

ROWS_AT_ONCE = 4096  # of the target's embedding, while tables are computed


class Correction(nn.Module):
    """What a block head's conditional adds to the logits below nodes.

    What it computes of one token alone is looked up in tables [V, r], and for a path head the product of lm_head and `out` is
    one matrix [U, r]; `refresh` computes them.
    """

    def __init__(self, draft: Any, target: Target) -> None:
        super().__init__()
        self.draft, self._target = draft, target
        self._of_versions: list[tuple[int, int]] = []
        if draft.markov_head is not None:
            self.token, self.to_logits = draft.markov_head.markov_w1, draft.markov_head.markov_w2
            return
        config, place = draft.config, {"device": draft.device, "dtype": draft.dtype}
        with torch.inference_mode(False):
            self.token, self.parent = (nn.Embedding(config.vocab_size, config.conditional_rank, **place) for _ in range(2))
            self.to_logits = nn.Linear(config.conditional_rank, draft.num_draft_tokens, bias=False, **place)
        for table in (self.token, self.parent, self.to_logits):
            table.requires_grad_(False)

    @torch.no_grad()
    def refresh(self) -> None:
        """Computes the tables of a path head anew if its weights have changed, as they do in training."""
        head = self.draft.path_head
        if head is None:
            return
        weights = (head.token.weight, head.parent.weight, head.out.weight)
        versions = [(weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in weights]
        if versions == self._of_versions:
            return
        rows, out = lm_head_rows(self.draft, self._target).weight, head.out.weight
        self.to_logits.weight.copy_(rows.float() @ out.float() if rows.dtype != torch.float64 else rows @ out)
        for ids in torch.arange(self.draft.config.vocab_size, device=self.draft.device).split(ROWS_AT_ONCE):
            embeds = self._target.embed_tokens(ids).to(self.draft.dtype)
            self.token.weight[ids], self.parent.weight[ids] = head.of_token(embeds), head.of_parent(embeds)
        self._of_versions = versions

    def of_slots(self, hidden: Tensor) -> Tensor:
        """Returns what slots with hidden states [.., D] add to the states of their nodes, [.., r]."""
        head = self.draft.path_head
        return hidden[..., :0] if head is None else head.hidden(hidden)

    def forward(self, tokens: Tensor, parents: Tensor, of_slots: Tensor) -> Tensor:
        """Returns the correction [F, U] of the logits below nodes with `tokens` [F] below `parents` [F]."""
        state = self.token(tokens)
        if self.draft.path_head is not None:
            state = self.draft.path_head.activation(state + self.parent(parents) + of_slots)
        return self.to_logits(state)


class CorrectionPass(PassFunction):
    """Logits below the nodes of one level: those of the slot, corrected for each node.

    Args:
        nodes: the dimension of the nodes.
        own: of several requests, arguments after the nodes.
        slots: the dimension of the slots that they are in.
    """

    def __init__(
        self,
        draft: Any,
        target: Target,
        correction: Correction,
        names: tuple[str, str] = ("the draft's correction of one node", "the draft's correction of several nodes"),
        nodes: Dim = NODES,
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
        facts, modules = (describe_target(target), without_paths(draft.config)), (type(draft).__module__,)
        super().__init__("draft", names, arguments, (Result((nodes, num_tokens)),), facts, modules)
        self.draft, self._target, self.correction = draft, target, correction

    def _new_joint(self) -> JointFunction | None:
        return JointCorrectionPass(self.draft, self._target, self.correction)

    def forward(self, tokens: Tensor, parents: Tensor, hidden: Tensor, logits: Tensor) -> tuple[Tensor]:
        """Returns logits [F, U].

        Args:
            tokens, parents: LongTensor [F], the nodes' tokens and those of their parents.
            hidden, logits: results [1, D] and [1, U] of the block at the nodes' level.
        """
        return (logits + self.correction(tokens, parents, self.correction.of_slots(hidden)),)


class JointCorrectionPass(CorrectionPass, JointFunction):
    """Corrected logits below the nodes of one level of several requests. Shapes: T nodes, R requests."""

    def __init__(self, draft: Any, target: Target, correction: Correction) -> None:
        names = ("the draft's correction of one node of every request", "the draft's correction of several requests")
        super().__init__(draft, target, correction, names, ALL_NODES, (Argument("slots", (ALL_NODES,), torch.long),), CALLS)

    def forward(  # type: ignore[override]
        self, tokens: Tensor, parents: Tensor, slots: Tensor, hidden: Tensor, logits: Tensor
    ) -> tuple[Tensor]:
        """Returns logits [T, U].

        Args:
            tokens, parents: LongTensor [T], as for `CorrectionPass.forward`.
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
