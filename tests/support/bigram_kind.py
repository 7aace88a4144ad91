"""A kind of draft with a session, pass functions and training of its own, in one module and one row: a bigram model.

The logits of the next token are a linear function of the last token's embedding. There is no cache and no context.

Shapes: F frontier nodes, P pairs, S supervised positions, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import sage
from sage.drafts.eagle import EagleConfig
from sage.drafts.head import DraftHead
from sage.drafts.registry import DraftKind
from sage.drafts.session import DraftSession
from sage.runtime.executors import EAGER, executor_of
from sage.runtime.host_tensors import Tokens, TokenStagingBuffer
from sage.runtime.pass_function import NODES, Argument, PassFunction, Result
from sage.targets import Features, Prompt
from train.config.schema import Config
from train.distill.objective import DraftOutput, Objective
from train.distill.pairs import Pairs
from train.distill.student import Student, gather_supervised


@dataclass(kw_only=True)
class BigramOptions:
    """The distribution of the next token by the last one.

    Attributes:
        scale: factor of the embedding.
    """

    scale: float = 1.0


class BigramConfig(EagleConfig):
    model_type = "sage_bigram"

    def __init__(self, *, scale: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scale = scale


class BigramDraft(DraftHead):
    config_class = BigramConfig
    compressor = None

    def __init__(self, config: BigramConfig) -> None:
        super().__init__(config)
        self.next_hidden = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.post_init()

    @torch.no_grad()
    def reset_parameters(self, target: sage.Target, vocabulary: Tensor | None = None) -> None:
        self.next_hidden.weight.normal_(std=0.1)

    def hidden(self, embeds: Tensor) -> Tensor:
        """[.., D] -> [.., D], the input of the target's lm_head."""
        return self.next_hidden(self.config.scale * embeds)

    def pass_functions(self, target: sage.Target) -> tuple[PassFunction, PassFunction]:
        key = (target, self.dtype)
        if key not in self._functions:
            self._functions[key] = (BigramPass(self, target),) * 2
        return self._functions[key]


class BigramPass(PassFunction):
    def __init__(self, draft: BigramDraft, target: sage.Target) -> None:
        arguments = (Argument("tokens", (NODES,), torch.long),)
        names = ("the bigram of one token", "the bigrams of several tokens")
        super().__init__("draft", names, arguments, (Result((NODES, target.vocab_size)),), draft.config.to_dict())
        self.draft, self.embed_tokens, self.lm_head = draft, target.embed_tokens, target.lm_head

    def forward(self, tokens: Tensor) -> tuple[Tensor]:
        return (self.lm_head(self.draft.hidden(self.embed_tokens(tokens))),)


class BigramSession(DraftSession):
    """Looks up the logits of every node; nothing is remembered but the number of committed tokens."""

    context = 0

    def __init__(self, draft: BigramDraft, target: sage.Target, capacity: int) -> None:
        executor = EAGER if draft.training else executor_of(target.passes)
        self._run = executor.bind(draft.pass_functions(target)[0])
        self._staging = TokenStagingBuffer(target.device)

    @torch.no_grad()
    def prefill(self, prompt: Prompt, features: Features, root: Tensor) -> Tensor:
        return self._run(root)[0]

    @torch.no_grad()
    def expand(self, rows: Tensor, tokens: Tokens) -> Tensor:
        return self._run(self._staging.stage(tokens))[0]

    @torch.no_grad()
    def commit(self, features: Features, tokens: Tokens) -> Tensor:
        return self._run(self._staging.stage(tokens)[-1:])[0]

    def set_synthetic_state(self, context: int, width: int) -> None:
        self.context = context


class BigramStudent(Student):
    @classmethod
    def of(cls, draft: BigramDraft, config: Config) -> BigramStudent:
        return cls(draft.float().train().requires_grad_(True), Objective(config.objective))

    @property
    def decoding_draft(self) -> BigramDraft:  # type: ignore[override]
        return self.draft

    def predict(self, pairs: Pairs, target_lm_head: Tensor) -> DraftOutput:
        hidden = self.draft.hidden(pairs.embeds_next.to(self.draft.dtype))
        hidden_KSD, is_valid_KS = gather_supervised([hidden], pairs.mask)
        return DraftOutput(hidden_KSD, target_lm_head, is_valid_KS)


ROW = DraftKind(
    name="bigram",
    options=BigramOptions,
    draft=f"{__name__}:BigramDraft",
    session=f"{__name__}:BigramSession",
    student=f"{__name__}:BigramStudent",
)
