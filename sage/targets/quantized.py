"""Targets with quantized layers: what their configuration says, what is refused or said, and dense copies of their tables.

transformers loads them through the library of the method; the layers here are whatever it made of them.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)
CHUNK = 1024  # columns of a table that are read at once


def quantization_of(config: Any) -> str | None:
    """Returns the quantization that a model's configuration names, such as `torchao` or `bitsandbytes 4-bit`; None without."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    settings: dict[str, Any] = found if isinstance(found, dict) else found.to_dict()
    bits = 4 if settings.get("load_in_4bit") else 8 if settings.get("load_in_8bit") else settings.get("bits")
    method = getattr(settings.get("quant_method"), "value", settings.get("quant_method")) or "bitsandbytes"
    detail = f"{bits}-bit" if bits else settings.get("format") or ""
    return f"{method} {detail}".strip()


def is_quantized(module: nn.Module) -> bool:
    """Whether a module has weights that are no plain floating-point tensors, or linear layers of a library's own."""
    plain = (Tensor, nn.Parameter)
    for part in module.modules():
        if "quantization_scheme" in vars(part) or "weight_packed" in part._parameters:
            return True
        if not all(type(p) in plain and p.is_floating_point() and p.itemsize > 1 for p in part.parameters(recurse=False)):
            return True
    return False


@torch.no_grad()
def dense_weight(module: nn.Module, dtype: torch.dtype) -> Tensor:
    """Returns the weight [V, D] of an lm_head without bias, dequantized to `dtype` by the layer itself where it is quantized.

    The columns of a quantized weight are the layer's outputs for the rows of an identity matrix, whatever its format.
    """
    if not is_quantized(module):
        return module.weight
    device = next(t.device for t in (*module.parameters(), *module.buffers()))
    rows = torch.eye(module.in_features, dtype=dtype, device=device)
    return torch.cat([module(part).T for part in rows.split(CHUNK)], 1)


def renamed_ignore(config: Any) -> dict[str, Any]:
    """Returns the options of `from_pretrained` with which `ignore` of compressed-tensors names modules as transformers does.

    Checkpoints list the layers that are not quantized by the names of their time (`visual.blocks.0.attn.qkv`, `re:visual.*`,
    `language_model.lm_head`); models have since put them below `model.`, or lm_head beside the text model.
    """
    found = getattr(config, "quantization_config", None)
    if not isinstance(found, dict) or found.get("quant_method") != "compressed-tensors":
        return {}
    names = found.get("ignore") or []
    more = [rf"re:(.*\.)?{name[3:] if name.startswith('re:') else re.escape(name) + '$'}" for name in names]
    more += ["re:lm_head$"] if any("lm_head" in name for name in names) else []
    config.quantization_config = found | {"ignore": [*names, *more]}
    return {"config": config}


def decompress(model: Any) -> None:
    """Decompresses a model of compressed-tensors, which its library does in the first forward pass of the whole model.

    Passes of a target call its parts. The library's hooks for offloading, which make dicts of outputs, are removed.
    """
    if hasattr(model, "ct_decompress_hook"):
        from compressed_tensors.offload import remove_dispatch

        model.hf_quantizer.compressor.decompress_model(model)
        remove_dispatch(model, onload_tensors=True)


def say_what_is_lost(target: str, label: str, model: nn.Module) -> None:
    """Logs that passes of a quantized target are eager, and which methods compute a row differently beside other rows."""
    logger.info("target: %s is quantized (%s): its passes run eagerly", target, label)
    thresholds = {float(getattr(getattr(part, "state", None), "threshold", 0.0)) for part in model.modules()}
    if max(thresholds) > 0:
        logger.warning(
            "target: %s: bitsandbytes chooses outlier columns by all tokens of a pass, so the text can differ from "
            "autoregressive decoding; llm_int8_threshold=0 in its quantization_config makes it exact",
            target,
        )


def weight_bytes(model: Any, size: int) -> float:
    """Returns the bytes of a model's weights, also without weights: `size` each, but for linear layers quantized in memory.

    Other methods than int8 of torchao and those of bitsandbytes count as dense: they are, or their layouts were not measured.
    """
    label, total = quantization_of(model.config), sum(p.numel() for p in model.parameters()) * size
    found = getattr(model.config, "quantization_config", None)
    settings: dict[str, Any] = found if isinstance(found, dict) else {} if found is None else found.to_dict()
    blocks = 1 / 64 if settings.get("bnb_4bit_use_double_quant") else 4 / 64  # a scale per 64 weights
    kinds: dict[str, tuple[float, int]] = {"bitsandbytes 8-bit": (1, 4), "bitsandbytes 4-bit": (0.5 + blocks, 0)}
    if "Int8WeightOnly" in str(settings.get("quant_type")):
        kinds["torchao"] = (1, size)
    if label not in kinds:
        return float(total)
    per_weight, per_row = kinds[label]
    skipped = settings.get("llm_int8_skip_modules") or settings.get("modules_to_not_convert") or ()
    for name, module in model.named_modules():
        is_dense = module is model.get_output_embeddings() or any(part in name for part in skipped)
        if isinstance(module, nn.Linear) and not is_dense:
            total += module.in_features * module.out_features * (per_weight - size) + module.out_features * per_row
    return float(total)
