"""Kernels for few rows on a CPU: one library of C++ functions, built once per processor and kept beside the compiled passes.

Compiled passes call the functions by name, without torch's dispatcher. Does not own: what they compute (joint_linear,
folded_attention), and which calls of a pass run with them (linear_layers, attention_layers).
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sage.io.files import atomic_path, json_digest
from sage.io.machine import instructions, processor_name
from sage.runtime.package_folder import mark_used, only_process, passes_folder, warn_once, writable_path

DTYPES = (torch.float32, torch.bfloat16)
MIN_BYTES = 1_000_000  # of a module's weights; below, calls take longer than what they compute
CPU = torch.device("cpu")
FOLDER = Path(__file__).parent
SOURCES = [FOLDER / "joint_linear.cpp", FOLDER / "folded_attention.cpp"]
HEADERS = [FOLDER / "products.h", FOLDER / "shim.h", FOLDER / "vectors.h"]
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-shared", "-fPIC", "-w")

OPERATORS = torch.library.Library("sage_draft", "DEF")


def kernel_digest() -> str:
    """Returns a digest of what the kernels depend on: their source, the options of the compiler, torch and the processor."""
    sources = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (*SOURCES, *HEADERS)]
    return json_digest([sources, FLAGS, torch.__version__, instructions(CPU)])


@cache
def kernels() -> ctypes.CDLL | None:
    """Returns the library of the kernels, built if needed; None, with a warning, if the compiler cannot build it.

    Raises:
        RuntimeError: there is no C++ compiler.
    """
    path = passes_folder() / f"kernels-{kernel_digest()}{sysconfig.get_config_var('SHLIB_SUFFIX')}"
    try:
        if not path.is_file():
            path = writable_path(path)
            with only_process(path, "the kernels for few rows"):
                if not path.is_file():
                    _build(path)
        found = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)  # compiled passes find its functions by name
    except (OSError, subprocess.CalledProcessError) as error:
        reason = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        warn_once(f"passes: the kernels for few rows cannot be built ({' '.join(reason.split())[:300]}); torch's are used")
        return None
    mark_used(path)
    return found


def _build(path: Path) -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler

    torch_folder = Path(torch.__file__).parent / "lib"
    with atomic_path(path) as temporary:
        sources = [str(source) for source in SOURCES]
        command = [get_cpp_compiler(), *FLAGS, *sources, "-o", str(temporary), f"-L{torch_folder}", "-ltorch_cpu"]
        subprocess.run(command, check=True, capture_output=True, text=True)


def kernel_facts(module: nn.Module) -> str | None:
    """Returns a description of the kernels that a compiled pass may contain; None if it runs with torch's anyway.

    Loads the kernels: a compiled pass that contains them cannot be loaded before.
    """
    weights = {weight.data_ptr(): weight for weight in module.parameters() if weight.dim() == 2}.values()
    if any(weight.device.type != "cpu" or weight.dtype not in DTYPES for weight in weights):
        return None
    if sum(weight.nbytes for weight in weights) < MIN_BYTES or kernels() is None:
        return None
    return f"{kernel_digest()} {processor_name(CPU)}"


class Timings(NamedTuple):
    """Seconds with a kernel of this project and with torch's; certain unless other processes disturbed every run of a call."""

    ours: float
    theirs: float
    is_certain: bool = True


class Choice(NamedTuple):
    """What was chosen and measured, in words, and whether the measurement is certain."""

    text: str
    is_certain: bool = True


def insert_call(graph: Any, target: Any, *args: Any) -> Any:
    """Returns a new node of an exported graph at its point of insertion: a call of an operator, and what it returns."""
    node = graph.call_function(target, args)
    values = torch.fx.map_arg(args, lambda arg: arg.meta["val"])
    with next(value for value in values if isinstance(value, Tensor)).fake_mode:
        node.meta["val"] = target(*values)
    return node
