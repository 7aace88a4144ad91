"""Lossless acceptance: the target alone decides every token; the tree only decides which of its decisions come for free.

At each node the target chooses the next token x (its argmax, or a seeded draw). If x is a child the path descends, else x is
the bonus token and the round ends. The law of the output is the target's for any tree that does not depend on the draws.

A draw is argmax(log p + g) with Gumbel noise g keyed by (seed, position in the answer), so one seed gives one text under
every policy and without speculation. Ref: the Gumbel-max trick; sampling a tree from the target only, SpecInfer,
arXiv 2305.09781, section 4.3 (naive sampling, exact for any tree).

Shapes: N tree nodes, V vocabulary, P accepted path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sage.trees.tree import Tree


@dataclass
class Sampling:
    """How the target chooses a token.

    Attributes:
        temperature: 0 = greedy.
        top_k: keep the k most likely tokens; 0 = all.
        top_p: keep the smallest set with at least this probability; 1 = all.
        seed: of the noise.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, is_valid, allowed in (
            ("temperature", self.temperature, self.temperature >= 0, ">= 0"),
            ("top_k", self.top_k, self.top_k >= 0, ">= 0 (0 = all)"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]"),
        ):
            if not is_valid:
                raise ValueError(f"{name}: {value} is not allowed; it must be {allowed}")

    def choose(self, logits: Tensor, positions: Tensor) -> Tensor:
        """The target's next token at every node.

        Args:
            logits: [N, V].
            positions: LongTensor [N], the position in the answer of the token to choose; the noise's key.

        Returns:
            LongTensor [N].

        Raises:
            ValueError: a NaN among the logits.
        """
        if bool(logits.isnan().any()):
            raise ValueError(
                "logits: the target's pass gave NaN; check its weights and dtype (float16 overflows: use bfloat16)"
            )
        if self.temperature == 0:
            return logits.argmax(-1)
        log_p = processed_log_probs(logits, self.temperature, self.top_k, self.top_p)
        return (log_p + self._noise(positions, logits.shape[-1]).to(log_p.device)).argmax(-1)

    def labels(self, logits: Tensor, chosen: Tensor, tokens: Tensor) -> Tensor:
        """The target's verdict on candidates, for policies that learn.

        Args:
            logits: [M, V] at M nodes.
            chosen: LongTensor [M], the target's choices there.
            tokens: LongTensor [M, K], candidates below each.

        Returns:
            [M, K]: greedy 1 where the candidate is the choice; sampling its target probability, which a draw only estimates.
        """
        if self.temperature == 0:
            return (tokens == chosen[:, None]).float()
        return processed_log_probs(logits, self.temperature, self.top_k, self.top_p).gather(1, tokens).exp().float()

    def _noise(self, positions: Tensor, vocabulary: int) -> Tensor:
        """Gumbel noise [N, V] float64, equal wherever the position is equal."""
        keys, row = positions.unique(return_inverse=True)
        noise = [gumbel(self.seed, key, vocabulary) for key in keys.tolist()]
        return torch.stack(noise)[row.cpu()]


def processed_log_probs(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Temperature, top-k, top-p in that order, as Hugging Face applies them; log p [N, V] in float64."""
    log_p = torch.log_softmax(logits.double() / temperature, -1)
    if 0 < top_k < log_p.shape[-1]:
        least = log_p.topk(top_k, -1).values[:, -1:]
        log_p = log_p.masked_fill(log_p < least, -torch.inf)
    if top_p < 1:
        order = log_p.sort(-1, descending=True)
        p = order.values.softmax(-1)
        is_out = p.cumsum(-1) - p >= top_p
        log_p = log_p.masked_fill(is_out.scatter(-1, order.indices, is_out), -torch.inf)
    return torch.log_softmax(log_p, -1)


def gumbel(seed: int, position: int, vocabulary: int) -> Tensor:
    """Gumbel(0, 1) noise [V] float64, a function of (seed, position) alone; drawn on the CPU so devices agree."""
    generator = torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03) % 2**63)
    uniform = torch.rand(vocabulary, generator=generator, dtype=torch.float64)
    return -torch.log(-torch.log(uniform.clamp(min=torch.finfo(torch.float64).tiny)))


Chooser = Callable[[Tensor, Tensor], Tensor]


def accept(tree: Tree, chosen: Tensor) -> tuple[list[int], list[int]]:
    """Walks down from the root along the target's choices.

    Args:
        tree: N nodes; no two children of a node share a token.
        chosen: LongTensor [N], the target's next token after each node.

    Returns:
        the accepted nodes [P], the root first, and the emitted tokens [P]: theirs without the root's, then the bonus token.
    """
    tokens, parents, choices = torch.stack((tree.tokens, tree.parents, chosen)).tolist()
    child = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    path, emitted = [0], [choices[0]]
    while (node := child.get((path[-1], emitted[-1]))) is not None:
        path.append(node)
        emitted.append(choices[node])
    return path, emitted
