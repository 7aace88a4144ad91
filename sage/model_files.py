"""What the folder of a draft or a target holds: its config.json and its weights. A damaged one is refused by name, in one line.

Owns: reading. Does not own: what is then made of it (sage.drafts, sage.targets).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

logger = logging.getLogger(__name__)
SHOWN = 4  # tensors that an error lists


def read_config(folder: str | Path) -> dict[str, Any]:
    """The config.json of a draft's folder.

    Raises:
        ValueError: there is none, or no JSON object in it; names the folder and the file.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"draft: {folder}: no draft there (config.json is missing); give a run's draft/ folder")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"draft: {folder}: cannot read its config.json ({reason(error)}); save or copy it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"draft: {folder}: its config.json holds no JSON object; save or copy it again")
    return content


def load_weights(kind: Any, folder: str | Path, role: str, may_have_more: bool = False, **options: Any) -> Any:
    """A model with the weights of a folder or hub id, every one of its tensors among them.

    Args:
        kind: a class with Hugging Face's `from_pretrained`.
        role: "draft" or "target", for messages.
        may_have_more: whether tensors that the model has no place for are left aside, with a warning.
        options: of `from_pretrained`.

    Raises:
        ValueError: the weights are missing, damaged, or do not fit the config; names the folder and the first tensors.
    """
    try:
        with _quiet():  # a table of what does not fit, which the error says in one line
            model, found = kind.from_pretrained(folder, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    except torch.OutOfMemoryError:
        raise
    except (OSError, RuntimeError, ValueError, SafetensorError, UnpicklingError) as error:
        raise ValueError(f"{role}: {folder}: its weights cannot be read ({reason(error)}); save or copy it again") from error
    spare = sorted(found["unexpected_keys"])
    if may_have_more and spare:
        logger.warning("%s: %s: %d of its tensors are not used: %s", role, folder, len(spare), _listed(spare))
    wrong = sorted(_misfits(found, [] if may_have_more else spare))
    if wrong:
        raise ValueError(f"{role}: {folder}: its weights do not fit its config: {_listed(wrong)}; save or copy it again")
    return model


def reason(error: Exception) -> str:
    """What an error says, in one line; of pickle's own, which advise to run a stranger's code, nothing."""
    return "not a file of tensors" if isinstance(error, UnpicklingError) else " ".join(str(error).split())


def _misfits(found: dict[str, Any], spare: list[str]) -> Iterator[str]:
    yield from (f"{name} is missing" for name in found["missing_keys"])
    yield from (f"{name} has no place" for name in spare)
    yield from (f"{name} is {list(has)}, not {list(wants)}" for name, has, wants in found["mismatched_keys"])


def _listed(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


@contextmanager
def _quiet() -> Iterator[None]:
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
