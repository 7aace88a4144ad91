"""A pretend accelerator: tensors that claim another device, so that device code is tested on a machine without a GPU.

    with pretend_accelerator() as traffic:
        target, draft = on_device(make_qwen()), on_device(draft)        # or load_target(path, device=DEVICE), module.to(DEVICE)
        sage.generate(target, draft, inputs, policy="sage")
    print(traffic.synchronizations, traffic.uploads, traffic.blocking_uploads)
    print(traffic.table())                                              # the same by the source line that caused them

Tensors on `vacc:0` and `vacc:1` keep their values in CPU memory and compute them with CPU operators, so results equal those of
the CPU to the bit, except where PyTorch chooses a kernel by device (attention). As on a GPU,

* an operator that mixes tensors of two devices is refused, except for scalars and CPU indices;
* `numpy()` is refused;
* whatever a GPU has to wait for counts as a synchronization: `item`, `tolist`, `bool`, copies to the host, and operators whose
  output shape depends on values (`nonzero`, `unique`, boolean indices, `equal`);
* a copy to the device is blocking unless its source is pinned and `non_blocking` is set. A blocking copy waits as well; it is
  counted as an upload, not as a synchronization. Memory is pinned by `pin_memory()` or `pin_memory=True`, and views of it are.

Differs from a GPU: nothing runs asynchronously, a non-blocking copy to pinned host memory is complete when the call returns
(every copy to the host counts as a synchronization), and kernels without CPU counterpart (flash
attention, cuDNN) are not modeled. Backward passes run in the calling thread, and inference mode within the block is `no_grad`:
a wrapper cannot be an inference tensor.

Uses an experimental interface of torch 2.13; the fixture `traffic` of tests/conftest.py skips a test where it is missing.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import sage

BACKEND = "vacc"
DEVICES = tuple(torch.device("privateuseone", index) for index in range(2))
DEVICE = DEVICES[0]
CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
HELPERS = ("tests/support/accelerator.py", "sage/runtime/host_tensors.py")  # their callers are shown instead
IS_SUPPORTED = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
T = TypeVar("T")


class Kind(StrEnum):
    """What is counted; a copy to the device is either non-blocking or blocking."""

    SYNCHRONIZATION = "synchronization"
    UPLOAD = "non-blocking upload"
    BLOCKING_UPLOAD = "blocking upload"
    BETWEEN_DEVICES = "copy between devices"


@dataclass
class Traffic:
    """Synchronizations and copies since the last `reset`, by kind and by line, `sage/decoding/decoder.py:112`."""

    lines: Counter[tuple[Kind, str]] = field(default_factory=Counter)
    is_counting: bool = True

    def count(self, *kinds: Kind) -> int:
        """Returns the number of events of these kinds."""
        return sum(number for (kind, _), number in self.lines.items() if kind in kinds)

    @property
    def synchronizations(self) -> int:
        """Waits for the device, without blocking uploads."""
        return self.count(Kind.SYNCHRONIZATION)

    @property
    def uploads(self) -> int:
        """Copies to the device, blocking or not."""
        return self.count(Kind.UPLOAD, Kind.BLOCKING_UPLOAD)

    @property
    def blocking_uploads(self) -> int:
        """Copies to the device that wait for it."""
        return self.count(Kind.BLOCKING_UPLOAD)

    def reset(self) -> None:
        """Starts to count anew."""
        self.lines.clear()

    def table(self) -> str:
        """Returns one line per source line, the most frequent first."""
        return "\n".join(f"{number:6d}  {kind:20s}  {line}" for (kind, line), number in self.lines.most_common())

    def add(self, kind: Kind) -> None:
        """Counts an event at the innermost line of the project on the stack, `HELPERS` excluded."""
        if not self.is_counting:
            return
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            name = frame.f_code.co_filename.removeprefix(f"{ROOT}/")
            if name not in HELPERS and not name.startswith(("/", "<", ".venv")):
                break
            frame = frame.f_back
        self.lines[kind, f"{name}:{frame.f_lineno}" if frame else "elsewhere"] += 1


# What the operators below consult; there is one accelerator per process. `library` is set when the device type is registered,
# `pinned` are tensors by address of their storage, kept alive, so that no other tensor gets the address.
_STATE = SimpleNamespace(traffic=Traffic(), is_active=False, library=None, pinned={})
_SYNCHRONIZING = {f"aten::{name}" for name in ("_local_scalar_dense", "bincount", "equal", "is_nonzero", "masked_select")}
_SYNCHRONIZING |= {f"aten::{name}" for name in ("nonzero", "repeat_interleave", "_unique", "_unique2", "unique_dim")}
_SYNCHRONIZING |= {"aten::unique_consecutive"}
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


class PretendTensor(torch.Tensor):
    """A tensor on a pretend device; `inner` holds its values on the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> PretendTensor:
        outer: PretendTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype, device=device
        )
        outer.inner = inner
        return outer

    def __init__(self, inner: Tensor, device: torch.device) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(nullcontext(), func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PretendTensor({self.inner!r}, device={self.device})"

    def tolist(self) -> Any:
        _STATE.traffic.add(Kind.SYNCHRONIZATION)
        return self.inner.tolist()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy")

    @property
    def data(self) -> PretendTensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: PretendTensor) -> None:
        assert value.device == self.device and value.shape == self.shape, "assigning to .data keeps device and shape"
        self.inner = value.inner

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = PretendTensor(self.inner.detach().clone(), self.device)
        if isinstance(self, nn.Parameter):
            copied = nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied


