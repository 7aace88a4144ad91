"""Functions compiled ahead of time by AOTInductor, kept on disk.

`torch.export` traces a function once, Inductor compiles it to a shared library, and loading that takes milliseconds. Compared
with `torch.compile`, a call evaluates no guards and has no Python wrapper, which take as long as a third of a small pass, and a
new process traces nothing. Weights are not in the file: the library uses the tensors of the loaded model.

A file is named by a digest of all that it depends on: package versions, the source of this package, the model's configuration,
dtype, processor and number of threads.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sage.io.files import atomic_path, json_digest
from sage.io.machine import environment
from sage.io.model_files import in_one_line
from sage.passes.package_folder import PACKAGE_SUFFIX, mark_used, only_process, passes_folder, prune, warn_once, writable_path

OPTIONS = {
    "aot_inductor.package_constants_in_so": False,
    "always_keep_tensor_constants": True,  # otherwise weights of up to 8 elements become part of the code
    "realize_reads_threshold": 1,  # otherwise every layer computes cos and sin again, for every head, if they read little
}
Example = Callable[[], tuple[tuple[Any, ...], tuple[Any, ...]]]
COMPILATIONS: list[tuple[float, float]] = []  # when this process was in `compiled`, in seconds of `time.perf_counter`


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
        self._owners = {name: _owner(module, name) for name in self._compiled.get_constant_fqns()}
        self._pointers: list[int] = []
        self._run: Callable[..., Any] = self._compiled.loader.run  # without the flattening of arguments, 60 us per call
        self.refresh()

    def refresh(self) -> None:
        found = {name: getattr(owner, key) for name, (owner, key) in self._owners.items()}
        pointers = [weight.data_ptr() for weight in found.values()]
        if pointers != self._pointers:
            self._found = {name: weight.detach() for name, weight in found.items()}
            self._compiled.load_constants(self._found, check_full_update=True, user_managed=True)
            self._pointers = pointers

    def __call__(self, args: Sequence[Tensor]) -> Sequence[Tensor]:
        try:
            out: Sequence[Tensor] = self._run(args)
        except RuntimeError as error:
            warn_once(f"passes: {self._label} cannot run compiled ({_reason(error)}); it runs eagerly")
            self._run = self._eager
            out = self._eager(args)
        return out


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Returns the submodule that has a weight, and the weight's name there."""
    prefix, _, key = name.rpartition(".")
    return module.get_submodule(prefix), key


def compiled(module: nn.Module, example: Example, label: str, depends_on: Any) -> Run:
    """Returns `module` compiled, from disk if it was compiled before; runs it eagerly, with a warning, if that fails.

    Args:
        example: returns example arguments of `forward`, and of each the dynamic dimensions, as `dynamic_shapes` of
            `torch.export.export`.
        label: names the pass in messages.
        depends_on: JSON-serializable description of the model.
    """
    start = time.perf_counter()
    try:
        return _known_or_new(module, example, label, depends_on)
    finally:
        COMPILATIONS.append((start, time.perf_counter()))


def _known_or_new(module: nn.Module, example: Example, label: str, depends_on: Any) -> Run:
    with torch.inference_mode(False):  # an inference tensor cannot be traced
        args, dims = example()
    path = passes_folder() / f"{_digest(module, label, depends_on, args[0].device)}{PACKAGE_SUFFIX}"
    try:
        if known := _loaded(path, module, args, label):
            return known
        path = writable_path(path)
        with only_process(path, label):
            return _loaded(path, module, args, label) or _newly_compiled(path, module, args, dims, label)
    except Exception as error:
        warn_once(f"passes: cannot be compiled ({_reason(error)}); they run eagerly")
        return Eager(module, args)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {in_one_line(error)}"[:300]


def _loaded(path: Path, module: nn.Module, args: tuple[Any, ...], label: str) -> Package | None:
    """Returns the package in a file; None if there is none or it is damaged."""
    if not path.is_file():
        return None
    try:
        package = Package(path, module, args, label)
    except (RuntimeError, ValueError, OSError):
        return None
    mark_used(path)
    return package


def _newly_compiled(path: Path, module: nn.Module, args: tuple[Any, ...], dims: tuple[Any, ...], label: str) -> Package:
    """Compiles to a file and loads it; deletes packages that are no longer used."""
    print(f"passes: compiling {label}, once; kept in {path.parent}", file=sys.stderr)
    _compile_to(path, module, args, dims)
    prune(path.parent)
    return Package(path, module, args, label)


class Eager:
    """A function of tensors, called as it is with flat arguments."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._module, self._spec = module, pytree.tree_structure(args)

    def refresh(self) -> None:
        """Does nothing: the function reads the module's own weights."""

    def __call__(self, args: Sequence[Tensor]) -> Sequence[Tensor]:
        out: Sequence[Tensor] = self._module(*pytree.tree_unflatten(list(args), self._spec))
        return out


def _compile_to(path: Path, module: nn.Module, args: tuple[Any, ...], dims: tuple[Any, ...]) -> None:
    with atomic_path(path) as temporary, warnings.catch_warnings(action="ignore"), torch.inference_mode(False), torch.no_grad():
        program = torch.export.export(
            module, args, dynamic_shapes=dims, strict=False, prefer_deferred_runtime_asserts_over_guards=True
        )
        package = BytesIO()  # torch ends the process where it cannot write a file
        torch._inductor.aoti_compile_and_package(program, package_path=package, inductor_configs=OPTIONS)
        temporary.write_bytes(package.getvalue())


def _digest(module: nn.Module, label: str, depends_on: Any, device: torch.device) -> str:
    facts = [environment(device), type(module).__name__, label, depends_on, str(next(module.parameters()).dtype)]
    return json_digest(facts)
