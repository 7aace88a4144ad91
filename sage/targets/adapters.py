"""Adapters of PEFT on a target: merged into its weights, or kept beside weights that are quantized."""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError

from sage.io.model_files import in_one_line
from sage.targets.quantized import is_quantized

logger = logging.getLogger(__name__)
MISSING = "missing adapter keys"  # of PEFT's warning
ORIGIN = ("base_model_name_or_path", "revision", "inference_mode", "task_type", "peft_version", "auto_mapping")
REMEDY = "give an adapter trained for this target"


@dataclass(frozen=True)
class Adapter:
    """An adapter that a target contains.

    Attributes:
        path: folder or hub id.
        digest: of its weights and scales, part of the target's fingerprint.
    """

    path: str
    digest: str


def with_adapter(model: Any, path: str, target: str) -> tuple[Any, Adapter]:
    """Applies an adapter to a loaded model.

    Args:
        path: folder or hub id of the adapter.
        target: the model's folder or hub id, for messages.

    Raises:
        ValueError: PEFT is missing, or the adapter cannot be read, is no change of weights, or is for another model.
    """
    try:
        import peft
    except ImportError as error:
        raise ValueError(f"target.adapter: {path} needs PEFT; pip install 'sage-draft[quantized]'") from error
    where = f"target.adapter: {path}"
    try:
        config = peft.PeftConfig.from_pretrained(path)
        weights = peft.load_peft_weights(path, device="cpu")
        if config.is_prompt_learning:
            raise ValueError(f"{config.peft_type.value} adds tokens to the prompt instead of changing weights")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wrapped = peft.PeftModel.from_pretrained(model, path)
        lacks = any(MISSING in str(warning.message) for warning in caught)
        if lacks or _count(weights) != _count(peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False)):
            raise ValueError("its tensors are those of other layers")
    except (OSError, ValueError, RuntimeError, TypeError, KeyError, SafetensorError) as error:
        raise ValueError(f"{where} does not fit {target} ({in_one_line(error)[:300]}); {REMEDY}") from error
    base = str(config.base_model_name_or_path or "")
    if base.rstrip("/").rpartition("/")[2] != target.rstrip("/").rpartition("/")[2]:
        logger.warning("%s was trained for %s, the target is %s", where, base or "an unknown model", target)
    result = wrapped.get_base_model() if is_quantized(model) else wrapped.merge_and_unload()
    return result, Adapter(path, _digest(config, weights))


def _count(weights: dict[str, torch.Tensor]) -> int:
    return sum("lora_" in name for name in weights)


def _digest(config: Any, weights: dict[str, torch.Tensor]) -> str:
    settings = {key: value for key, value in config.to_dict().items() if key not in ORIGIN}
    text = json.dumps(settings, sort_keys=True, default=lambda value: sorted(value) if isinstance(value, set) else str(value))
    digest = hashlib.sha256(text.encode())
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
