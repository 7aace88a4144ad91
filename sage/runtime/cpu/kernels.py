"""Kernels for few rows on a CPU: one library of C++ functions, built once per processor and kept beside the compiled passes.

`sage_draft::joint_linear` runs several linear layers of one input, `sage_draft::folded_attention` attention of few queries to
the keys of a cache. torch's kernels take two to six times as long for few rows on some processors. Weights and keys are used in
place: there is no packed copy, and weights that change are seen by the next call. Compiled passes call the functions by name,
without torch's dispatcher.

Shapes: M rows, K inputs, N outputs of one layer; B batch, H KV heads, R query rows of a KV head, S keys, d head size.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from sage.io.files import atomic_path, json_digest
from sage.io.machine import instructions
from sage.runtime.package_folder import mark_used, only_process, passes_folder, warn_once, writable_path

DTYPES = (torch.float32, torch.bfloat16)
MIN_BYTES = 1_000_000  # of a module's weights; below, calls take longer than what they compute
CPU = torch.device("cpu")
FOLDER = Path(__file__).parent
SOURCES = [FOLDER / "joint_linear.cpp", FOLDER / "folded_attention.cpp"]
HEADERS = [FOLDER / "products.h", FOLDER / "vectors.h"]
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-shared", "-fPIC", "-w")

FEW_ROWS = 64  # of a prompt, up to which `joint_linear` is the fastest kernel for a layer
MAX_WEIGHTS = 16  # of a call
MULTIPLE = 16  # of which the head size has to be one: the lanes of the widest vectors

OPERATORS = torch.library.Library("sage_draft", "DEF")
OPERATORS.define(
    "joint_linear(Tensor input, Tensor[] weights, int threads) -> Tensor", tags=(torch.Tag.needs_contiguous_strides,)
)
JOINT_LINEAR = torch.ops.sage_draft.joint_linear.default
OPERATORS.define("folded_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale, int threads) -> Tensor")
FOLDED_ATTENTION = torch.ops.sage_draft.folded_attention.default
C_SHIMS = {
    JOINT_LINEAR: [
        "int32_t aoti_torch_cpu_joint_linear(AtenTensorHandle input, const AtenTensorHandle* weights, int64_t num_weights, "
        "int64_t threads, AtenTensorHandle* output)"
    ],
    FOLDED_ATTENTION: [
        "int32_t aoti_torch_cpu_folded_attention(AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, "
        "AtenTensorHandle* mask, double scale, int64_t threads, AtenTensorHandle* output)"
    ],
}


def kernel_digest() -> str:
    """Returns a digest of what the kernels depend on: their source, the options of the compiler, torch and the processor."""
    sources = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (*SOURCES, *HEADERS)]
    return json_digest([sources, FLAGS, torch.__version__, instructions(CPU)])


@cache
def kernels() -> ctypes.CDLL | None:
    """Returns the library of the kernels, built if needed; None, with a warning, if the compiler cannot build it."""
    path = passes_folder() / f"kernels-{kernel_digest()}{sysconfig.get_config_var('SHLIB_SUFFIX')}"
    try:
        if not path.is_file():
            path = writable_path(path)
            with only_process(path, "the kernels for few rows"):
                if not path.is_file():
                    _build(path)
        library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)  # compiled passes find its functions by name
    except (OSError, subprocess.CalledProcessError) as error:
        reason = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        warn_once(f"passes: the kernels for few rows cannot be built ({' '.join(reason.split())[:300]}); torch's are used")
        return None
    except RuntimeError:  # there is no C++ compiler; a compiled pass fails for the same reason, and says so
        return None
    mark_used(path)
    return library


def _build(path: Path) -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler

    torch_folder = Path(torch.__file__).parent
    with atomic_path(path) as temporary:
        sources = [str(source) for source in SOURCES]
        options = [*FLAGS, f"-I{torch_folder}/include", f"-L{torch_folder}/lib"]
        command = [get_cpp_compiler(), *options, *sources, "-o", str(temporary), "-ltorch_cpu"]
        subprocess.run(command, check=True, capture_output=True, text=True)


def has_kernels(module: nn.Module) -> bool:
    """Whether the kernels compute the linear layers of a module.

    Loads them: a compiled pass that contains them cannot be loaded before.
    """
    weights = {weight.data_ptr(): weight for weight in module.parameters() if weight.dim() == 2}.values()
    if any(weight.device.type != "cpu" or weight.dtype not in DTYPES for weight in weights):
        return False
    return sum(weight.nbytes for weight in weights) >= MIN_BYTES and kernels() is not None


@contextmanager
def fast_prompts(model: nn.Module, is_enabled: bool) -> Iterator[None]:
    """Runs the linear layers of `model` with kernels that are faster than torch's inside the block; without gradients.

    Args:
        is_enabled: False for torch's kernels, the reference.
    """
    is_used = is_enabled and not torch.is_grad_enabled() and has_kernels(model)
    layers = [layer for layer in model.modules() if type(layer) is nn.Linear] if is_used else []
    for layer in layers:
        layer.__dict__["forward"] = partial(_prompt_linear, layer)
    try:
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward")


def _prompt_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """Returns `layer(x)`; x: [.., K]."""
    if x.numel() <= FEW_ROWS * x.shape[-1]:
        out = joint_linear(x.contiguous(), [layer.weight], torch.get_num_threads())
        return out if layer.bias is None else out + layer.bias
    if x.dtype == torch.float32 and torch.backends.mkldnn.is_available():  # torch takes MKL, which is slower on some processors
        many: Tensor = torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, "none", [], "")
        return many
    return nn.functional.linear(x, layer.weight, layer.bias)


@torch.library.register_fake("sage_draft::joint_linear", lib=OPERATORS)
def _linear_shape(input: Tensor, weights: Sequence[Tensor], threads: int) -> Tensor:
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
    library = kernels()
    assert library is not None and len(weights) <= MAX_WEIGHTS, "callers check both"
    count, depth = len(weights), input.shape[-1]
    out = _linear_shape(input, weights, threads)
    pointers = (ctypes.c_void_p * count)(*[weight.data_ptr() for weight in weights])
    sizes = (ctypes.c_int64 * count)(*[weight.shape[0] for weight in weights])
    numbers = [ctypes.c_int64(number) for number in (input.numel() // depth, depth, count)]
    x, y, is_half = (
        ctypes.c_void_p(input.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_int32(input.dtype == torch.bfloat16),
    )
    library.sage_joint_linear(x, *numbers, pointers, sizes, y, is_half, ctypes.c_int64(threads))
    return out


OPERATORS.impl("joint_linear", joint_linear, "CPU")


@torch.library.register_fake("sage_draft::folded_attention", lib=OPERATORS)
def _attention_shape(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, threads: int) -> Tensor:
    return query.new_empty(query.shape)


def folded_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, threads: int) -> Tensor:
    """Returns softmax(scale * query key^T + mask) value for float32 or bfloat16, computed in float32.

    Args:
        query: [B, H, R, d]; d a multiple of 16, the rows of a head contiguous.
        key, value: [B, H, S, d], the rows of a head contiguous.
        mask: additive, of the query's dtype, [1 or B, 1, R, S] with contiguous rows.
        scale: of the products.
        threads: number of threads.

    Returns:
        [B, H, R, d].
    """
    library = kernels()
    assert library is not None, "callers check it"
    out = _attention_shape(query, key, value, mask, scale, threads)
    of_mask = (0, 0) if mask is None else (mask.stride(0) if mask.shape[0] > 1 else 0, mask.stride(2))
    strides = [stride for given in (query, key, value) for stride in given.stride()[:2]]
    sizes = (ctypes.c_int64 * 13)(*query.shape[:3], key.shape[2], query.shape[3], *strides, *of_mask)
    data = [ctypes.c_void_p(given if given is None else given.data_ptr()) for given in (query, key, value, mask, out)]
    is_half = ctypes.c_int32(query.dtype == torch.bfloat16)
    library.sage_folded_attention(*data, sizes, ctypes.c_double(scale), is_half, ctypes.c_int64(threads))
    return out


OPERATORS.impl("folded_attention", folded_attention, "CPU")
