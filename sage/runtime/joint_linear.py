"""`sage_draft::joint_linear`: several linear layers of one input as one operator, for few rows on a CPU.

A good kernel multiplies few rows in the time that reading the weights takes; torch's takes two to six times as long on some
processors. The kernel (joint_linear.cpp) uses the weights as `nn.Linear` stores them: there is no packed copy, and weights that
change are seen by the next call. It is built once per processor and kept beside the compiled passes, which call it without
torch's dispatcher. Does not own: which layers run with it (sage.runtime.linear_layers).

Shapes: M rows, K inputs, N outputs of one layer.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from sage.io.files import atomic_path, json_digest
from sage.io.machine import instructions
from sage.runtime.package_folder import mark_used, only_process, passes_folder, warn_once, writable_path

DTYPES = (torch.float32, torch.bfloat16)
MAX_WEIGHTS = 16  # of a call
SOURCE = Path(__file__).with_suffix(".cpp")
HEADER = SOURCE.with_suffix(".h")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-shared", "-fPIC", "-w")
C_FUNCTION = (
    "int32_t aoti_torch_cpu_joint_linear(AtenTensorHandle input, const AtenTensorHandle* weights, int64_t num_weights, "
    "int64_t threads, AtenTensorHandle* output)"
)

_OPERATORS = torch.library.Library("sage_draft", "DEF")
_OPERATORS.define(
    "joint_linear(Tensor input, Tensor[] weights, int threads) -> Tensor", tags=(torch.Tag.needs_contiguous_strides,)
)
JOINT_LINEAR = torch.ops.sage_draft.joint_linear.default


def kernel_digest() -> str:
    """Returns a digest of what the kernel depends on: its source, the options of the compiler, torch and the processor."""
    source = hashlib.sha256(SOURCE.read_bytes() + HEADER.read_bytes()).hexdigest()
    return json_digest([source, FLAGS, torch.__version__, instructions(torch.device("cpu"))])


@cache
def kernel() -> ctypes.CDLL | None:
    """Returns the kernel's library, built if needed; None, with a warning, if the compiler cannot build it.

    Raises:
        RuntimeError: there is no C++ compiler.
    """
    path = passes_folder() / f"joint_linear-{kernel_digest()}{sysconfig.get_config_var('SHLIB_SUFFIX')}"
    try:
        if not path.is_file():
            path = writable_path(path)
            with only_process(path, "the kernel of linear layers"):
                if not path.is_file():
                    _build(path)
        found = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)  # compiled passes find its function by name
    except (OSError, subprocess.CalledProcessError) as error:
        reason = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        warn_once(f"passes: the kernel of linear layers cannot be built ({' '.join(reason.split())[:300]}); torch's is used")
        return None
    mark_used(path)
    return found


def _build(path: Path) -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler

    torch_folder = Path(torch.__file__).parent / "lib"
    with atomic_path(path) as temporary:
        command = [get_cpp_compiler(), *FLAGS, str(SOURCE), "-o", str(temporary), f"-L{torch_folder}", "-ltorch_cpu"]
        subprocess.run(command, check=True, capture_output=True, text=True)


@torch.library.register_fake("sage_draft::joint_linear", lib=_OPERATORS)
def _fake(input: Tensor, weights: Sequence[Tensor], threads: int) -> Tensor:
    return input.new_empty(*input.shape[:-1], sum(weight.shape[0] for weight in weights))


def joint_linear(input: Tensor, weights: Sequence[Tensor], threads: int) -> Tensor:
    """Returns the results of linear layers without bias, side by side; float32 or bfloat16, sums in float32.

    Args:
        input: [.., K], contiguous.
        weights: of each layer [N, K], contiguous.
        threads: number of threads.

    Returns:
        [.., sum of N].
    """
    library = kernel()
    assert library is not None and len(weights) <= MAX_WEIGHTS, "callers check both"
    count, depth = len(weights), input.shape[-1]
    out = _fake(input, weights, threads)
    pointers = (ctypes.c_void_p * count)(*[weight.data_ptr() for weight in weights])
    sizes = (ctypes.c_int64 * count)(*[weight.shape[0] for weight in weights])
    numbers = [ctypes.c_int64(number) for number in (input.numel() // depth, depth, count)]
    is_half = ctypes.c_int32(input.dtype == torch.bfloat16)
    x, y = ctypes.c_void_p(input.data_ptr()), ctypes.c_void_p(out.data_ptr())
    library.sage_joint_linear(x, *numbers, pointers, sizes, y, is_half, ctypes.c_int64(threads))
    return out


_OPERATORS.impl("joint_linear", joint_linear, "CPU")
