"""Lossless verification: the target decides every token, the tree only how many of its decisions one pass yields.

At each node the target's next token x is its argmax, or a seeded draw from its logits after Hugging Face's processors on the
prefix of the node. If x is a child of the node, the walk descends to it; else x is the bonus token and the round ends. The
tokens emitted are the target's own draws for every tree, so their distribution is the target's. Ref: sampling a tree from the
target only, SpecInfer, arXiv 2305.09781, section 4.3 (naive sampling, exact for any tree).

A draw is argmax(log p + g) with Gumbel noise g, a function of seed, position in the answer and token (`sage.decoding.noise`);
of equal maxima the smallest token id wins. One seed therefore gives the same text under every policy and without speculation.

**Coupled drafts.** With `Sampling.couple`, the draft proposes the tokens of largest log q + g, q being its distribution under
the same warpers and g the same noise: it predicts the draw, not only the distribution. For one candidate, the draft is right
with probability at least (1 - TV) / (1 + TV), TV being the total variation of p and q, and always if q = p; its most probable
token is right only as often as the draw is that token.

The output distribution is exact by construction. A drafted token is accepted if and only if it equals the target's draw, so
every emitted token is a draw of the target, and its draws never depend on the tree; the tree may therefore depend on the noise.
This is not true of rejection sampling, which accepts with u < p / q: given that the draft proposed a token *because of g*, the
noise is no longer Gumbel, and a residual drawn with it is biased. vLLM shared noise in this way by accident and separated the
streams (vllm-project/vllm, PR 54282); its PR 47386 states that sharing preserves the distribution under accept-iff-equal only.

Ref: Daliri, Musco, Suresh, arXiv 2408.07978 (Gumbel coupling without communication, chains); lists of proposals, arXiv
2506.05632; exponential races, arXiv 2504.15475. Differs by: trees of any policy, grown from the coupled scores.

Shapes: N tree nodes, P accepted path, V vocabulary, T prompt tokens, K candidates, F frontier nodes, U draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sage.decoding.noise import PositionNoise
from sage.decoding.settings import Sampling
from sage.planning.tree import Tree
from sage.runtime.host_tensors import CPU, Tokens, cached_index, long_tensor, read_together
from sage.targets.tree_passes import NAN_TOKEN, greedy_tokens


class TargetSampler:
    """Samples the target's next tokens within one request, with its prompt, LongTensor [T], and the token ids that end the
    answer. Raises ValueError for bad words without a tokenizer.

    Attributes:
        num_new: emitted tokens; the position of the draw at the root.
        is_coupled: whether drafts propose with the noise of the draws.
    """

    def __init__(self, sampling: Sampling, prompt_ids: Tensor, eos: Sequence[int] = (), tokenizer: Any = None) -> None:
        self.is_greedy, self.seed = sampling.is_greedy, sampling.seed
        self.is_coupled = sampling.couple and not self.is_greedy
        self.num_prompt, self.num_new = len(prompt_ids), 0
        self.context = _context_processors(sampling, self.num_prompt, eos, tokenizer, prompt_ids.device)
        self.warpers = LogitsProcessorList() if self.is_greedy else _warpers(sampling)
        self._history = torch.cat((prompt_ids, prompt_ids.new_empty(sampling.max_new_tokens)))
        self._noise: PositionNoise | None = None
        self._scores = torch.empty(0)

    @property
    def past(self) -> Tensor:
        """The tokens before the root, LongTensor; complete only with logits processors that depend on them."""
        return self._history[: self.num_prompt + self.num_new - 1]

    def first(self, logits: Tensor) -> Tensor:
        """Samples the token after the prompt, LongTensor [1], from logits [1, V]."""
        return self(logits, Tree.of_root(int(self._history[self.num_prompt - 1]), logits.device))

    def __call__(self, logits: Tensor, tree: Tree, greedy_N: Tensor | None = None) -> Tensor:
        """Samples the target's next token at every node; returns LongTensor [N], `NAN_TOKEN` where a logit is NaN.

        Args:
            logits: [N, V].
            tree: N nodes; its root is the last token of prompt and answer.
            greedy_N: `greedy_tokens(logits)`, if computed already.
        """
        if self.is_greedy and not self.context:
            return greedy_tokens(logits) if greedy_N is None else greedy_N
        is_nan = logits.amax(-1).isnan()
        scores = self._in_context(logits, tree) if self.context else logits
        if self.is_greedy:
            return scores.argmax(-1).masked_fill_(is_nan, NAN_TOKEN)
        self._scores = self._warped(scores)
        if self._noise is None:
            self._noise = PositionNoise(self.seed, logits.shape[-1], logits.device)
        noise = self._noise(self.num_new, tree.depth + 1)
        return (self._scores + noise.index_select(0, tree.depths)).argmax(-1).masked_fill_(is_nan, NAN_TOKEN)

    def coupled(self, logits: Tensor, level: int, token_map: Tensor | None = None) -> Tensor:
        """Returns scores log q + g [F, U] of draft logits [F, U] for the tokens of a level; `logits` itself if not coupled,
        by which a session knows its own (`SlotSession.propose`).

        Args:
            level: depth of the proposed tokens; 1 = below the root.
            token_map: LongTensor [U], draft id -> target id, of a reduced draft vocabulary: the noise is that of target ids.
        """
        if not self.is_coupled:
            return logits
        assert self._noise is not None, "the first token is drawn before anything is drafted"
        noise = self._noise(self.num_new + level - 1, 1).to(logits.device)
        return self._warped(logits) + (noise if token_map is None else noise.index_select(1, token_map))

    def candidate_probs(self, tree: Tree) -> Tensor:
        """Returns the target's probabilities of the draft candidates below the E expanded nodes of the tree last sampled for,
        [E, K]; not for greedy decoding.
        """
        expanded = [(node, topk[1]) for node, topk in enumerate(tree.draft_topk) if topk is not None]
        if not expanded:
            return self._scores.new_empty(0, 0)
        width, device = len(expanded[0][1]), self._scores.device
        numbers = long_tensor([number for node, tokens in expanded for number in (node, *tokens)], device)
        nodes, tokens = numbers.view(-1, 1 + width).split((1, width), 1)
        return self._scores.index_select(0, nodes[:, 0]).softmax(-1).gather(1, tokens)

    def extend(self, tokens: list[int]) -> None:
        """Appends accepted tokens to prompt and answer."""
        if self.context and tokens:
            start = self.num_prompt + self.num_new
            self._history[start : start + len(tokens)] = long_tensor(tokens, self._history.device)
        self.num_new += len(tokens)

    def refuse_nan(self, next_tokens: Sequence[int]) -> None:
        """Raises ValueError if one of the sampled tokens [N] is `NAN_TOKEN`."""
        if NAN_TOKEN in next_tokens:
            after = f"pass over {len(next_tokens)} node(s) after {self.num_new} new tokens"
            which = after if self.num_new else f"prefill of {self.num_prompt} tokens"
            raise ValueError(
                f"logits: the target's {which} gave NaN; check its weights and dtype (float16 overflows: use bfloat16)"
            )

    def _in_context(self, logits: Tensor, tree: Tree) -> Tensor:
        """Applies processors to each node with its prefix; batches the nodes of one depth, whose prefixes are equally long."""
        scores, past = torch.empty_like(logits), self.past
        for nodes, paths in _paths_by_depth(tree):
            prefixes = torch.cat((past.expand(len(nodes), -1), paths), 1)
            scores.index_copy_(0, nodes, self.context(prefixes, logits.index_select(0, nodes)))
        return scores

    def _warped(self, logits: Tensor) -> Tensor:
        """Returns the logits in float32, or float64 if they are, after temperature and truncation."""
        scores: Tensor = self.warpers(None, logits if logits.dtype == torch.float64 else logits.float())
        return scores


def _paths_by_depth(tree: Tree) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the nodes [M] of each depth and the tokens from the root to them, [M, depth + 1]; no synchronization per depth."""
    depths = tree.columns.depths
    sizes = [depths.count(depth) for depth in range(max(depths) + 1)]
    nodes_of_depth = tree.depths.sort(stable=True).indices.split(sizes)
    # parents come before children, so the ancestors in increasing order are the path
    paths_NN = tree.ancestors.int().sort(descending=True, stable=True).indices
    for depth, nodes in enumerate(nodes_of_depth):
        yield nodes, tree.tokens.take(paths_NN.index_select(0, nodes)[:, : depth + 1])


