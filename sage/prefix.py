"""Reuse of a conversation's cached tokens in its next turn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sage.cache import TreeCache
from sage.targets import Features, Prompt


@dataclass
class CachedPrefix:
    """Tokens of a conversation that the target has in its cache.

    Attributes:
        ids: LongTensor [S], the cached tokens.
        cache: the target's, S tokens long.
        features: of those tokens.
        prompt: the turn's prompt.
    """

    ids: Tensor
    cache: TreeCache
    features: Features
    prompt: Prompt

    def reuse(self, prompt: Prompt, capacity: int) -> tuple[TreeCache, list[Features]]:
        """Crops the cache to the common prefix with `prompt` and grows it to `capacity` tokens; returns it with its features.

        The last token of `prompt` is never part of the prefix, so at least one token is prefilled. Images are shared only if no
        new one was added: their embeddings, and in LLaVA-OneVision their number of tokens, can depend on the other images.
        """
        shared = _common_prefix(self.ids, prompt.input_ids[0, :-1])
        if prompt.visual is not self.prompt.visual:
            visual = prompt.visual_mask[0].nonzero()[:, 0]
            shared = min(shared, int(visual[0])) if len(visual) else shared
        self.cache.crop_to(shared)
        self.cache.grow_to(capacity)
        kept = torch.arange(shared, device=self.ids.device)
        return self.cache, [self.features.at(kept)] if shared else []


def _common_prefix(first: Tensor, second: Tensor) -> int:
    length = min(len(first), len(second))
    differs = (first[:length] != second[:length]).nonzero()
    return int(differs[0]) if len(differs) else length
