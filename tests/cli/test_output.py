"""What commands print: tables, progress bars, text as it is accepted."""

import random
from typing import Any

import pytest
from support.models import make_qwen
from support.processors import make_processor
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from sage.decoding.answer import REPLACEMENT_CHARACTER, Detokenizer
from sage.io.tables import markdown_table


def test_markdown_pipes_are_escaped_once():
    assert markdown_table(["a"], [["x|y"], [r"x\|y"]]).splitlines()[2:] == [r"| x\|y |", r"| x\|y |"]


TEXT = "Ein Bild: ☀ über 東京, 🦊🦊 und e\u0301.\n" * 5


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Its decoder drops the space of the first word, as that of Llama."""
    inner = Tokenizer(models.WordLevel({"▁the": 0, "▁sun": 1, "s": 2}, unk_token="s"))
    inner.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def pieces(tokenizer: Any, tokens: list[int], sizes: list[int]) -> list[str]:
    detokenizer, end, found = Detokenizer(tokenizer), 0, []
    while end < len(tokens):
        end += sizes[len(found) % len(sizes)]
        found.append(detokenizer.next_piece(tokens, min(end, len(tokens)), is_last=end >= len(tokens)))
    return found


@pytest.mark.parametrize("sizes", [[1], [2], [3, 1, 4], [10**6]])
def test_pieces_are_the_text_without_broken_characters(sizes: list[int]) -> None:
    tokenizer = make_processor(make_qwen()).tokenizer
    tokens = tokenizer(TEXT)["input_ids"]
    assert len(tokens) == len(TEXT.encode())  # one token per byte
    found = pieces(tokenizer, tokens, sizes)
    assert "".join(found) == TEXT
    assert not any(REPLACEMENT_CHARACTER in piece for piece in found)


def test_bytes_that_are_no_text_decode_as_in_one_call() -> None:
    tokenizer = make_processor(make_qwen()).tokenizer
    draw = random.Random(0)
    tokens = [draw.randrange(64, 320) for _ in range(200)]
    assert "".join(pieces(tokenizer, tokens, [1, 2])) == tokenizer.decode(tokens, skip_special_tokens=True)


def test_a_tokenizer_that_strips_the_first_space() -> None:
    tokenizer, tokens = word_tokenizer(), [0, 1, 2, 0, 1, 1, 2]
    assert "".join(pieces(tokenizer, tokens, [1])) == tokenizer.decode(tokens) == "the suns the sun suns"
