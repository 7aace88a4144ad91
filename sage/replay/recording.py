"""Recording of a decode: the draft's candidates at every expanded node, and the answer.

Shapes: F frontier nodes, K candidates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sage.decoding.generation import start
from sage.drafts.draft import Candidates, Draft, DraftSession
from sage.planning.base import Policy
from sage.runtime.host_tensors import Tokens
from sage.runtime.packing import Pass
from sage.targets import Features, Prompt, Target
from sage.trees import policy as new_policy

TokenPath = tuple[int, ...]  # tokens from below the root to a node
NodeCandidates = tuple[Tensor, Tensor]  # probabilities and target tokens, [K] each, in descending order of probability

WIDE: Mapping[str, Any] = {"total": 64, "depth": 12, "top_k": 10}  # options of `eagle2`, the default policy of a recording


@dataclass
class RecordedRound:
    """The draft's candidates in one round, below every expanded node, by the path to it.

    `position`: number of answer tokens before the round; the last of them is the root.
    """

    position: int
    candidates: dict[TokenPath, NodeCandidates]


@dataclass
class Recording:
    """One decode: length of its prompt, length limit, size of the target's vocabulary, answer, rounds, EOS tokens, whether the
    candidates are scored with the noise of the target's draws, and `DraftSession.max_depth`.
    """

    prompt_tokens: int
    max_new_tokens: int
    vocabulary: int
    tokens: list[int]
    rounds: list[RecordedRound]
    eos: tuple[int, ...] = ()
    is_coupled: bool = False
    max_depth: int | None = None


class Recorder(DraftSession):
    """A draft session that records `num_candidates` candidates per node of another one, with the scores that policies see."""

    def __init__(self, session: DraftSession, num_candidates: int) -> None:
        self.session, self.num_candidates = session, num_candidates
        self.levels, self.token_map, self.max_depth = session.levels, session.token_map, session.max_depth
        self.rounds: list[dict[TokenPath, NodeCandidates]] = []
        self._frontier: list[TokenPath] = []

    @property
    def context(self) -> int:
        return self.session.context

    def prefill(self, prompt: Prompt, features: Features, root: Tensor) -> Tensor:
        self._start()
        return self.session.prefill(prompt, features, root)

    def commit_pass(self, features: Features, tokens: Tokens) -> Pass | Tensor:
        self._start()
        return self.session.commit_pass(features, tokens)

    def expand_pass(self, rows: Tensor, tokens: Tokens) -> Pass | Tensor:
        self._frontier = [(*self._frontier[row], token) for row, token in zip(rows.tolist(), map(int, tokens), strict=True)]
        return self.session.expand_pass(rows, tokens)

    def propose(self, scores: Tensor, num_candidates: int) -> Candidates:
        probs, tokens = self.session.propose(scores, max(self.num_candidates, num_candidates))
        for path, row in zip(self._frontier, zip(probs.cpu(), tokens.cpu(), strict=True), strict=True):
            self.rounds[-1][path] = row
        return Candidates(probs[:, :num_candidates], tokens[:, :num_candidates])

    def _start(self) -> None:
        self.rounds.append({})
        self._frontier = [()]


def record(
    target: Target, draft: Draft, inputs: Any, policy: str | Policy | None = None, num_candidates: int = 16, **options: Any
) -> Recording:
    """Decodes one prompt and records the draft's candidates; arguments as for `sage.generate`.

    Args:
        policy: a policy with wide trees that drafts in every round; default `eagle2` with the options `WIDE`.
        num_candidates: candidates to record per node; at least `num_candidates` of every policy to replay.
    """
    generation = start(target, draft, inputs, policy=new_policy("eagle2", **WIDE) if policy is None else policy, **options)
    assert generation.request.session is not None, "start refuses a policy that drafts without a draft"
    request = generation.request
    recorder = request.session = Recorder(generation.request.session, num_candidates)
    positions = [len(generation.tokens) for _ in generation.rounds()]  # after the prefill and after each round
    rounds = recorder.rounds[: len(positions) - 1]  # an answer of one token has candidates, but no round
    return Recording(
        prompt_tokens=request.prompt.input_ids.shape[1],
        max_new_tokens=request.stop.max_new_tokens,
        vocabulary=generation.target.vocab_size,
        tokens=list(generation.tokens),
        rounds=[RecordedRound(position, candidates) for position, candidates in zip(positions[:-1], rounds, strict=True)],
        eos=tuple(request.stop.eos),
        is_coupled=request.verifier.sampler.is_coupled,
        max_depth=recorder.max_depth,
    )
