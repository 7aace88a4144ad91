"""What heads with slots have in common: one pass over accepted tokens and the slots behind them drafts all levels of a round.

Shapes: T tokens, R blocks, S slots, K levels, D hidden.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from sage.drafts.correction import Correction, CorrectionPass
from sage.drafts.head import DraftHead
from sage.drafts.slot_passes import SlotPass
from sage.runtime.pass_function import PassFunction
from sage.targets import Target

SPARE_NAMES = ("reserved", "unused")  # in the names of tokens that tokenizers keep for later use


class SlotHead(DraftHead):
    """A head whose pass drafts K levels from S slots behind the last token.

    Attributes:
        computes_tokens: whether accepted tokens run through the layers, too, instead of being keys and values alone.
        markov_head, path_head: correction of the logits below a node by the tokens before it; at most one of them.
        confidence_head: predicts the acceptance of a slot, for engines.
    """

    computes_tokens: ClassVar[bool]
    markov_head: nn.Module | None
    path_head: nn.Module | None
    confidence_head: nn.Module | None

    @property
    def num_layers(self) -> int:
        return int(self.config.num_layers)

    @property
    @abstractmethod
    def num_slots(self) -> int:
        """S, the rows of a block that follow the accepted tokens."""

    @property
    @abstractmethod
    def num_levels(self) -> int:
        """K, the levels that a block drafts."""

    @property
    def is_causal(self) -> bool:
        """Whether a slot attends to the slots before it alone."""
        return True

    @property
    def has_conditional(self) -> bool:
        """Whether the logits below a node depend on the tokens before it."""
        return self.markov_head is not None or self.path_head is not None

    def _new_functions(self, target: Target) -> tuple[PassFunction, ...]:
        """Returns the function of a block and, with a conditional, that of a level."""
        if not self.has_conditional:
            return (SlotPass(self, target),)
        correction = Correction(self, target)
        return SlotPass(self, target, correction), CorrectionPass(self, target, correction)

    @abstractmethod
    def run_slots(
        self, embeds: Tensor, fused: Tensor, ends: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None, cache: Any
    ) -> Tensor:
        """Reads accepted tokens and drafts from the last one of each of R requests.

        Args:
            embeds: [1, T, D], embeddings of the token after each token.
            fused: [1, T, D], `fuse(..)` of the tokens.
            ends: LongTensor [R], the last token of each request.
            rope: cos and sin of the tokens and of all slots, [1, 1, T + R * S, d] each.
            mask: additive, of the slots or, with `computes_tokens`, of tokens and slots; None attends causally.
            cache: of all layers, to extend by tokens and slots.

        Returns:
            [R, K, D], the input of `logits`.
        """

    @abstractmethod
    def roll_out(
        self,
        embeds_next: Tensor,
        features: Tensor,
        position_ids: Tensor,
        roots: Tensor,
        sizes: Sequence[int],
        weight: Tensor | None = None,
    ) -> Tensor:
        """Drafts from several pairs of complete sequences in one pass, for training.

        Args:
            embeds_next, features, position_ids: as in `forward`, of complete right-padded sequences of P pairs, or of the rows
                returned by `shorten`.
            roots: LongTensor [B, A], pairs to draft from.
            sizes: number of blocks that reach each level, K numbers, the first of them A; level k has the first `sizes[k]`.
                Equal unless slots are causal.
            weight: [B, P], factors of the attention values (`HeadInput.weight`); None for 1.

        Returns:
            [B, sum of sizes, D], the rows of level 0, then those of level 1, ..; undefined where root + level is beyond the
            last pair.
        """


def mask_token_of(target: Target, chosen: int | None, *, is_read: bool = False) -> int:
    """Returns the token chosen in `draft.mask_token`, or one that the target does not use.

    In this order: a row of the embedding beyond the tokenizer, a token named as reserved or unused, a placeholder of images or
    videos, which no answer contains, the padding token unless it ends an answer. A target on the meta device has no tokenizer;
    its last row stands for the token.

    Args:
        chosen: `draft.mask_token`.
        is_read: whether engines feed the draft the embeddings of prompts: the placeholders are then in use.

    Raises:
        ValueError: the chosen token is no row of the embedding, or the target has no such token.
    """
    if chosen is not None:
        if chosen >= target.vocab_size:
            raise ValueError(f"draft.mask_token={chosen}: allowed: below the target's {target.vocab_size} tokens; change it")
        return chosen
    if target.is_meta:
        return target.vocab_size - 1
    tokenizer: Any = None if target.processor is None else target.processor.tokenizer
    names: dict[str, int] = {} if tokenizer is None else tokenizer.get_vocab()
    first = max(names.values(), default=target.vocab_size) + 1
    if first < target.vocab_size:
        return first
    spare = [token for name, token in names.items() if any(word in name.lower() for word in SPARE_NAMES)]
    if spare:
        return min(spare)
    if (slots := target.family.slots) and not is_read:
        return max(slots.values())
    padding = getattr(target.text_config, "pad_token_id", None)
    if padding is not None and padding not in target.eos_token_ids:
        return int(padding)
    raise ValueError(
        f"draft.mask_token: {target.name} has no unused token: its tokenizer fills all {target.vocab_size} rows of the "
        f"embedding, and it has neither placeholders of images nor a padding token of its own; give "
        "draft.mask_token=ID, a token that no answer contains"
    )
