"""The target's token embedding, read from its own files: one tensor, not the whole model."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from checkpoints.export.facts import TargetFacts
from checkpoints.export.folder import Weights

ENDING = "embed_tokens.weight"


def target_embedding(facts: TargetFacts) -> Tensor:
    """[V, D], as stored.

    Raises:
        ValueError: the target is not a local folder with safetensors, or has no such tensor.
    """
    folder = Path(facts.name or "")
    if not facts.name or not folder.is_dir():
        raise ValueError(
            f"embedding: the target {facts.name} is no local folder; give --target DIR, or --no-embedding (engines take the "
            f"target's own)"
        )
    weights = Weights(folder)
    shape = (facts.vocab_size, facts.hidden_size)
    names = [name for name, info in weights.infos.items() if name.endswith(ENDING) and info.shape == shape]
    if len(names) != 1:
        raise ValueError(f"embedding: {folder} has {len(names)} tensors called *{ENDING} of shape {list(shape)}, expected one")
    return weights[names[0]]
