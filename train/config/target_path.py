"""Name, precision and learning rate of a target given by its path alone (conf/target/by_path.yaml). Imports no torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from sage.io.dtypes import SHORT_NAMES
from train.config.schema import Precision

CONFIG_FILE = "config.json"


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
