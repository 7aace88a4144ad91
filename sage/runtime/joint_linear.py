"""`sage_draft::joint_linear`: several linear layers of one input as one operator, for few rows on a CPU.

A good kernel multiplies few rows in the time that reading the weights takes; torch's takes two to six times as long on some
processors. The kernel (joint_linear.cpp) uses the weights as `nn.Linear` stores them: there is no packed copy, and weights that
change are seen by the next call.

Shapes: M rows, K inputs, N outputs of one layer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from sage.runtime.kernels import OPERATORS, kernels

MAX_WEIGHTS = 16  # of a call
C_FUNCTION = (
    "int32_t aoti_torch_cpu_joint_linear(AtenTensorHandle input, const AtenTensorHandle* weights, int64_t num_weights, "
    "int64_t threads, AtenTensorHandle* output)"
)

OPERATORS.define(
    "joint_linear(Tensor input, Tensor[] weights, int threads) -> Tensor", tags=(torch.Tag.needs_contiguous_strides,)
)
JOINT_LINEAR = torch.ops.sage_draft.joint_linear.default


@torch.library.register_fake("sage_draft::joint_linear", lib=OPERATORS)
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
    out, call = prepared(input, weights, threads)
    call()
    return out


def prepared(input: Tensor, weights: Sequence[Tensor], threads: int) -> tuple[Tensor, Callable[[], object]]:
    """Returns the tensor for the result of `joint_linear`, and the call that computes it without any work in Python, as in a
    compiled pass. The caller keeps all tensors alive.
    """
    library = kernels()
    assert library is not None and len(weights) <= MAX_WEIGHTS, "callers check both"
    count, depth = len(weights), input.shape[-1]
    out = _fake(input, weights, threads)
    pointers = (ctypes.c_void_p * count)(*[weight.data_ptr() for weight in weights])
    sizes = (ctypes.c_int64 * count)(*[weight.shape[0] for weight in weights])
    numbers = [ctypes.c_int64(number) for number in (input.numel() // depth, depth, count)]
    is_half = ctypes.c_int32(input.dtype == torch.bfloat16)
    x, y = ctypes.c_void_p(input.data_ptr()), ctypes.c_void_p(out.data_ptr())
    return out, partial(library.sage_joint_linear, x, *numbers, pointers, sizes, y, is_half, ctypes.c_int64(threads))


OPERATORS.impl("joint_linear", joint_linear, "CPU")
