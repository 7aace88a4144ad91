"""Functions compiled ahead of time by AOTInductor, kept on disk.

`torch.export` traces a function once, Inductor compiles it to a shared library, and loading that takes milliseconds. Compared
with `torch.compile`, a call evaluates no guards and has no Python wrapper, which take as long as a third of a small pass, and a
new process traces nothing. Weights are not in the file: the library uses the tensors of the loaded model.

A file is named by a digest of all that it depends on: package versions, the source of this package, the model's configuration,
dtype, processor and number of threads.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sage.files import atomic_path, user_cache_dir
from sage.machine import environment
from sage.model_files import in_one_line

PACKAGE_SUFFIX = ".pt2"
OPTIONS = {"aot_inductor.package_constants_in_so": False}
Example = Callable[[], tuple[tuple[Any, ...], tuple[Any, ...]]]


class Run(Protocol):
    """A function of tensors, called with flat arguments; returns flat results."""

    def __call__(self, args: Sequence[Tensor]) -> Sequence[Tensor]:
        """Runs it."""

    def refresh(self) -> None:
        """Looks up the addresses of the weights again. Call it when they may have moved, as by a cast."""


class Package:
    """A compiled function with the weights of a model; calls it with flat arguments.

    The library holds pointers to the weights. If a call fails, this call and later ones run eagerly, with one warning.
    """

    def __init__(self, path: Path, module: nn.Module, args: tuple[Any, ...], label: str) -> None:
        from torch._inductor import aoti_load_package

        self._module, self._label, self._eager = module, label, Eager(module, args)
        index = -1 if args[0].device.index is None else args[0].device.index
        self._compiled = aoti_load_package(str(path), run_single_threaded=True, device_index=index)
        self._names: list[str] = self._compiled.get_constant_fqns()
        self._pointers: list[int] = []
        self._run: Callable[..., Any] = self._compiled.loader.run  # without the flattening of arguments, 60 us per call
        self.refresh()

    def refresh(self) -> None:
        weights = dict(self._module.state_dict(keep_vars=True)) | dict(self._module.named_buffers(remove_duplicate=False))
        found = {name: weights[name].detach() for name in self._names}
        pointers = [weight.data_ptr() for weight in found.values()]
        if pointers != self._pointers:
            self._compiled.load_constants(found, check_full_update=True, user_managed=True)
            self._pointers, self._found = pointers, found

    def __call__(self, args: Sequence[Tensor]) -> Sequence[Tensor]:
        try:
            out: Sequence[Tensor] = self._run(args)
        except RuntimeError as error:
            _warn(self._label, error)
            self._run = self._eager
            out = self._eager(args)
        return out


def compiled(module: nn.Module, example: Example, label: str, depends_on: Any) -> Run:
    """Returns `module` compiled, from disk if it was compiled before; runs it eagerly, with one warning, if that fails.

    Args:
        example: returns example arguments of `forward`, and of each the dynamic dimensions, as `dynamic_shapes` of
            `torch.export.export`.
        label: names the pass in messages.
        depends_on: JSON-serializable description of the model.
    """
    with torch.inference_mode(False):  # an inference tensor cannot be traced
        args, dims = example()
    device = args[0].device
    path = passes_folder() / f"{_digest(module, label, depends_on, device)}{PACKAGE_SUFFIX}"
    try:
        if path.is_file() and (known := _loaded(path, module, args, label)):
            return known
        return Package(_compile_to(path, module, args, dims, label), module, args, label)
    except Exception as error:
        _warn(label, error)
        return Eager(module, args)


def _warn(label: str, error: Exception) -> None:
    reason = f"{type(error).__name__}: {in_one_line(error)}"[:300]
    warnings.warn(f"passes: {label} cannot run compiled ({reason}); it runs eagerly", stacklevel=3)


def _loaded(path: Path, module: nn.Module, args: tuple[Any, ...], label: str) -> Package | None:
    """Returns the package in a file; None if it is damaged."""
    try:
        return Package(path, module, args, label)
    except (RuntimeError, ValueError, OSError):
        return None


class Eager:
    """A function of tensors, called as it is with flat arguments."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._module, self._spec = module, pytree.tree_structure(args)

    def refresh(self) -> None:
        """Does nothing: the function reads the module's own weights."""

    def __call__(self, args: Sequence[Tensor]) -> Sequence[Tensor]:
        out: Sequence[Tensor] = self._module(*pytree.tree_unflatten(list(args), self._spec))
        return out


def passes_folder() -> Path:
    """Returns the folder of compiled passes."""
    return user_cache_dir() / "passes"


def _compile_to(path: Path, module: nn.Module, args: tuple[Any, ...], dims: tuple[Any, ...], label: str) -> Path:
    """Compiles to a file; returns its path, in a temporary folder if the cache folder cannot be written."""
    print(f"passes: compiling {label}, once; kept in {path.parent}", file=sys.stderr)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        warnings.warn(f"passes: {path.parent}: {error.strerror}; compiled passes are not kept", stacklevel=3)
        path = Path(tempfile.mkdtemp(prefix="sage_passes_")) / path.name
    with atomic_path(path) as temporary, warnings.catch_warnings(action="ignore"), torch.inference_mode(False), torch.no_grad():
        program = torch.export.export(
            module, args, dynamic_shapes=dims, strict=False, prefer_deferred_runtime_asserts_over_guards=True
        )
        built = temporary.with_suffix(PACKAGE_SUFFIX)
        try:
            torch._inductor.aoti_compile_and_package(program, package_path=str(built), inductor_configs=OPTIONS)
            os.replace(built, temporary)
        finally:
            built.unlink(missing_ok=True)
    return path


def _digest(module: nn.Module, label: str, depends_on: Any, device: torch.device) -> str:
    facts = [environment(device), type(module).__name__, label, depends_on, str(next(module.parameters()).dtype)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]
