"""The target's token embedding, read from its own files: one tensor, not the whole model."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from checkpoints.export.facts import TargetFacts
from checkpoints.export.folder import Weights

ENDING = "embed_tokens.weight"


def target_embedding(facts: TargetFacts) -> Tensor:
    """[V, D], as stored in the target's folder or in the hub's cache; nothing is downloaded.

    Raises:
        ValueError: the target's files are not at hand, or have no such tensor.
    """
    folder = _folder(facts.name or "")
    weights = Weights(folder)
    shape = (facts.vocab_size, facts.hidden_size)
    names = [name for name, info in weights.infos.items() if name.endswith(ENDING) and info.shape == shape]
    if len(names) != 1:
        raise ValueError(f"embedding: {folder} has {len(names)} tensors called *{ENDING} of shape {list(shape)}, expected one")
    return weights[names[0]]


def _folder(name: str) -> Path:
    if name and Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"embedding: the target {name or '(unknown)'} is neither a folder here nor in the hub's cache; give --target DIR, "
            f"or --no-embedding (engines take the target's own)"
        ) from error
