"""Recorded drafts along the answer: how far, and at which ranks, the draft's candidates contain the tokens of the answer."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from sage.replay.recording import RecordedRound, Recording


def ranks_on_path(recording: Recording, recorded: RecordedRound) -> Iterator[tuple[Tensor, int | None]]:
    """Yields, per recorded node on the path of the answer, the probabilities of its candidates [K] and the rank of the token.

    The rank of the answer's token is None, and the path ends, where the token is not among the candidates.
    """
    answer = tuple(recording.tokens[recorded.position :])
    for depth, token in enumerate(answer):
        if answer[:depth] not in recorded.candidates:
            return
        probs, candidates = recorded.candidates[answer[:depth]]
        tokens = candidates.tolist()
        yield probs, tokens.index(token) if token in tokens else None
        if token not in tokens:
            return


def depth_on_path(recording: Recording, recorded: RecordedRound) -> int:
    """Returns the number of tokens of the answer that the candidates of a round contain."""
    return sum(rank is not None for _, rank in ranks_on_path(recording, recorded))
