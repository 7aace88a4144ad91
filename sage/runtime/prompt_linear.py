"""Linear layers of prompts and images, which are read by eager passes: oneDNN's kernel or torch's default, the faster one.

In float32 torch uses MKL on x86, which is half as fast as oneDNN on some processors. Both use the weights in place. The choice
is measured once per processor and shape of a layer, and is kept on disk. Does not own: linear layers of compiled passes
(sage.runtime.linear_layers).
"""

from __future__ import annotations

import statistics
import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from sage.io.files import json_digest, read_json, write_json
from sage.io.machine import environment, processor_name
from sage.runtime.linear_layers import MIN_BYTES
from sage.runtime.package_folder import passes_folder, writable_path
from sage.runtime.timing import TimedCall, interleaved_s, preparation

ROWS, REPEATS = (32, 128), 9
CPU = torch.device("cpu")
_LAYERS: weakref.WeakKeyDictionary[nn.Module, list[nn.Linear]] = weakref.WeakKeyDictionary()  # without those of other kernels
_CHOICES: dict[Hashable, set[tuple[int, ...]]] = {}  # of this process


def onednn_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """Returns `layer(x)`, computed by oneDNN in float32; x: [.., K]."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, "none", [], "")
    return out


@contextmanager
def fast_prompts(model: nn.Module, is_enabled: bool) -> Iterator[None]:
    """Runs the linear layers of `model` with the faster kernel inside the block; without gradients.

    Args:
        is_enabled: False for torch's default, the reference.
    """
    layers = _layers(model) if is_enabled and not torch.is_grad_enabled() else []
    for layer in layers:
        layer.__dict__["forward"] = partial(onednn_linear, layer)
    try:
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def _layers(model: nn.Module) -> Sequence[nn.Linear]:
    """Returns the layers for which oneDNN is faster than torch's default."""
    if model not in _LAYERS:
        _LAYERS[model] = [layer for layer in model.modules() if type(layer) is nn.Linear]
    found = _LAYERS[model]
    one_per_shape = {layer.weight.shape: layer for layer in found}
    is_usable = all(layer.weight.dtype == torch.float32 and layer.weight.device == CPU for layer in one_per_shape.values())
    if not is_usable or sum(layer.weight.nbytes for layer in found) < MIN_BYTES:
        return []
    faster = shapes_of_onednn(list(one_per_shape.values()))
    return [layer for layer in found if layer.weight.shape in faster]


def shapes_of_onednn(layers: Sequence[nn.Linear]) -> set[tuple[int, ...]]:
    """Returns the shapes [N, K] of weights for which oneDNN is faster: from disk, or measured now with one layer per shape."""
    shapes = [tuple(layer.weight.shape) for layer in layers]
    key = (tuple(shapes), torch.get_num_threads())
    if key not in _CHOICES:
        path = passes_folder() / f"prompts-{json_digest([shapes, environment(CPU, __name__), processor_name(CPU)])}.json"
        try:
            _CHOICES[key] = {tuple(shape) for shape in read_json(path)["onednn"]}
        except (ValueError, KeyError):
            _CHOICES[key] = measured_shapes(layers)
            write_json(writable_path(path), {"onednn": sorted(_CHOICES[key])})
    return _CHOICES[key]


@preparation()
@torch.no_grad()
def measured_shapes(layers: Sequence[nn.Linear]) -> set[tuple[int, ...]]:
    """Returns the shapes of those layers that oneDNN runs in less time, in sum over `ROWS` (medians)."""
    if not torch.backends.mkldnn.is_available():
        return set()
    found = set()
    for layer in layers:
        ours = theirs = 0.0
        for rows in ROWS:
            x = torch.zeros(rows, layer.in_features)
            calls = [TimedCall(partial(onednn_linear, layer, x)), TimedCall(partial(nn.Linear.forward, layer, x))]
            times = interleaved_s(calls, REPEATS, CPU)
            ours += statistics.median(times[0])
            theirs += statistics.median(times[1])
        if ours < theirs:
            found.add(tuple(layer.weight.shape))
    return found
