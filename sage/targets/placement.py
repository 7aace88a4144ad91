"""Targets whose modules lie on several devices of one machine: which device maps are allowed, and what a pass moves.

transformers places the modules and accelerate adds a hook to every submodule, which moves all arguments again in every layer.
Here one hook per entry of the device map moves them, and what all layers share (mask, rope, positions) once per device.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

OFFLOAD = ("cpu", "disk")
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")  # of transformers
Copies = dict[tuple[int, torch.device], tuple[Tensor, Tensor]]  # (id of the source, device) -> source and copy


def check_device_map(device_map: str | Mapping[str, Any]) -> None:
    """Raises ValueError for an unknown strategy, and for modules in CPU memory or on disk beside those on other devices."""
    if isinstance(device_map, str):
        if device_map not in STRATEGIES:
            raise ValueError(f"device_map: {device_map!r} is unknown; choose one of {', '.join(STRATEGIES)}")
        return
    devices = {name: str(device) for name, device in device_map.items()}
    offloaded = [name for name, device in devices.items() if device in OFFLOAD]
    if offloaded and set(devices.values()) != {"cpu"}:
        kinds = sorted({devices[name] for name in offloaded})
        raise ValueError(
            f"device_map: {offloaded[0] or 'the model'} would be on the {' and '.join(kinds)}, and decoding reads all weights "
            f"in every pass; use more or larger GPUs, a smaller dtype or a smaller target"
        )


def is_multi_device(model: nn.Module) -> bool:
    """Whether the modules of a loaded model are on more than one device."""
    device_map: Mapping[str, Any] = getattr(model, "hf_device_map", {})
    return len({str(device) for device in device_map.values()}) > 1


def layer_devices(text_model: nn.Module) -> list[torch.device]:
    """Returns the device of every text layer."""
    layers: Any = text_model.layers
    return [next(layer.parameters()).device for layer in layers]


def connect(model: Any, text_model: Any) -> None:
    """Makes a model on several devices callable, with inputs and outputs on the device of lm_head.

    The embedding moves there as well, because a draft uses both.
    """
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        from accelerate.hooks import remove_hook_from_module

        remove_hook_from_module(model, recurse=True)
    home = model.get_output_embeddings().weight.device
    for module in (model.get_input_embeddings(), text_model.rotary_emb):
        module.to(home)
    copies: Copies = {}
    modules = dict(model.named_modules())
    for name in model.hf_device_map:  # an entry may also be a parameter, which the model itself moves
        tensors = chain(modules[name].parameters(), modules[name].buffers()) if name in modules else iter(())
        if (tensor := next(tensors, None)) is not None:
            modules[name].register_forward_pre_hook(partial(_move_arguments, tensor.device, copies), with_kwargs=True)
    text_model.register_forward_hook(partial(_move_output, home, copies))


def _move_arguments(
    device: torch.device, copies: Copies, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    moved = {key: _moved(value, device, copies) for key, value in named.items()}
    return tuple(_moved(value, device, copies) for value in args), moved


def _moved(value: Any, device: torch.device, copies: Copies) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_moved(item, device, copies) for item in value)
    if type(value) is dict:  # masks by layer type
        return {key: _moved(item, device, copies) for key, item in value.items()}
    if not isinstance(value, Tensor) or value.device == device:
        return value
    key = (id(value), device)
    if key not in copies:
        copies[key] = value, value.to(device)  # the source is kept, so that no other tensor takes its id
    return copies[key][1]


def _move_output(device: torch.device, copies: Copies, module: nn.Module, args: Any, output: Any) -> Any:
    copies.clear()
    output.last_hidden_state = output.last_hidden_state.to(device)
    return output
