"""Recording a decode: what the draft said at every node that was asked about, and the answer.

Owns: recording. Does not own: what is done with it (sage.replay.replay).

Shapes: F frontier nodes, K candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sage.drafts import Draft, DraftSession
from sage.generation import Generation, start
from sage.host_tensors import Tokens
from sage.targets import Features, Prompt, Target
from sage.trees import Policy
from sage.trees import policy as new_policy

Path = tuple[int, ...]  # tokens below the root
Candidates = tuple[Tensor, Tensor]  # probabilities and target tokens, [K] each, descending

WIDE: Mapping[str, Any] = {"total": 64, "depth": 12, "top_k": 10}  # of eagle2, the default recorder


@dataclass
class RecordedRound:
    """What the draft said in one round.

    Attributes:
        position: tokens of the answer that were known before the round; the last of them is the root.
        said: candidates below every node that was asked about, by the tokens that lead to it.
    """

    position: int
    said: dict[Path, Candidates]


@dataclass
class Recording:
    """One decode: its answer and what the draft said at each round's start.

    Attributes:
        prompt_tokens: length of the prompt.
        max_new_tokens: the length limit that was asked for.
        vocabulary: size of the target's.
        eos: tokens that end an answer.
        tokens: the answer.
        rounds: in order.
    """

    prompt_tokens: int
    max_new_tokens: int
    vocabulary: int
    tokens: list[int]
    rounds: list[RecordedRound]
    eos: tuple[int, ...] = ()


class Recorder(DraftSession):
    """A draft session that writes down what the draft says.

    Args:
        session: the draft at work.
        count: candidates kept per node.
    """

    def __init__(self, session: DraftSession, count: int) -> None:
        self.session, self.count = session, count
        self.levels, self.token_map = session.levels, session.token_map
        self.rounds: list[dict[Path, Candidates]] = []
        self._frontier: list[Path] = []

    @property
    def context(self) -> int:
        return self.session.context

    def prefill(self, prompt: Prompt, features: Features, root: Tensor) -> Tensor:
        return self._start(self.session.prefill(prompt, features, root))

    def commit(self, features: Features, tokens: Tokens) -> Tensor:
        return self._start(self.session.commit(features, tokens))

    def expand(self, rows: Tensor, tokens: Tokens) -> Tensor:
        logits = self.session.expand(rows, tokens)
        self._frontier = [(*self._frontier[row], token) for row, token in zip(rows.tolist(), map(int, tokens), strict=True)]
        return self._note(logits)

    def _start(self, logits: Tensor) -> Tensor:
        self.rounds.append({})
        self._frontier = [()]
        return self._note(logits)

    def _note(self, logits: Tensor) -> Tensor:
        probs, tokens = self.session.propose(logits, self.count)
        for path, row in zip(self._frontier, zip(probs.cpu(), tokens.cpu(), strict=True), strict=True):
            self.rounds[-1][path] = row
        return logits


def record(
    target: Target, draft: Draft, inputs: Any, policy: str | Policy | None = None, candidates: int = 16, **options: Any
) -> Recording:
    """Decodes one prompt and keeps what the draft said.

    Args:
        target, draft, inputs, options: as for `sage.generate`.
        policy: a wide one that drafts in every round; default `eagle2` as in `WIDE`.
        candidates: kept per node; as many as the policies to be replayed look at.
    """
    generation = start(target, draft, inputs, policy=new_policy("eagle2", **WIDE) if policy is None else policy, **options)
    assert generation.request.session is not None, "start refuses a policy that drafts without a draft"
    recorder = generation.request.session = Recorder(generation.request.session, candidates)
    positions = [len(generation.tokens) for _ in generation.rounds()]
    return _recording(generation, recorder, positions)


def _recording(generation: Generation, recorder: Recorder, positions: Sequence[int]) -> Recording:
    """`positions`: answer tokens known after the prefill and after each round; the last is the answer's length."""
    request = generation.request
    said = recorder.rounds[: len(positions) - 1]
    return Recording(
        prompt_tokens=request.prompt.input_ids.shape[1],
        max_new_tokens=request.stop.max_new_tokens,
        vocabulary=generation.target.vocab_size,
        tokens=list(generation.tokens),
        rounds=[RecordedRound(position, one) for position, one in zip(positions[:-1], said, strict=True)],
        eos=tuple(request.stop.eos),
    )
