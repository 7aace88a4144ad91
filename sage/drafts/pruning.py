"""Pruning of the visual tokens that a draft reads. The target reads all of them, so the output does not change.

Ref: SpecVLM of Ji et al., arXiv 2508.16201, section 3.2 (two stages, attention-guided then uniform), as used by SAGE.
Differs by: the attention is recorded in the target's prefill instead of a second pass over the text; both are the same,
because attention is causal.

Imports torch when a prompt is pruned, so that a command line can check the settings.

Shapes: T prompt tokens, P visual tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

from sage.io.ranges import Range, check_fields, choose

if TYPE_CHECKING:
    from torch import Tensor

    from sage.targets import Features, Prompt

STAGE_ONE_MASS = 0.4


class PruneMethod(StrEnum):
    """Selection of the visual tokens to keep."""

    ATTENTION = "attention"
    UNIFORM = "uniform"
    RANDOM = "random"


@dataclass(frozen=True)
class Pruning:
    """Settings of visual token pruning.

    Attributes:
        ratio: share of visual tokens dropped, in [0, 1]; the papers drop 0.9 of a video and 0.8 of an image.
        method: one of `PruneMethod`.
        seed: seed of the method `random`.
    """

    ratio: Annotated[float, Range(ge=0, le=1, remedy="0 keeps all visual tokens, 1 drops all")] = 0.0
    method: str = PruneMethod.ATTENTION
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "pruning.")
        choose("pruning.method", self.method, PruneMethod)

    @property
    def needs_attention(self) -> bool:
        """Whether the target's prefill has to record attention."""
        return self.ratio > 0 and self.method == PruneMethod.ATTENTION

    def __call__(self, prompt: Prompt, features: Features) -> Prompt:
        """Returns a prompt of batch 1 with `kept` set to the text and the selected visual tokens; `features` of the target's
        prefill, with `attention` if `needs_attention`.
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
            return uniform_indices(count, budget)
        if self.method == PruneMethod.RANDOM:
            import torch

            return torch.randperm(count, generator=torch.Generator().manual_seed(self.seed))[:budget]
        assert attention is not None, "the prefill was run without wants_attention"
        return two_stage_indices(attention, budget)


KEEP_ALL = Pruning()


def two_stage_indices(score_P: Tensor, budget: int) -> Tensor:
    """Returns indices [budget]: the smallest top set with 40% of the mass (at most the budget), then uniform picks of the rest.

    Ref: arXiv 2508.16201, section 3.2.
    """
    import torch

    order = score_P.sort(descending=True)
    mass = order.values.cumsum(0) / order.values.sum()
    first = min(int((mass < STAGE_ONE_MASS).sum()) + 1, budget)
    rest = order.indices[first:].sort().values
    return torch.cat((order.indices[:first], rest[uniform_indices(len(rest), budget - first).to(rest.device)]))


def uniform_indices(count: int, budget: int) -> Tensor:
    """Returns `budget` evenly spaced indices of `count`. For 5 of 10: 1 3 5 7 9."""
    import torch

    steps = torch.arange(budget, dtype=torch.float64)
    return ((steps + 0.5) * count / max(budget, 1)).long()