# -- operators ---------------------------------------------------------------------------------------------------------------


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an operator on the CPU; wraps its results if they belong on a pretend device."""
    operands: list[Tensor] = []
    plain_args, plain = _unwrapped(args, operands), {key: _unwrapped(value, operands) for key, value in kwargs.items()}
    ours = [operand for operand in operands if isinstance(operand, PretendTensor)]
    name = func._schema.name
    if name == "aten::_to_copy":
        device = _copied(args[0], kwargs.get("device") or args[0].device, kwargs.get("non_blocking", False))
    elif name == "aten::copy_":
        device = _copied(args[1], args[0].device, args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    elif kwargs.get("device") is not None:
        device = torch.device(kwargs["device"])
    elif ours:
        device = _common_device(name, args, operands, ours[0].device)
    else:
        device = CPU
    if plain.get("device") is not None:
        plain["device"] = CPU
    is_pinned = plain.pop("pin_memory", None) and device.type == "cpu"
    result = func(*plain_args, **plain)
    if is_pinned:
        _remember_pinned(result)
    if not _is_pretend(device):
        return result
    return _wrapped(result, _indexed(device), ours)


def _unwrapped(value: Any, operands: list[Tensor]) -> Any:
    """Replaces pretend tensors by their values; appends all tensors to `operands`."""
    if isinstance(value, Tensor):
        operands.append(value)
        return value.inner if isinstance(value, PretendTensor) else value
    if isinstance(value, (list, tuple)):
        return type(value)([_unwrapped(one, operands) for one in value])
    return value


def _wrapped(result: Any, device: torch.device, ours: list[PretendTensor]) -> Any:
    """Inverse of `_unwrapped`; a result that is an operand itself, of an operator in place, stays the same object."""
    if isinstance(result, Tensor):
        same = [one for one in ours if one.inner is result]
        return same[0] if same else PretendTensor(result, device)
    if isinstance(result, (list, tuple)):
        return type(result)([_wrapped(one, device, ours) for one in result])
    return result


def _common_device(name: str, args: Any, operands: list[Tensor], device: torch.device) -> torch.device:
    """Returns the device of all operands and counts what the operator waits for; RuntimeError if devices are mixed."""
    if name in _SYNCHRONIZING:
        _STATE.traffic.add(Kind.SYNCHRONIZATION)
    indices: list[Tensor] = []
    if name in _INDEXING:
        indices = [index for index in args[1] if index is not None]
        is_fill = len(args) > 2 and args[2].numel() == 1  # becomes `masked_fill`
        if any(index.dtype is torch.bool for index in indices) and not is_fill:
            _STATE.traffic.add(Kind.SYNCHRONIZATION)
    may_be_on_cpu = {id(index) for index in indices if isinstance(args[0], PretendTensor)}
    for one in operands:
        is_on_cpu = one.device.type == "cpu"
        if one.device == device or (is_on_cpu and one.dim() == 0):
            continue
        if not (is_on_cpu and id(one) in may_be_on_cpu):
            raise RuntimeError(f"{name}: expected all tensors on one device, found {device} and {one.device} {[*one.shape]}")
        _STATE.traffic.add(Kind.BLOCKING_UPLOAD)
    return device


def _copied(source: Tensor, device: torch.device | str, non_blocking: bool) -> torch.device:
    """Counts a copy from the device of `source` to another one, which is returned."""
    to = _indexed(torch.device(device))
    if source.device == to:
        return to
    if not _is_pretend(to):
        kind = Kind.SYNCHRONIZATION
    elif isinstance(source, PretendTensor):
        kind = Kind.BETWEEN_DEVICES
    else:
        kind = Kind.UPLOAD if non_blocking and _is_pinned(source) else Kind.BLOCKING_UPLOAD
    _STATE.traffic.add(kind)
    return to


def _is_pretend(device: torch.device) -> bool:
    return device.type == DEVICE.type


def _indexed(device: torch.device) -> torch.device:
    return DEVICE if _is_pretend(device) and device.index is None else device


def _remember_pinned(tensor: Tensor) -> Tensor:
    _STATE.pinned[tensor.untyped_storage().data_ptr()] = tensor
    return tensor


def _is_pinned(tensor: Tensor, device: Any = None) -> bool:
    return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in _STATE.pinned


def _pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
    return tensor if _is_pinned(tensor) else _remember_pinned(tensor.clone())


class _Mode(TorchDispatchMode):
    """Catches factory functions that request a pretend device or pinned memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(self, func, args, kwargs or {})


