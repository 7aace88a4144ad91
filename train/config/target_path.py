"""A target that is named by its path alone: what it is called and in which precision it is loaded.

Owns: which command lines mean that, and the two answers. conf/target/by_path.yaml asks for them. Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from sage.dtypes import SHORT_NAMES
from train.config.overrides import key_of
from train.config.schema import Precision

CHOICE = "target=by_path"
CONFIG_FILE = "config.json"


def with_choice(words: Sequence[str]) -> list[str]:
    """A command line where `target.path` without `target=` chooses conf/target/by_path.yaml, before any other word on it.

    Without that the default's or the recipe's own target would lend its name and precision to another one.
    """
    keys = [key_of(word) for word in words]
    if "target" in keys or "target.path" not in keys:
        return list(words)
    place = keys.index("target.path")
    return [*words[:place], CHOICE, *words[place:]]


def target_name(path: str) -> str:
    """The last part of a folder or hub id."""
    return Path(os.path.abspath(Path(path).expanduser())).name


def target_dtype(path: str) -> Precision:
    """What a local folder's config.json says (`dtype`, in older files `torch_dtype`); bf16 where nothing is known."""
    try:
        said = json.loads((Path(path).expanduser() / CONFIG_FILE).read_text(encoding="utf-8"))
        found = said.get("dtype") or said.get("torch_dtype")
    except (OSError, ValueError, AttributeError):  # no such file, or none that can be read: loading it will say why
        return Precision.bf16
    return Precision.fp32 if SHORT_NAMES.get(str(found)) == Precision.fp32 else Precision.bf16
