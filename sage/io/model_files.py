"""Reads config.json and the weights of a draft or target; a corrupt or unsuitable file is refused in one line."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import logging as transformers_logging

from sage.io.files import read_json

logger = logging.getLogger(__name__)
MAX_LISTED = 4  # tensors listed in an error
NEEDS_GPU = re.compile(r"\b(GPU|CUDA|XPU)\b.*(quanti|required|found|needed)", re.IGNORECASE)
SCALE = re.compile(r"(\.weight_scale(_inv)?|\.SCB|\.weight\.absmax)$")
ONE_BYTE = ("F8_E4M3", "F8_E5M2", "I8", "U8")
QUANTIZED = re.compile(r"(weight_(scale(_inv)?|packed|shape)|qweight|qzeros|\.SCB|absmax|quant_map)$")


def read_config(folder: str | Path) -> dict[str, Any]:
    """Reads the config.json of a draft's folder; ValueError if it is missing or does not contain a JSON object."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"draft: {folder}: no draft there (config.json is missing); give a run's draft/ folder")
    try:
        return read_json(path)
    except ValueError as error:
        raise ValueError(f"draft: {folder}: cannot read its config.json ({error}); save or copy it again") from error


def load_weights(model_class: Any, folder: str | Path, role: str, allow_unused: bool = False, **options: Any) -> Any:
    """Loads a model from a folder or hub id; every tensor of the model must be in its weights.

    Args:
        model_class: a class with Hugging Face's `from_pretrained`, which takes the `options`.
        role: "draft" or "target", for messages.
        allow_unused: ignore tensors that are not part of the model, with a warning.

    Raises:
        ValueError: the weights are missing, corrupt, or do not fit the config; names the folder and the first tensors.
    """
    _refuse_half_quantized(folder, role)
    try:
        with _quiet():  # transformers prints a table of mismatches, which the error below replaces
            model, info = model_class.from_pretrained(folder, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    except torch.OutOfMemoryError:
        raise
    except ImportError as error:  # of a quantized model
        raise ValueError(f"{role}: {folder}: {in_one_line(error)}; or give the model that is not quantized") from error
    except (OSError, RuntimeError, ValueError, AttributeError, SafetensorError, UnpicklingError) as error:
        remedy = "give the model that is not quantized, or a GPU" if NEEDS_GPU.search(str(error)) else "save or copy it again"
        raise ValueError(f"{role}: {folder}: its weights cannot be read ({in_one_line(error)}); {remedy}") from error
    unused = sorted(info["unexpected_keys"])
    if allow_unused and unused:
        logger.warning("%s: %s: %d of its tensors are not used: %s", role, folder, len(unused), _listed(unused))
    wrong = [f"{name} is missing" for name in info["missing_keys"]]
    wrong += [f"{name} is of a quantization that config.json does not name" for name in unused if QUANTIZED.search(name)]
    wrong += [] if allow_unused else [f"{name} is not part of the model" for name in unused]
    wrong += [f"{name} is {list(shape)}, not {list(expected)}" for name, shape, expected in info["mismatched_keys"]]
    if wrong:
        raise ValueError(
            f"{role}: {folder}: its weights do not fit its config: {_listed(sorted(wrong))}; save or copy it again"
        )
    return model


def _refuse_half_quantized(folder: str | Path, role: str) -> None:
    """Raises ValueError for quantized weights of a local folder without scales; transformers reads some as plain weights."""
    quantized, scaled = set[str](), set[str]()
    for file in Path(folder).glob("*.safetensors"):
        with suppress(OSError, SafetensorError), safe_open(file, "pt") as content:  # corrupt files are named when they are read
            names = list(content.keys())
            scaled |= {SCALE.sub("", name) for name in names if SCALE.search(name)}
            weights = [name for name in names if name.endswith(".weight")]
            quantized |= {name for name in weights if content.get_slice(name).get_dtype() in ONE_BYTE}
    if lacking := sorted(name for name in quantized if name.removesuffix(".weight") not in scaled):
        raise ValueError(f"{role}: {folder}: its weights are half quantized: no scale of {_listed(lacking)}; copy it again")


def in_one_line(error: Exception) -> str:
    """Returns an error's message in one line; for pickle errors, whose message recommends unsafe loading, a text of our own."""
    return "not a file of tensors" if isinstance(error, UnpicklingError) else " ".join(str(error).split())


def _listed(names: list[str]) -> str:
    num_more = len(names) - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {num_more} more" if num_more > 0 else "")


@contextmanager
def _quiet() -> Iterator[None]:
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
