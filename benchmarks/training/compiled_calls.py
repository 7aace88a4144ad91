"""Calls of the layers that a GPU runs compiled (`train.compile`), counted without weights and without a GPU.

Inductor generates the code of a layer; compilation is stopped before the code is built. The code calls each kernel that
Inductor has generated, and each operator that it leaves to a library, such as matrix products and attention. Views and
allocations are no calls. The code is that of a CPU, with the concatenations of a GPU, which may still divide or fuse kernels.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from benchmarks.training.counting import Operators
from train.distill.compiled_layers import settings, without_inner_hooks

CALL = re.compile(r"(?:cpp_fused\w*|extern_kernels\.\w+|torch\.ops\.[\w.]+)\(")
Key = tuple[str, type, str]


class _Generated(Exception):
    """The code of a layer, before it is built."""


@dataclass
class LayerCalls:
    """Records the calls of layers while a model runs without weights; `new` makes what replaces a layer's method.

    Attributes:
        part: the part of the step that runs.
        running: the operators of this part so far.
        layers: number of calls by part, class and method.
        operators: that ran within them, by part.
    """

    part: str = ""
    running: Operators = field(default_factory=Operators)
    layers: Counter[Key] = field(default_factory=Counter)
    operators: Counter[str] = field(default_factory=Counter)
    _examples: dict[Key, Any] = field(default_factory=dict)

    def new(self, layer: type, name: str) -> Callable[..., Any]:
        """Returns the method of a class, recorded."""

        def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            key = (self.part, layer, name)
            self.layers[key] += 1
            self._examples.setdefault(key, (module, args, kwargs))
            before = self.running.count
            out = getattr(layer, name)(module, *args, **kwargs)
            self.operators[self.part] += self.running.count - before
            return out

        return run

    def compiled(self, part: str, operators: int) -> int | None:
        """Returns the calls of a part with compiled layers, given the operators of all of it; None if no layer is compiled."""
        calls = {key: number for key, number in self.layers.items() if key[0] == part}
        if not calls:
            return None
        within = sum(number * calls_of(*key[1:], *self._examples[key]) for key, number in calls.items())
        return operators - self.operators[part] + within


def calls_of(layer: type, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Returns the number of calls in the code that Inductor generates for a method, from tensors of any device."""
    copied = copy.deepcopy(module).to_empty(device="cpu")  # allocated and never touched
    args, kwargs = tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor, device="cpu"), (args, kwargs))
    codes = list[str]()
    with _stopped_after(codes), without_inner_hooks(copied), torch.no_grad():
        torch.compile(getattr(layer, name), dynamic=True, fullgraph=True)(copied, *args, **kwargs)
    return sum(len(CALL.findall(code, code.index("def call("))) for code in codes)


@contextmanager
def _stopped_after(codes: list[str]) -> Iterator[None]:
    """Adds the code that is generated within the block to `codes`, and leaves the block there."""
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    def stop(code: str) -> None:
        codes.append(code)
        raise _Generated

    torch._dynamo.reset()
    options = config.patch(force_pointwise_cat=True, fx_graph_cache=False)
    try:
        with settings(), options, mock.patch.object(GraphLowering, "save_output_code", stop):
            yield
    except torch._dynamo.exc.TorchDynamoException:
        if not codes:
            raise
