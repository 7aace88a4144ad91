"""Weights that are not those of a plain checkpoint: quantized by a library, whose layers transformers loads, or with an adapter
of PEFT, merged into the weights or kept beside those that are quantized.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, TorchAoConfig

from sage.io.model_files import in_one_line
from sage.io.ranges import choose
from sage.runtime.modes import Quantize

logger = logging.getLogger(__name__)
MISSING = "missing adapter keys"  # of PEFT's warning
ORIGIN = ("base_model_name_or_path", "revision", "inference_mode", "task_type", "peft_version", "auto_mapping")
CHUNK = 1024  # columns of a table that are read at once


def _settings(config: Any) -> dict[str, Any]:
    """Returns the settings of a model's quantization; none without."""
    settings = getattr(config, "quantization_config", None) or {}
    return settings if isinstance(settings, dict) else settings.to_dict()


def quantization_of(config: Any) -> str | None:
    """Returns the quantization that a model's configuration names, such as `bitsandbytes 4-bit`; None without."""
    settings = _settings(config)
    if not settings:
        return None
    bits = 4 if settings.get("load_in_4bit") else 8 if settings.get("load_in_8bit") else settings.get("bits")
    method = getattr(settings.get("quant_method"), "value", settings.get("quant_method")) or "bitsandbytes"
    kind = re.search(r"'_type': '(\w+?)Config'", str(settings.get("quant_type")))  # of torchao
    detail = f"{bits}-bit" if bits else kind[1] if kind else settings.get("format") or ""
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


def quantized_at_load(name: str, path: str, config: Any, dtype: Any = None) -> Any:
    """Returns the configuration of transformers with which a target is quantized when it is loaded.

    Args:
        name: one of `Quantize`.
        path, config: folder or hub id of the target, and its configuration.
        dtype: in which layers compute.

    Raises:
        ValueError: an unknown name, a target that is quantized already, or a library that is missing.
    """
    choice = choose("target.quantize", name, Quantize)
    if method := quantization_of(config):
        raise ValueError(f"target.quantize={name}: {path} is quantized already ({method}); drop it, or give the original model")
    if find_spec(library := choice.library) is None:
        raise ValueError(f"target.quantize={name}: needs {library}; pip install 'sage-draft[quantized]'")
    if choice is Quantize.nf4:
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

    kind = Int8WeightOnlyConfig if choice is Quantize.int8 else Float8WeightOnlyConfig
    return TorchAoConfig(kind(set_inductor_config=False))  # which would be that of all compiled passes


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
    settings = _settings(config)
    if settings.get("quant_method") != "compressed-tensors":
        return {}
    names = settings.get("ignore") or []
    more = [rf"re:(.*\.)?{name[3:] if name.startswith('re:') else re.escape(name) + '$'}" for name in names]
    more += ["re:lm_head$"] if any("lm_head" in name for name in names) else []
    config.quantization_config = settings | {"ignore": [*names, *more]}
    return {"config": config}


def prepare_layers(model: Any) -> None:
    """Makes quantized layers compute the same in every pass, and on every CPU.

    compressed-tensors decompresses in the first forward pass of the whole model, of which a target calls parts; its hooks for
    offloading, which make dicts of outputs, are removed. bitsandbytes packs 4-bit weights in the first pass on CPUs with
    AVX512-BF16, which rounds their scales to bfloat16 and fails for rows that are not a multiple of 32.
    """
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
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

    Other methods than weight-only ones of torchao and those of bitsandbytes count as dense: they are, or were not measured.
    """
    label, total = quantization_of(model.config), sum(p.numel() for p in model.parameters()) * size
    settings = _settings(model.config)
    blocks = 1 / 64 if settings.get("bnb_4bit_use_double_quant") else 4 / 64  # a scale per 64 weights
    kinds: dict[str, tuple[float, int]] = {"bitsandbytes 8-bit": (1, 4), "bitsandbytes 4-bit": (0.5 + blocks, 0)}
    kinds |= {"torchao Int8WeightOnly": (1, size), "torchao Float8WeightOnly": (1, 4)}
    if label not in kinds:
        return float(total)
    per_weight, per_row = kinds[label]
    skipped = settings.get("llm_int8_skip_modules") or settings.get("modules_to_not_convert") or ()
    head = None if settings.get("include_input_output_embeddings") else model.get_output_embeddings()
    for name, module in model.named_modules():
        is_dense = module is head or any(part in name for part in skipped)
        if isinstance(module, nn.Linear) and not is_dense:
            total += module.weight.numel() * (per_weight - size) + len(module.weight) * per_row
    return float(total)


# -- adapters -------------------------------------------------------------------------------------------------------------


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
        raise ValueError(
            f"{where} does not fit {target} ({in_one_line(error)[:300]}); give an adapter trained for this target"
        ) from error
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
