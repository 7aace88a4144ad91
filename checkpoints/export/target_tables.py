"""The embedding and the lm_head of a target, read from its files without loading it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from checkpoints.export.configs import EMBEDDING, LM_HEAD, TargetFacts
from checkpoints.export.folder import Weights


def read_target_embedding(facts: TargetFacts) -> Tensor:
    """Reads the token embedding [V, D] from the target's folder or from the hub's cache, without any download.

    Raises:
        ValueError: the target's files are not available, or do not contain exactly one such tensor.
    """
    return _read_table(facts, (EMBEDDING,))


def read_target_lm_head(facts: TargetFacts) -> Tensor:
    """Reads the lm_head [V, D] as `read_target_embedding` does; the embedding, where the target's folder has no lm_head."""
    return _read_table(facts, (LM_HEAD, EMBEDDING))


def _read_table(facts: TargetFacts, suffixes: Sequence[str]) -> Tensor:
    """Reads the tensor [V, D] whose name ends with the first suffix that occurs."""
    folder = _local_folder(facts.name or "")
    weights = Weights(folder)
    shape = (facts.vocab_size, facts.hidden_size)
    tables = [name for name, info in weights.infos.items() if info.shape == shape]
    names = next((found for one in suffixes if (found := [name for name in tables if name.endswith(one)])), [])
    if len(names) != 1:
        raise ValueError(
            f"embedding: {folder} has {len(names)} tensors named *{suffixes[-1]} of shape {list(shape)}, expected one; "
            f"give --target DIR, or --no-embedding"
        )
    return weights[names[0]]


def _local_folder(name: str) -> Path:
    if name and Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"embedding: the target {name or '(unknown)'} is neither a local folder nor in the hub's cache; give --target DIR, "
            f"or --no-embedding (engines take the embedding from the target)"
        ) from error
