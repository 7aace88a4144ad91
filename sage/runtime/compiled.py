"""Pass functions compiled ahead of time by AOTInductor, kept on disk.

`torch.export` traces a function once, Inductor compiles it to a shared library, and loading that takes milliseconds. Compared
with `torch.compile`, a call evaluates no guards and has no Python wrapper, which take as long as a third of a small pass, and a
new process traces nothing. Weights are not in the file: the library uses the tensors of the loaded model.

A file is named by a digest of all that it depends on: package versions, the source of the function, the model's configuration,
dtype, processor and number of threads.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sage.io.files import atomic_path, json_digest
from sage.io.machine import environment
from sage.io.model_files import in_one_line
from sage.runtime.cpu import C_SHIMS, has_kernels, kernel_digest, use_kernels
from sage.runtime.package_folder import PACKAGE_SUFFIX, mark_used, only_process, passes_folder, prune, warn_once, writable_path
from sage.runtime.pass_function import Executor, PassFunction, PassInputs, Run
from sage.runtime.timing import preparation

OPTIONS = {
    "aot_inductor.package_constants_in_so": False,
    "always_keep_tensor_constants": True,  # otherwise weights of up to 8 elements become part of the code
    "aot_inductor.custom_ops_to_c_shims": C_SHIMS,
    "realize_reads_threshold": 1,  # otherwise every layer computes cos and sin again, for every head, if they read little
}
SPARE_ROWS = 1  # a compiled pass assumes more cache rows than keys


class Compiled(Executor):
    """Runs functions compiled: one package for a single entry, one for several."""

    max_prompt = 128

    def bind(self, function: PassFunction) -> Run:
        if self not in function.kept:
            function.kept[self] = CompiledFunction(function)
        run: CompiledFunction = function.kept[self]
        run.refresh()
        return run

    def capacity(self, num_tokens: int) -> int:
        return num_tokens + SPARE_ROWS


class CompiledFunction:
    """The packages of a function by variant; None for a variant that cannot be compiled or has failed, and runs eagerly."""

    def __init__(self, function: PassFunction) -> None:
        self._function = function
        self.packages: dict[tuple[bool, ...], Package | None] = {}

    def refresh(self) -> None:
        """Looks up the addresses of the weights again."""
        for package in self.packages.values():
            if package is not None:
                package.refresh()

    def __call__(self, inputs: PassInputs) -> Sequence[Tensor]:
        variant, tensors = self._function.variant(inputs), inputs.flat()
        if variant not in self.packages:
            self.packages[variant] = compiled(self._function, variant, tensors[0].device)
        package = self.packages[variant]
        if package is None:
            return self._function.compute(inputs)
        try:
            return package(tensors)
        except RuntimeError as error:
            label = self._function.label(variant)
            warn_once(f"passes: {label} cannot run compiled ({_reason(error)}); it runs eagerly")
            self.packages[variant] = None
            return self(inputs)


class Package:
    """A compiled function with the weights of a model, to which the library holds pointers; called with flat arguments."""

    def __init__(self, path: Path, module: nn.Module, device: torch.device) -> None:
        from torch._inductor import aoti_load_package

        index = -1 if device.index is None else device.index
        self._compiled = aoti_load_package(str(path), run_single_threaded=True, device_index=index)
        self._weight_slots = {name: _weight_slot(module, name) for name in self._compiled.get_constant_fqns()}
        self._pointers: list[int] = []
        self._run: Callable[..., Any] = self._compiled.loader.run  # without the flattening of arguments, 60 us per call
        self.refresh()

    def refresh(self) -> None:
        """Looks up the addresses of the weights again. Call it when they may have moved, as by a cast."""
        pointers = [weights[key].data_ptr() for weights, key in self._weight_slots.values()]
        if pointers != self._pointers:
            self._constants = {name: weights[key].detach() for name, (weights, key) in self._weight_slots.items()}
            self._compiled.load_constants(self._constants, check_full_update=True, user_managed=True)
            self._pointers = pointers

    def __call__(self, args: Sequence[Tensor]) -> Sequence[Tensor]:
        out: Sequence[Tensor] = self._run(args)
        return out


def _weight_slot(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Returns the dictionary of a submodule that holds a weight, and the weight's key in it; a module finds its attributes more
    slowly.
    """
    prefix, _, key = name.rpartition(".")
    owner = module.get_submodule(prefix)
    return (owner._parameters if key in owner._parameters else owner._buffers), key


@preparation()
def compiled(function: PassFunction, variant: tuple[bool, ...], device: torch.device) -> Package | None:
    """Returns a variant compiled, from disk if it was compiled before; None, with a warning, if that fails."""
    label = function.label(variant)
    try:
        kernels = kernel_digest() if has_kernels(function) else None
        dtype = str(next(function.parameters()).dtype)
        depends_on = [type(function).__name__, label, variant, function.depends_on, dtype, kernels]
        digest = json_digest([depends_on, environment(device)])
        path = passes_folder() / f"{digest}{PACKAGE_SUFFIX}"
        if known := _loaded(path, function, device):
            return known
        path = writable_path(path)
        with only_process(path, label):
            return _loaded(path, function, device) or _newly_compiled(path, function, variant, device, bool(kernels))
    except Exception as error:
        warn_once(f"passes: cannot be compiled ({_reason(error)}); they run eagerly")
        return None


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {in_one_line(error)}"[:300]


def _loaded(path: Path, module: nn.Module, device: torch.device) -> Package | None:
    """Returns the package in a file; None if there is none or it is damaged."""
    if not path.is_file():
        return None
    try:
        package = Package(path, module, device)
    except (RuntimeError, ValueError, OSError):
        return None
    mark_used(path)
    return package


def _newly_compiled(
    path: Path, function: PassFunction, variant: tuple[bool, ...], device: torch.device, takes_kernels: bool
) -> Package:
    """Compiles to a file and loads it; deletes packages that are no longer used."""
    print(f"passes: compiling {function.label(variant)}, once; kept in {path.parent}", file=sys.stderr)
    with atomic_path(path) as temporary, warnings.catch_warnings(action="ignore"), torch.inference_mode(False), torch.no_grad():
        args, dims = function.example(variant, device)  # no inference tensors, which cannot be traced
        program = torch.export.export(
            function, args, dynamic_shapes=dims, strict=False, prefer_deferred_runtime_asserts_over_guards=True
        )
        if takes_kernels:
            use_kernels(program)
        package = BytesIO()  # torch ends the process where it cannot write a file
        torch._inductor.aoti_compile_and_package(program, package_path=package, inductor_configs=OPTIONS)
        temporary.write_bytes(package.getvalue())
    prune(path.parent)
    return Package(path, function, device)
