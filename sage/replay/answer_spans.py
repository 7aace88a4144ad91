"""The tokens of an answer with their origin, for pages: the prefill, a drafted token at some depth, or the target's own.

`parts.html` draws them with the macros `answer` and `answer_legend`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sage.decoding.answer import Detokenizer
from sage.io.page import visible

MAX_STYLES = 6  # shades of depths


def token_pieces(tokens: Sequence[int], tokenizer: Any) -> list[str]:
    """Returns the text that each token adds; that of a character of several tokens comes with the last of them.

    Args:
        tokenizer: None for a target without a processor, whose tokens are shown as numbers.
    """
    if tokenizer is None:
        return [f" {token}" for token in tokens]
    detokenizer = Detokenizer(tokenizer)
    return [visible(detokenizer.next_piece(tokens, end, end == len(tokens))) for end in range(1, len(tokens) + 1)]


def num_equal(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Returns the number of tokens before the first that differs."""
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(tokens), len(others)))


def answer_spans(
    tokens: Sequence[int], pieces: Sequence[str], rounds: Iterable[tuple[int, int]], tokenizer: Any
) -> list[dict[str, Any]]:
    """Returns `text`, `style`, `round` (0: the prefill), `label` and `note` of every token.

    Args:
        pieces: of `token_pieces`.
        rounds: emitted and accepted tokens of every round.
    """
    origins = [("p", 0, "from the prefill")]
    for number, (emitted, accepted) in enumerate(rounds, start=1):
        for depth in range(1, emitted + 1):
            is_drafted = depth <= accepted
            what = f"drafted at depth {depth}, accepted" if is_drafted else "the target's own"
            origins.append((f"d{min(depth, MAX_STYLES)}" if is_drafted else "b", number, f"round {number}: {what}"))
    special = set(getattr(tokenizer, "all_special_ids", ()))
    spans = []
    for token, text, (style, number, note) in zip(tokens, pieces, origins, strict=True):
        is_special = not text and token in special  # skipped in the text
        label = visible(tokenizer.decode([token])) if is_special else ""
        style = f"{style} special" if is_special else style
        spans.append({"text": text, "style": style, "round": number, "label": label, "note": note})
    return spans
