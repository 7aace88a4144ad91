"""The token whose embedding fills the slots of a block: one that the target does not use."""

from __future__ import annotations

from typing import Any

from sage.targets import Target

SPARE_NAMES = ("reserved", "unused")  # in the names of tokens that tokenizers keep for later use


def mask_token_of(target: Target, chosen: int | None) -> int:
    """Returns the token chosen in `draft.mask_token`, or one that the target does not use.

    In this order: a row of the embedding beyond the tokenizer, a token named as reserved or unused, a placeholder of images or
    videos, which no answer contains, the padding token unless it ends an answer. A target on the meta device has no tokenizer;
    its last row stands for the token.

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
    if slots := target.family.slots:
        return max(slots.values())
    padding = getattr(target.text_config, "pad_token_id", None)
    if padding is not None and padding not in target.eos_token_ids:
        return int(padding)
    raise ValueError(
        f"draft.mask_token: {target.name} has no unused token: its tokenizer fills all {target.vocab_size} rows of the "
        f"embedding, and it has neither placeholders of images nor a padding token of its own; give "
        "draft.mask_token=ID, a token that no answer contains"
    )