def _dispatch(mode: AbstractContextManager[Any], func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an operator. In inference mode, operators that consist of others, such as `Tensor.to`, arrive as a whole."""
    if _is_composite(func):
        with mode:
            return func.decompose(*args, **kwargs)
    if not torch.is_inference_mode_enabled():
        return _run(func, args, kwargs)
    with torch.inference_mode(False), torch.no_grad():  # of a function that was decorated before the block
        return _run(func, args, kwargs)


@cache
def _is_composite(func: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def _kernel(func: Any) -> Callable[..., Any]:
    """An operator as PyTorch calls it below the mode, for example within `torch.tensor(.., device=DEVICE)`."""
    return lambda *args, **kwargs: _run(func, args, kwargs)


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    return _run(torch.ops.aten.copy_.default, (target, source, non_blocking), {})


def _no_grad(mode: bool = True) -> AbstractContextManager[Any]:
    return torch.no_grad() if mode else nullcontext()


def _register() -> None:
    """Makes `vacc` a device type of this process, for good; PyTorch cannot undo it."""

    class Hooks(torch._C._acc.PrivateUse1Hooks):  # type: ignore[name-defined]
        def is_available(self) -> bool:
            return _STATE.is_active

        def has_primary_context(self, device_id: int) -> bool:
            return _STATE.is_active

        def is_built(self) -> bool:
            return True

    module = SimpleNamespace(  # becomes `torch.vacc`
        is_available=lambda: _STATE.is_active,
        is_initialized=lambda: _STATE.is_active,
        device_count=lambda: len(DEVICES),
        current_device=lambda: 0,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        manual_seed_all=lambda seed: None,
        _is_in_bad_fork=lambda: False,
    )
    backend_registration._setup_privateuseone_for_python_backend(BACKEND, module, Hooks())
    _STATE.library = library = torch.library.Library("aten", "IMPL")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    aten = torch.ops.aten
    for func in (aten.empty.memory_format, aten.empty_strided.default, aten._to_copy.default, aten._local_scalar_dense.default):
        library.impl(func._schema.name + f".{func._schema.overload_name}".rstrip("."), _kernel(func), "PrivateUse1")


# -- interface ---------------------------------------------------------------------------------------------------------------


@contextmanager
def pretend_accelerator() -> Iterator[Traffic]:
    """Makes `DEVICES` usable within the block; yields the counts."""
    assert not _STATE.is_active, "pretend_accelerator is not reentrant"
    if _STATE.library is None:
        _register()
    _STATE.traffic, _STATE.is_active, _STATE.pinned = Traffic(), True, {}
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    with ExitStack() as stack:
        stack.callback(_STATE.pinned.clear)
        stack.callback(setattr, _STATE, "is_active", False)
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        torch.__future__.set_swap_module_params_on_conversion(True)  # `Module.to` keeps the subclass
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", _pin_memory))
        stack.enter_context(mock.patch.object(torch.Tensor, "is_pinned", _is_pinned))
        stack.enter_context(mock.patch.object(torch, "inference_mode", _no_grad))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(_Mode())
        yield _STATE.traffic


def on_device(thing: T, device: torch.device = DEVICE) -> T:
    """Moves a tensor, a module (in place), the model of a `Target` (in place), or tensors in containers, without counting."""
    with _uncounted():
        if isinstance(thing, sage.Target):
            thing.model.to(device)
            return thing
        if isinstance(thing, nn.Module):
            return thing.to(device)
        moved: T = tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, thing)
        return moved


def on_host(thing: T) -> T:
    """Copies tensors, also in containers, to the CPU without counting."""
    with _uncounted():
        copied: T = tree_map(lambda value: value.cpu() if isinstance(value, Tensor) else value, thing)
        return copied


@contextmanager
def _uncounted() -> Iterator[None]:
    before, _STATE.traffic.is_counting = _STATE.traffic.is_counting, False
    try:
        yield
    finally:
        _STATE.traffic.is_counting = before