def _context_processors(
    sampling: Sampling, num_prompt: int, eos: Sequence[int], tokenizer: Any, device: torch.device
) -> LogitsProcessorList:
    """Processors that depend on the prefix, in the order of Hugging Face's `generate`."""
    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.bad_words:
        if tokenizer is None:
            raise ValueError("bad_words: the target has no tokenizer to encode them with; use sage.load_target(path)")
        spellings = [prefix + word for word in sampling.bad_words for prefix in ("", " ")]
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in spellings]
        processors.append(NoBadWordsLogitsProcessor(ids, eos_token_id=list(eos)))
    if sampling.min_new_tokens and eos:
        processors.append(MinNewTokensLengthLogitsProcessor(num_prompt, sampling.min_new_tokens, list(eos), device=device))
    processors.extend(sampling.logits_processor)
    return processors


def _warpers(sampling: Sampling) -> LogitsProcessorList:
    """Processors that reshape the distribution, in the order of Hugging Face's `generate`."""
    warpers = LogitsProcessorList()
    if sampling.temperature != 1:
        warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return warpers


Logprobs = list[tuple[int, float]]  # of a token, and of the most likely ones: id, log-probability
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


def log_probabilities(logits: Tensor, rows: Sequence[int], tokens: Sequence[int], num_top: int | None) -> list[Logprobs]:
    """Returns the log-probabilities of tokens, each chosen from one of the rows of the target's logits [N, V], and of the
    `num_top` most likely ones, before any processor; an empty list for None.
    """
    if num_top is None:
        return []
    scores = logits[list(rows)[: len(tokens)]].float().log_softmax(-1)
    ids = torch.cat((long_tensor(tokens, logits.device)[:, None], scores.topk(num_top).indices), 1)
    pairs = zip(ids.tolist(), scores.gather(1, ids).tolist(), strict=True)
    return [list(zip(*pair, strict=True)) for pair in pairs]


def _matches(tree: Tree, next_tokens: Sequence[int], k: int) -> list[list[float]]:
    """For each expanded node and its first k candidates: 1 where the candidate is the target's token, else 0."""
    pairs = zip(tree.draft_topk, next_tokens, strict=True)
    return [[float(token == target) for token in topk[1][:k]] for topk, target in pairs if topk is not None]
