"""Which visual tokens a draft reads. The target always sees every one of them, so the output is untouched.

Ref: SpecVLM of Ji et al., arXiv 2508.16201, section 3.2 (two stages, attention-guided then uniform), as SAGE uses it.
Differs by: the attention is read off the target's one prefill instead of a second pass over the text; causality makes
both the same.

Shapes: T prompt tokens, P visual tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from sage.targets import Features, Prompt

STAGE_ONE_MASS = 0.4


class PruneMethod(StrEnum):
    """How the visual tokens to keep are chosen."""

    ATTENTION = "attention"
    UNIFORM = "uniform"
    RANDOM = "random"


@dataclass(frozen=True)
class Pruning:
    """How much of the picture a draft reads.

    Attributes:
        ratio: share of visual tokens dropped, in [0, 1]; the papers drop .9 of a video and .8 of a picture.
        method: one of `PruneMethod`.
        seed: of the method `random`.
    """

    ratio: float = 0.0
    method: str = PruneMethod.ATTENTION
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"pruning.ratio: {self.ratio} is not allowed; give a share between 0 (keep all) and 1 (drop all)")
        if self.method not in tuple(PruneMethod):
            raise ValueError(f"pruning.method: {self.method!r} is unknown; choose one of {', '.join(PruneMethod)}")

    @property
    def needs_attention(self) -> bool:
        """Whether the target's prefill has to report attention."""
        return self.ratio > 0 and self.method == PruneMethod.ATTENTION

    def __call__(self, prompt: Prompt, features: Features) -> Prompt:
        """The prompt with `kept` set: text, and the chosen visual tokens.

        Args:
            prompt: batch 1.
            features: of the target's prefill, with `attention` where `needs_attention`.
        """
        visual = prompt.visual_mask[0].nonzero()[:, 0]
        if self.ratio == 0 or len(visual) == 0:
            return prompt
        budget = int(len(visual) * (1 - self.ratio))
        kept = ~prompt.visual_mask[0]
        kept[visual[self._choose(len(visual), budget, features.attention)]] = True
        return replace(prompt, kept=kept.nonzero()[:, 0])

    def _choose(self, count: int, budget: int, attention: Tensor | None) -> Tensor:
        if self.method == PruneMethod.UNIFORM:
            return spread(count, budget)
        if self.method == PruneMethod.RANDOM:
            return torch.randperm(count, generator=torch.Generator().manual_seed(self.seed))[:budget]
        assert attention is not None, "the target's prefill was not asked for attention"
        return two_stages(attention, budget)


KEEP_ALL = Pruning()


def two_stages(score_P: Tensor, budget: int) -> Tensor:
    """Indices [budget]: the smallest top set that holds 40% of the mass, at most the budget; then uniform picks of the rest.

    Ref: arXiv 2508.16201, section 3.2.
    """
    order = score_P.sort(descending=True)
    mass = order.values.cumsum(0) / order.values.sum()
    first = min(int((mass < STAGE_ONE_MASS).sum()) + 1, budget)
    rest = order.indices[first:].sort().values
    return torch.cat((order.indices[:first], rest[spread(len(rest), budget - first).to(rest.device)]))


def spread(count: int, budget: int) -> Tensor:
    """`budget` indices spread evenly over `count`. For 5 of 10: 1 3 5 7 9."""
    steps = torch.arange(budget, dtype=torch.float64)
    return ((steps + 0.5) * count / max(budget, 1)).long()
