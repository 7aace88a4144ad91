"""Linear layers of prompts, which are read by eager passes: the fastest kernel for each shape of a layer.

In float32 torch uses MKL on x86, which is half as fast as oneDNN on some processors, and `joint_linear` is the fastest for few
rows. All use the weights in place. The choice is measured once per processor and shape of a layer, for few and for many rows,
and is kept on disk.

Shapes: M rows, K inputs, N outputs of a layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sage.io.files import json_digest, read_json, write_json
from sage.io.machine import environment, processor_name
from sage.runtime.cpu.kernels import CPU, DTYPES, MIN_BYTES, joint_linear, kernel_digest, kernels
from sage.runtime.package_folder import passes_folder, writable_path
from sage.runtime.timing import fastest_s, preparation

FEW_ROWS = 64  # up to which the choice for few rows counts
TIMED_ROWS = (32, 128)  # for few and for many
REPEATS = 9
Forward = Callable[[nn.Linear, Tensor], Tensor]


def onednn_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """Returns `layer(x)`, computed by oneDNN; x: [.., K]."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, "none", [], "")
    return out


def few_rows_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """Returns `layer(x)`, computed by `joint_linear`; x: [.., K]."""
    out = joint_linear(x.contiguous(), [layer.weight], torch.get_num_threads())
    return out if layer.bias is None else out + layer.bias


KERNELS: dict[str, Forward] = {"torch": nn.Linear.forward, "onednn": onednn_linear, "joint_linear": few_rows_linear}
Choice = list[str]  # names of the kernels for few and for many rows
_CHOICES: dict[Hashable, list[Choice]] = {}  # of this process
# by model, what they were chosen for, and what replaces the `forward` of layers that do not run with torch's kernel
_MODELS: weakref.WeakKeyDictionary[nn.Module, tuple[Hashable, dict[nn.Linear, Any]]] = weakref.WeakKeyDictionary()


@contextmanager
def fast_prompts(model: nn.Module, is_enabled: bool) -> Iterator[None]:
    """Runs the linear layers of `model` with the fastest kernels inside the block; without gradients.

    Args:
        is_enabled: False for torch's kernels, the reference.
    """
    forwards = _forwards(model) if is_enabled and not torch.is_grad_enabled() else {}
    for layer, forward in forwards.items():
        layer.__dict__["forward"] = forward
    try:
        yield
    finally:
        for layer in forwards:
            layer.__dict__.pop("forward", None)


def _forwards(model: nn.Module) -> dict[nn.Linear, Any]:
    first = next(model.parameters())
    state = (first.dtype, first.device, torch.get_num_threads())
    if model not in _MODELS or _MODELS[model][0] != state:
        layers = [layer for layer in model.modules() if type(layer) is nn.Linear]
        by_shape = {layer.weight.shape: layer for layer in layers}
        kinds = {(layer.weight.dtype, layer.weight.device.type) for layer in layers}
        is_usable = len(kinds) == 1 and kinds <= {(dtype, "cpu") for dtype in DTYPES}
        if not is_usable or sum(layer.weight.nbytes for layer in layers) < MIN_BYTES:
            layers, by_shape = [], {}
        chosen = dict(zip(by_shape, fastest(list(by_shape.values())), strict=True)) if layers else {}
        _MODELS[model] = (
            state,
            {
                layer: partial(_forward, layer, *[KERNELS[name] for name in chosen[layer.weight.shape]])
                for layer in layers
                if set(chosen[layer.weight.shape]) != {"torch"}
            },
        )
    return _MODELS[model][1]


def _forward(layer: nn.Linear, few: Forward, many: Forward, x: Tensor) -> Tensor:
    return (few if x.numel() <= FEW_ROWS * x.shape[-1] else many)(layer, x)


def fastest(layers: Sequence[nn.Linear]) -> list[Choice]:
    """Returns the choice for layers of different shapes and one dtype: from disk, or measured now."""
    shapes, dtype = tuple(tuple(layer.weight.shape) for layer in layers), str(layers[0].weight.dtype)
    key = (shapes, dtype, torch.get_num_threads())
    if key not in _CHOICES:
        facts = [shapes, dtype, _has_kernel() and kernel_digest(), environment(CPU, __name__), processor_name(CPU)]
        path = passes_folder() / f"prompts-{json_digest(facts)}.json"
        try:
            _CHOICES[key] = list(read_json(path)["kernels"])
        except (ValueError, KeyError):
            _CHOICES[key], is_certain = measured(layers)
            if is_certain:
                write_json(writable_path(path), {"shapes": shapes, "kernels": _CHOICES[key]})
    return _CHOICES[key]


def _has_kernel() -> bool:
    """Whether `joint_linear` can be built; without a compiler passes are eager, and a warning says so."""
    try:
        return kernels() is not None
    except RuntimeError:
        return False


@preparation()
@torch.no_grad()
def measured(layers: Sequence[nn.Linear]) -> tuple[list[Choice], bool]:
    """Times every available kernel for each layer; returns the names of those with the fastest runs, and whether they
    are certain: not if other processes disturbed every run of one.
    """
    mkldnn, is_half = torch.ops.mkldnn, layers[0].weight.dtype == torch.bfloat16
    names = ["torch"]
    if torch.backends.mkldnn.is_available() and (not is_half or mkldnn._is_mkldnn_bf16_supported()):  # of few processors
        names.append("onednn")
    if _has_kernel():
        names.append("joint_linear")
    chosen, is_certain = [], True
    for layer in layers:
        choice = []
        for rows in TIMED_ROWS:
            x = torch.zeros(rows, layer.in_features, dtype=layer.weight.dtype)
            seconds, is_undisturbed = fastest_s([[partial(KERNELS[name], layer, x)] for name in names], REPEATS)
            choice.append(min(zip(seconds, names, strict=True))[1])
            is_certain &= is_undisturbed
        chosen.append(choice)
    return chosen, is_certain
