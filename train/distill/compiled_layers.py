"""Layers of a training step compiled by `torch.compile`: norms, rope and SwiGLU become a few kernels beside matrix products.

One function is compiled for each class of layer and is used by all layers of the class (PyTorch's regional compilation), for
all lengths. Compiled methods are installed for the duration of a pass; decoding, exports and plans see the layers as they are.

Not compiled: layers that ZeRO-3 shards, because its hooks gather the weights of every submodule within the layer.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn

from sage import Target
from sage.io.model_files import in_one_line
from train.config.derived import zero_stage
from train.config.schema import MAX_STAGE, Compile, Config

logger = logging.getLogger(__name__)

Method = tuple[nn.Module, str]  # a module, and the name of a method that is compiled
BACKEND = "inductor"
FLASH = "flash"  # in the names of implementations to which transformers gives a packed sequence as a whole


class CompiledFunction:
    """A method of a class, compiled at its first call; it runs eagerly, after one warning, if it cannot be compiled.

    Sizes are symbols, so that another length needs no other code. torch.compile takes a size of 1 as a constant, so batches of
    one sequence and of several have code of their own. The method has to be a function of its arguments and the module alone; a
    part of it that cannot be traced makes all of it eager.
    """

    def __init__(self, layer: type, name: str) -> None:
        self._label = label_of(layer, name)
        self._eager: Callable[..., Any] = getattr(layer, name)
        self._compiled: Callable[..., Any] | None = None
        self._has_failed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._has_failed:
            return self._eager(*args, **kwargs)
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        try:
            if self._compiled is None:
                self._compiled = self._compile()
            with without_inner_hooks(args[0]):
                return self._compiled(*args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit, UnsupportedTorch) as error:
            reason = in_one_line(error)[:200]
            logger.warning("train.compile: %s cannot be compiled, it runs eagerly (%s)", self._label, reason)
            self._has_failed = True
            return self._eager(*args, **kwargs)

    def _compile(self) -> Callable[..., Any]:
        try:
            return torch.compile(self._eager, backend=BACKEND, dynamic=True, fullgraph=True)
        except RuntimeError as error:  # such as a version of Python that is too new for this torch
            raise UnsupportedTorch(str(error)) from error


@contextmanager
def without_inner_hooks(module: nn.Module) -> Iterator[None]:
    """Leaves out forward hooks of submodules within the block: transformers registers hooks that collect the attention weights
    of a layer, which cannot be traced, and collect nothing here.
    """
    kept = {inner: inner._forward_hooks for inner in module.modules() if inner._forward_hooks and inner is not module}
    for inner in kept:
        vars(inner)["_forward_hooks"] = OrderedDict()
    try:
        yield
    finally:
        for inner, hooks in kept.items():
            vars(inner)["_forward_hooks"] = hooks


class CompiledLayers:
    """Methods of layers that run compiled within `installed`; modules of one class share the compiled function.

    Hooks of the modules themselves stay outside of compiled code, since they surround the call of `forward`.
    """

    def __init__(self, methods: Sequence[Method] = ()) -> None:
        functions = {key: CompiledFunction(*key) for key in dict.fromkeys((type(module), name) for module, name in methods)}
        self._methods = [(module, name, functions[type(module), name]) for module, name in methods]

    def __str__(self) -> str:
        labels = Counter(label_of(type(module), name) for module, name, _ in self._methods)
        return ", ".join(f"{count} {label}" for label, count in labels.items())

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replaces the methods within the block."""
        for module, name, function in self._methods:
            vars(module)[name] = MethodType(function, module)
        try:
            with settings() if self._methods else nullcontext():
                yield
        finally:
            for module, name, _ in self._methods:
                vars(module).pop(name, None)


def label_of(layer: type, name: str) -> str:
    """Returns `Layer`, or `Layer.name` for another method than `forward`."""
    return layer.__name__ if name == "forward" else f"{layer.__name__}.{name}"


@contextmanager
def settings() -> Iterator[None]:
    """Within the block, numbers of a configuration, such as the epsilon of a norm, are constants instead of inputs, and a
    backward pass is compiled with its forward pass, where a failure makes the method eager, instead of at its first call.
    """
    from torch._dynamo import config as dynamo  # imported by the first pass: it takes a second
    from torch._functorch import config as functorch

    eager_backward = {"force_non_lazy_backward_lowering": True}
    known = {name: value for name, value in eager_backward.items() if hasattr(functorch, name)}  # not in older versions
    with dynamo.patch(specialize_float=True), functorch.patch(known):
        yield


class UnsupportedTorch(RuntimeError):
    """torch.compile does not run in this environment."""


def is_compiling(config: Config, device: torch.device) -> bool:
    """Whether layers of a run on this device are compiled (`train.compile`)."""
    chosen = config.train.compile
    if chosen is Compile.auto:
        return device.type == "cuda" and not config.train.deterministic
    return chosen is Compile.layers and device.type != "meta"


def target_layers(config: Config, target: Target) -> CompiledLayers:
    """Returns the layers of a frozen target that a run compiles."""
    return CompiledLayers(target_methods(target) if is_compiling(config, target.device) else ())


def target_methods(target: Target) -> list[Method]:
    """Returns the blocks of the vision tower and the text layers of a target, without the text layers of a sharded target, and
    without blocks that attend to each image and window in a call of its own.
    """
    text: Any = target.text_model
    layers = list(text.layers) if target.is_plain else []
    if not target.family.is_packed or FLASH in target.model.config.vision_config._attn_implementation:
        layers = [*target.family.vision_blocks(target.model), *layers]
    return [(layer, "forward") for layer in layers]


def draft_layers(config: Config, methods: Sequence[Method], device: torch.device) -> CompiledLayers:
    """Returns the methods of a draft that a run compiles; none under ZeRO-3."""
    is_sharded = zero_stage(config) == MAX_STAGE
    return CompiledLayers(methods if is_compiling(config, device) and not is_sharded else ())
