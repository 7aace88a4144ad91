"""Name, precision and learning rate of a target given by its path alone (conf/target/by_path.yaml). Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sage.io.dtypes import SHORT_NAMES
from sage.io.target_paths import path_of_target
from train.config.overrides import key_of
from train.config.schema import Precision

CHOICE = "target=by_path"
CONFIG_FILE = "config.json"


def with_choice(overrides: Sequence[str]) -> list[str]:
    """Inserts the choice of conf/target/by_path.yaml before a `target.path` without `target=`; a name becomes `target=NAME`.

    Otherwise the target would have the name and precision of the default target or of the experiment's.
    """
    keys = [key_of(override) for override in overrides]
    if "target" in keys or "target.path" not in keys:
        return list(overrides)
    place = keys.index("target.path")
    path = overrides[place].partition("=")[2]
    if path_of_target(path) != path:
        return [*overrides[:place], f"target={path}", *overrides[place + 1 :]]
    return [*overrides[:place], CHOICE, *overrides[place:]]


def target_name(path: str) -> str:
    """Returns the last part of a folder or hub id."""
    return Path(os.path.abspath(Path(path).expanduser())).name


def target_dtype(path: str) -> Precision:
    """Returns the precision in a local folder's config.json (`dtype`, in older files `torch_dtype`); bf16 if unknown."""
    config = _read_config(path)
    found = config.get("dtype") or config.get("torch_dtype")
    return Precision.fp32 if SHORT_NAMES.get(str(found)) == Precision.fp32 else Precision.bf16


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


def _read_config(path: str) -> dict[str, Any]:
    """The folder's config.json; empty if it is missing or unreadable, which loading the target reports."""
    try:
        config = json.loads((Path(path).expanduser() / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
