"""A draft close to its random target, many of whose tokens are accepted."""

from __future__ import annotations

import copy

import torch

import sage
from sage.drafts.model import ModelDraft


def near_draft(target: sage.Target, noise: float = 0.01) -> ModelDraft:
    """Returns a copy of the target with normal noise of this size in the weights of its text layers."""
    model = copy.deepcopy(target.model)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.model.language_model.parameters():
        parameter.data += noise * torch.randn(parameter.shape, generator=generator)
    return ModelDraft(sage.Target(model), target)
