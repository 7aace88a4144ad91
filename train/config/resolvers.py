"""The resolvers `${NAME:...}` of the YAML files: names of runs, and what a target's folder says about it. Imports no torch."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from sage.drafts.registry import KINDS
from sage.io.dtypes import SHORT_NAMES, loaded_dtype
from sage.io.files import config_dir, package_dir, read_json, user_cache_dir
from sage.trees import POLICIES
from train.config.schema import RECIPE_LENGTH, Precision
from train.config.store import register

LONGEST_PART = 40  # characters of a part of a run's name


def register_resolvers() -> None:
    """Registers the schemas and the functions of this module; `package_dir:PACKAGE` is the folder of an installed package."""
    register(tuple(KINDS.values()), tuple(POLICIES))
    of_target = (target_name, target_dtype, lr_for_width, max_length_for)
    OmegaConf.register_new_resolver("user_cache", lambda: str(user_cache_dir()), replace=True)
    for resolve in (package_dir, run_name, *of_target, sequences_per_pass):
        OmegaConf.register_new_resolver(resolve.__name__, resolve, replace=True)


def run_name(target: str, draft: str, path: str | None, data: str, objective: str) -> str:
    """Returns `TARGET-DRAFT-DATA`, with `-OBJECTIVE` if it is not the draft's own.

    The data are named by the last part of `path` (`data.path`) without suffix, because one format has many files, else by
    `data.name`.
    """
    parts = [target, draft, Path(path).name.split(".")[0] if path else data]
    if objective not in ("", draft):
        parts.append(objective)
    return "-".join(plain_name(part)[:LONGEST_PART] for part in parts)


def plain_name(part: str) -> str:
    """Replaces characters that a shell or Hydra would interpret."""
    return re.sub(r"[^\w.]+", "_", part).strip("_.") or "data"


def target_name(path: str) -> str:
    """Returns the last part of a folder or hub id."""
    return Path(os.path.abspath(Path(path).expanduser())).name


def target_dtype(path: str) -> Precision:
    """Returns the precision for the dtype in a local folder's config.json (`dtype`, in older files `torch_dtype`)."""
    config = _read_config(path)
    return Precision(SHORT_NAMES[loaded_dtype(config.get("dtype") or config.get("torch_dtype"))])


def lr_for_width(path: str, lr: float, width: int) -> float:
    """Returns the learning rate for a local folder's hidden size from `lr`, that at `width`, which is kept if it is unknown.

    Ref: Tensor Programs V, arXiv 2203.03466, table 3: Adam's rate of hidden weights scales with 1 / width.
    """
    config = _read_config(path)
    text = config.get("text_config")
    size = text.get("hidden_size") if isinstance(text, dict) else config.get("hidden_size")
    return float(f"{lr * width / size:.2g}") if isinstance(size, int) and size > 0 else lr


def max_length_for(path: str, default: int) -> int:
    """Returns `recipe.max_length` of a shipped target with the `model_type` of a local folder; `default` if there is none."""
    line = f"\n  model_type: {_read_config(path).get('model_type')}\n"
    texts = (file.read_text(encoding="utf-8") for file in sorted((config_dir() / "target").glob("*.yaml")))
    shipped = next((text for text in texts if line in text), "{}")
    return int(OmegaConf.select(OmegaConf.create(shipped), "recipe.max_length") or default)


def sequences_per_pass(most: int, max_length: int | None) -> int:
    """Returns the default of `train.micro_batch_size`: `most` sequences of 4096 tokens; of longer ones half, a quarter, .."""
    limit = most * RECIPE_LENGTH
    while most > 1 and most * (max_length or 0) > limit:
        most //= 2
    return most


def _read_config(path: str) -> dict[str, Any]:
    """The folder's config.json; empty if it is missing or unreadable, which loading the target reports."""
    try:
        return read_json(Path(path).expanduser() / "config.json")
    except ValueError:
        return {}
