"""Floating-point operations and operators of a computation without its weights, on any machine.

Tensors of floats are on the meta device: they have shapes and no values. Tensors of integers and booleans are on the CPU,
because lengths, positions and supervised tokens decide which shapes follow. Operations are counted by torch's FlopCounterMode,
causal attention with half of its pairs. Attention is one fused operator, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode, flop_registry

ATEN: Any = torch.ops.aten
KERNELS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention")
INDEXING = (ATEN.index, ATEN.index_put, ATEN.index_put_)


@dataclass
class Counts:
    """Floating-point operations, a multiplication and an addition as two, and calls of operators."""

    flops: int = 0
    operators: int = 0


@contextmanager
def counted(counts: Counts) -> Iterator[Operators]:
    """Adds what runs within the block to `counts` at its end; yields the number of operators so far."""
    operators = Operators()
    with operators, FlopCounterMode(display=False, custom_mapping=_formulas()) as flops:
        yield operators
    counts.flops += flops.get_total_flops()
    counts.operators += operators.count


@contextmanager
def weightless() -> Iterator[None]:
    """Runs models on the meta device within the block; integers and booleans that are moved there stay on the CPU."""
    with _IntegersOnTheCPU(), _FusedAttention():
        yield


def _formulas() -> dict[Any, Callable[..., int]]:
    """Returns formulas that torch lacks: of the CPU's flash kernel, of causal attention, and of `addmm_`."""
    found = {ATEN.addmm_: _formula(ATEN.addmm_, flop_registry[ATEN.addmm])}
    for name, suffix in product(KERNELS, ("", "_backward")):
        operator = getattr(ATEN, f"_scaled_dot_product_{name}{suffix}")
        found[operator] = _formula(operator, flop_registry[getattr(ATEN, f"_scaled_dot_product_flash_attention{suffix}")])
    return found


def _formula(operator: Any, formula: Callable[..., int]) -> Callable[..., int]:
    """Returns torch's formula for an operator, halved for causal attention."""
    names = [argument.name for argument in operator.default._schema.arguments]

    def flops(*args: Any, **kwargs: Any) -> int:
        is_causal = {**dict(zip(names, args, strict=False)), **kwargs}.get("is_causal", False)
        return formula(*args, **kwargs) // (2 if is_causal else 1)

    flops._get_raw = True  # type: ignore[attr-defined]  # torch's formula takes tensors
    return flops


class Operators(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class _IntegersOnTheCPU(TorchDispatchMode):
    """Keeps tensors of integers and booleans on the CPU; an operator with an input on the meta device runs there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if any(tensor.is_meta for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)):
            if func.overloadpacket in INDEXING:
                args = (args[0], _integer_indices(args[1]), *args[2:])
            args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        elif str(kwargs.get("device")) == "meta" and not _dtype(func, args, kwargs).is_floating_point:
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


def _integer_indices(indices: list[Tensor | None]) -> list[Tensor | None]:
    """Replaces boolean indices, whose values are known on the CPU, by the integers that they stand for."""
    found = list[Tensor | None]()
    for index in indices:
        is_mask = index is not None and index.dtype is torch.bool
        found += index.nonzero().unbind(1) if index is not None and is_mask else [index]
    return found


def _dtype(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.dtype:
    """Returns the dtype of an operator's result on a device that is given."""
    if kwargs.get("dtype") is not None:
        return kwargs["dtype"]
    if args and isinstance(args[0], Tensor):
        return args[0].dtype
    values = {ATEN.arange: args, ATEN.full: args[1:2], ATEN.scalar_tensor: args}.get(func.overloadpacket, (0.0,))
    return torch.get_default_dtype() if any(isinstance(value, float) for value in values) else torch.int64


class _FusedAttention(TorchFunctionMode):
    """Runs attention on the meta device as one operator, in place of torch's fallback there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention and args[0].is_meta:
            return _attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    group = query.shape[1] // key.shape[1]
    if group > 1 and key.requires_grad:  # the backward formula of the CPU's kernel has as many heads as the query
        key, value = (states.repeat_interleave(group, 1) for states in (key, value))
    operator = ATEN._scaled_dot_product_flash_attention_for_cpu
    out: Tensor = operator(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return out
