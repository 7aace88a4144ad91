"""The resolvers `${NAME:...}` of the YAML files: names of runs, and what a target's folder says about it. Imports no torch."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from sage.io.dtypes import SHORT_NAMES, loaded_dtype
from sage.io.files import config_dir, package_dir, read_json, user_cache_dir
from train.config.schema import RECIPE_LENGTH, Precision
from train.config.store import register

CONFIG_FILE = "config.json"
LONGEST_PART = 40  # characters of a part of a run's name


def register_resolvers() -> None:
    """Registers the schemas and the functions of this module; `package_dir:PACKAGE` is the folder of an installed package."""
    register()
    of_target = (target_name, target_dtype, lr_for_width, max_length_for)
    for resolve in (package_dir, user_cache, run_name, *of_target, sequences_per_pass):
        OmegaConf.register_new_resolver(resolve.__name__, resolve, replace=True)


def user_cache() -> str:
    """Returns the folder of `sage.io.files.user_cache_dir`."""
    return str(user_cache_dir())


def run_name(target: str, draft: str, path: str | None, data: str, objective: str) -> str:
    """Returns `TARGET-DRAFT-DATA`, with `-OBJECTIVE` if it is not the draft's own.

    Args:
        path: `data.path`; names the data by its last part without suffix, because one format has many files.
        data: `data.name`, for data without a path.
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
    found = config.get("dtype") or config.get("torch_dtype")
    return Precision(SHORT_NAMES[loaded_dtype(found)])


def lr_for_width(path: str, lr: float, width: int) -> float:
    """Returns the learning rate for a local folder's hidden size, inversely proportional to it; `lr` if it is unknown.

    `lr` is the rate at a hidden size of `width`.

    Ref: Tensor Programs V, arXiv 2203.03466, table 3: Adam's rate of hidden weights scales with 1 / width.
    """
    config = _read_config(path)
    text = config.get("text_config")
    found = text.get("hidden_size") if isinstance(text, dict) else config.get("hidden_size")
    if not isinstance(found, int) or found < 1:
        return lr
    return float(f"{lr * width / found:.2g}")


def max_length_for(path: str, default: int) -> int:
    """Returns `recipe.max_length` of a shipped target with the `model_type` of a local folder; `default` if there is none."""
    line = f"\n  model_type: {_read_config(path).get('model_type')}\n"
    texts = (file.read_text(encoding="utf-8") for file in sorted((config_dir() / "target").glob("*.yaml")))
    found = next((text for text in texts if line in text), "{}")
    return int(OmegaConf.select(OmegaConf.create(found), "recipe.max_length") or default)


def sequences_per_pass(most: int, max_length: int | None) -> int:
    """Returns the default of `train.micro_batch_size`: `most` sequences of 4096 tokens; of longer ones half, a quarter, .."""
    limit = most * RECIPE_LENGTH
    while most > 1 and most * (max_length or 0) > limit:
        most //= 2
    return most


def _read_config(path: str) -> dict[str, Any]:
    """The folder's config.json; empty if it is missing or unreadable, which loading the target reports."""
    try:
        return read_json(Path(path).expanduser() / CONFIG_FILE)
    except ValueError:
        return {}
