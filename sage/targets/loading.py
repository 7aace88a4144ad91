"""Loads targets and their processors from folders or the hub."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.integrations import is_deepspeed_zero3_enabled

from sage.inputs.processing import Processor
from sage.io.dtypes import SHORT_NAMES, dtype_name, loaded_dtype, torch_dtype
from sage.io.hub import require_hub
from sage.io.model_files import in_one_line, load_weights, read_config
from sage.io.ranges import choose
from sage.io.target_paths import find_target, path_of_target, refuse_without_config
from sage.runtime.attention import VARLEN
from sage.runtime.cpu import use_huge_pages
from sage.runtime.modes import PassMode, VisionAttention, check_attention, resolve_attention, resolve_pass_mode
from sage.runtime.prefix_attention import HALF, has_flash_kernel
from sage.targets.families import FAMILIES, family_of
from sage.targets.placement import check_device_map
from sage.targets.target import Target, as_list
from sage.targets.weights import quantization_of, quantized_at_load, renamed_ignore, say_what_is_lost, with_adapter


def load_target(
    path_or_id: str | Path,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    *,
    attention: str = VisionAttention.auto,
    device_map: str | dict[str, Any] | None = None,
    passes: str = PassMode.auto,
    adapter: str | None = None,
    quantize: str | None = None,
    **kwargs: Any,
) -> Target:
    """Loads a target with its processor from a folder or a hub id.

    Args:
        path_or_id: a folder, a hub id, or a name of conf/target, such as `pocket_qwen2_5_vl` or `qwen2_5_vl_7b`.
        dtype: None keeps that of the checkpoint, with bfloat16 in place of float16 (`sage.io.dtypes.loaded_dtype`).
        attention: of the vision tower, one of `VisionAttention`.
        device_map: spreads a target that is too large for one GPU over several, in place of `device`: auto, balanced or
            sequential, or module name -> device, as for `from_pretrained`.
        passes: how passes run, one of `PassMode`; auto: captured on a GPU, eager on a CPU.
        adapter: folder or hub id of a PEFT adapter, merged into the weights; kept beside those that are quantized.
        quantize: one of `Quantize`, to which the weights are quantized; None keeps those of the checkpoint.
        kwargs: further arguments of `from_pretrained`.

    Raises:
        ValueError: the folder does not exist, is corrupt or incomplete, or holds no model of a known family; the attention is
            not available; the device map leaves modules on the CPU or on disk.
    """
    vision_attention, pass_mode = check_attention(attention), choose("passes", passes, PassMode)
    if device_map is None:
        resolve_pass_mode(pass_mode, torch.device(device).type)  # refuses before anything is loaded
    else:
        check_device_map(device_map)
    path = find_target(str(path_or_id))
    processor = load_processor(path, kwargs.get("revision", "main"))
    config = processor.family.config
    family = family_of(config)
    if device_map is None and torch.device(device).type == "cuda" and not is_deepspeed_zero3_enabled():
        placement: dict[str, Any] = {"device_map": {"": torch.device(device)}}  # without a copy of the weights in CPU memory
    else:
        placement = {} if device_map is None else {"device_map": device_map}
    if is_deepspeed_zero3_enabled():
        _refuse_sharding(path, quantize or quantization_of(config), adapter)
    kwargs |= renamed_ignore(config)
    published = dtype_name(config.dtype)
    given = dtype or (torch_dtype(loaded_dtype(published)) if published in SHORT_NAMES else "auto")
    if quantize is not None:
        kwargs["quantization_config"] = quantized_at_load(quantize, path, config, None if given == "auto" else given)
    model = load_weights(family.auto_class, path, "target", allow_unused=True, dtype=given, **placement, **kwargs)
    model, adapted = (model, None) if adapter is None else with_adapter(model, os.path.expanduser(adapter), path)
    if device_map is not None:
        check_device_map(getattr(model, "hf_device_map", {}))  # a strategy offloads what does not fit
    target = Target(model if placement else model.to(device), processor, adapter=adapted, quantize=quantize)
    use_huge_pages(model)
    if target.quantization:
        say_what_is_lost(target.name, target.quantization, model)
    target.passes = resolve_pass_mode(pass_mode, target.device.type, is_whole=target.is_plain)
    device, is_half = target.device, target.dtype in HALF
    set_attention(model, resolve_attention(vision_attention, device.type, is_half, family.is_packed, has_flash_kernel(device)))
    return target


def _refuse_sharding(path: str, method: str | None, adapter: str | None) -> None:
    """Raises ValueError for what is not loaded into the ranks of a sharded target."""
    if method:
        raise ValueError(f"deepspeed.shard_target: ZeRO does not shard quantized weights ({method} in {path}); drop it")
    if adapter:
        raise ValueError(
            f"target.adapter: {adapter} cannot be merged into the weights of deepspeed.shard_target; merge it first "
            "(PeftModel.merge_and_unload, save_pretrained), and give that folder as target.path"
        )


def set_attention(model: Any, attention: VisionAttention) -> None:
    """Sets the attention of the vision tower, if the model has one."""
    if not hasattr(model.config, "vision_config"):
        return
    if attention is VisionAttention.varlen:  # transformers would look for a package of that name
        model.config.vision_config._attn_implementation = VARLEN
    else:
        model.set_attn_implementation({"vision_config": str(attention)})


def load_processor(path: str, revision: str = "main") -> Processor:
    """Loads the tokenizer and image processor from a target's folder, hub id or name, without weights.

    Args:
        revision: of the configuration.

    Raises:
        ValueError: no target of a known family, or files that are missing, corrupt, or those of another model,
            or a hub that cannot be reached.
    """
    path = os.path.expanduser(path_of_target(path))
    refuse_without_config(path)
    config = read_architecture(path, "target", revision=revision)
    family = family_of(config, f"target: {path}: ")
    remedy = "copy the files that came with the model (tokenizer.json, tokenizer_config.json, preprocessor_config.json)"
    end_token_ids: list[int] = []
    with suppress(OSError, ValueError):  # a target may have no generation_config.json
        end_token_ids = as_list(GenerationConfig.from_pretrained(path).eos_token_id)
    try:
        processor = Processor.from_pretrained(path, family, end_token_ids)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"target: {path}: its tokenizer or image processor cannot be read ({in_one_line(error)}); {remedy}"
        ) from error
    for kind, wanted in family.slots.items():
        token = family.slot_texts[kind]
        if processor.tokenizer.convert_tokens_to_ids(token) != wanted:
            raise ValueError(
                f"target: {path}: its tokenizer does not know {token!r} as {wanted}, the {kind} token in config.json; {remedy}"
            )
    _check_special_tokens(path, processor, config.get_text_config().vocab_size)
    return processor


def read_architecture(path: str, key: str, **options: Any) -> Any:
    """Reads a target's config.json from a folder, the hub's cache or the hub; ValueError with the `key` of the setting."""
    require_hub(path, key)
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False, **options)
    except (OSError, ValueError, TypeError, StrictDataclassError) as error:
        raise ValueError(f"{key}: {path}: cannot read its config.json{_unreadable(path, in_one_line(error))}") from error


def _check_special_tokens(path: str, processor: Processor, vocab_size: int) -> None:
    """Raises ValueError for a token without an embedding, for no token that ends an answer, and for a chat template that
    begins a prompt with several BOS tokens. (Without one, `Processor` adds it.)
    """
    beyond = {token_id: text for text, token_id in processor.tokenizer.get_added_vocab().items() if token_id >= vocab_size}
    if processor.tokenizer.vocab_size > vocab_size:
        beyond[vocab_size] = processor.tokenizer.convert_ids_to_tokens(vocab_size)
    if beyond:
        token_id = min(beyond)
        raise ValueError(
            f"target: {path}: token {beyond[token_id]!r} of its tokenizer has id {token_id}, but the model has {vocab_size} "
            "embeddings (vocab_size); resize them, or remove the token"
        )
    if not processor.end_texts:
        raise ValueError(
            f"target: {path}: no token ends its answers: eos_token_id is null in generation_config.json and the tokenizer has "
            "no eos_token; set one of them"
        )
    bos, question = processor.tokenizer.bos_token, {"role": "user", "content": "Hello"}
    prompts = []
    for messages in ([question], [{"role": "system", "content": "Hi"}, question]) if bos else ():
        with suppress(ValueError):  # without a template, or with one that refuses this prompt
            prompts.append(processor.render(messages, True))
    if any(prompt.startswith(bos * 2) for prompt in prompts):
        raise ValueError(
            f"target: {path}: its chat template begins a prompt with {bos!r} twice, which the model was not trained on; remove "
            "one of them from chat_template.jinja (or tokenizer_config.json)"
        )


def _unreadable(path: str, reason: str) -> str:
    """Returns why transformers cannot read a configuration, with a remedy; names remote code, which is never run."""
    try:
        config = read_config(path)
    except ValueError:
        config = {}
    if "auto_map" in config and config.get("model_type") not in FAMILIES:
        return (
            f": model_type {config.get('model_type')!r} is code in the folder "
            f"(auto_map), which is never run, and tree masks would not reach its attention; known: {', '.join(FAMILIES)}"
        )
    return f" ({reason}); copy the model again, or give another target"


def is_target_folder(path: str | Path) -> bool:
    """Returns whether a folder holds a model of a known family; an exported draft can have the same `model_type`."""
    try:
        config = read_config(path)
    except ValueError:
        return False
    kind = config.get("model_type")
    return kind in FAMILIES and FAMILIES[kind].model_types[kind] in (config.get("architectures") or ())


def meta_target(architecture: PreTrainedConfig) -> Target:
    """Returns a target without weights, on the meta device."""
    with torch.device("meta"):
        return Target(family_of(architecture).auto_class.from_config(architecture))
