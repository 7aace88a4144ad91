"""Text of an answer piece by piece, in time linear in its length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT_CHARACTER = "\ufffd"  # decoded bytes of an incomplete character


class Detokenizer:
    """Decodes a growing list of tokens; the concatenation of all pieces is the decoded list.

    Only the tokens since the last but one complete piece are decoded. The piece before the new one is context: a tokenizer may
    decode a token differently at the beginning of a text.

        tokens    Der Him mel \\xe2 \\x98 \\x80 blau
        decoded   [context| new             ]            held back: the new text ends within a character
                  [context| new                  ]       complete: becomes the context
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._context = self._start = 0  # of the window; the text of all tokens before `_start` was returned
        self._num_returned = 0  # characters returned of the text after `_start`

    def next_piece(self, tokens: Sequence[int], end: int, is_last: bool = False) -> str:
        """Returns the text up to token `end` that was not returned before, without the bytes of an incomplete character at its
        end, unless `is_last`; `tokens` are all tokens of the answer so far.
        """
        known = len(self._decode(tokens[self._context : self._start]))
        text = self._decode(tokens[self._context : end])[known:]
        complete = text if is_last else text.rstrip(REPLACEMENT_CHARACTER)
        piece = complete[self._num_returned :]
        self._num_returned = max(len(complete), self._num_returned)
        if text and complete == text:
            self._context, self._start, self._num_returned = self._start, end, 0
        return piece

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text
