"""Lossless acceptance. The target decides every token, the tree only how many of its decisions one pass yields.

At each node the target's next token x is its argmax or a seeded draw. If x is a child of the node, the walk descends to it;
else x is the bonus token and the round ends. The tokens emitted are the target's own draws for every tree, also for one that
depends on the noise of the draws (`sage.decoding.sampling`), so their distribution is the target's.

Ref: sampling a tree from the target only, SpecInfer, arXiv 2305.09781, section 4.3 (naive sampling, exact for any tree).

Shapes: N tree nodes, P accepted path, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from sage.decoding.sampling import TargetSampler
from sage.planning.tree import Tree
from sage.runtime.host_tensors import CPU, Tokens, cached_index, read_together

Labels = Callable[[int], list[list[float]]]


@dataclass
class Verdict:
    """Result of verifying one tree.

    Attributes:
        path: accepted nodes [P], the root first.
        tokens: emitted tokens [P]: those of the path without the root's, then the bonus token.
        draft_tokens: the same for the draft to read, on a device other than the CPU as a tensor.
        labels: returns the acceptance labels of the `k` most probable candidates of every expanded node, given `k`. Greedy
            and coupled decoding: 1 for the target's token, else 0; a tree that does not know the noise: the candidate's target
            probability. Empty if not requested.
    """

    path: list[int]
    tokens: list[int]
    draft_tokens: Tokens = ()
    labels: Labels = field(default=lambda k: [])

    @classmethod
    def of_tokens(cls, tree: Tree, next_tokens: Sequence[int]) -> Verdict:
        """Verdict for given target tokens [N] after each node, with labels of 1 and 0."""
        path, tokens = accept(tree, next_tokens)
        return cls(path, tokens, tokens, partial(_matches, tree, next_tokens))


@dataclass
class Verifier:
    """Verifies the trees of one request, with its sampler of the target's tokens."""

    sampler: TargetSampler

    def verify(self, logits: Tensor, tree: Tree, needs_labels: bool = False, greedy_N: Tensor | None = None) -> Verdict:
        """Samples the target's token after every node and follows them from the root. Synchronizes with the device once.

        Args:
            logits: [N, V], of the target; ValueError if NaN.
            tree: N nodes; its root is the last token of the sampler's history.
            needs_labels: whether to return labels.
            greedy_N: `greedy_tokens(logits)`, if computed already.
        """
        token_N = self.sampler(logits, tree, greedy_N)
        has_matches = self.sampler.is_greedy or self.sampler.is_coupled
        probs_EK = self.sampler.candidate_probs(tree) if needs_labels and not has_matches else None
        next_tokens, probs = read_together(token_N, probs_EK)
        next_tokens = next_tokens.tolist()
        self.sampler.refuse_nan(next_tokens)
        path, tokens = accept(tree, next_tokens)
        verdict = Verdict(path, tokens, tokens)
        if token_N.device != CPU:
            verdict.draft_tokens = token_N.index_select(0, cached_index(tuple(path), token_N.device))
        if needs_labels:
            verdict.labels = partial(_matches, tree, next_tokens) if probs is None else lambda k: probs[:, :k].tolist()
        return verdict


def accept(tree: Tree, next_tokens: Sequence[int]) -> tuple[list[int], list[int]]:
    """Walks from the root along the target's next token after each node, [N]; returns `Verdict.path` and `Verdict.tokens`.
    Siblings in `tree` have distinct tokens.
    """
    tokens, parents, _ = tree.columns
    last, next_token = 0, next_tokens[0]
    path, emitted = [last], [next_token]
    for node, parent in enumerate(parents):  # parents precede their children, so one pass over the nodes suffices
        if parent == last and tokens[node] == next_token:
            last, next_token = node, next_tokens[node]
            path.append(last)
            emitted.append(next_token)
    return path, emitted


def _matches(tree: Tree, next_tokens: Sequence[int], k: int) -> list[list[float]]:
    """For each expanded node and its first k candidates: 1 where the candidate is the target's token, else 0."""
    pairs = zip(tree.draft_topk, next_tokens, strict=True)
    return [[float(token == target) for token in topk[1][:k]] for topk, target in pairs if topk is not None]
