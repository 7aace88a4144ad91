"""`sage_draft::folded_attention`: attention of few queries to the keys of a cache as one operator, on a CPU.

torch's kernel is made for many queries and takes two to three times as long for those of a tree. This one
(folded_attention.cpp) reads each key once for all query heads that share it, in place.

Shapes: B batch, H KV heads, R query rows of a KV head, S keys, d head size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from sage.runtime.kernels import OPERATORS, kernels

MULTIPLE = 16  # of which the head size has to be one: the lanes of the widest vectors
C_FUNCTION = (
    "int32_t aoti_torch_cpu_folded_attention(AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, "
    "AtenTensorHandle* mask, double scale, int64_t threads, AtenTensorHandle* output)"
)

OPERATORS.define("folded_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale, int threads) -> Tensor")
FOLDED_ATTENTION = torch.ops.sage_draft.folded_attention.default


@torch.library.register_fake("sage_draft::folded_attention", lib=OPERATORS)
def _fake(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, threads: int) -> Tensor:
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
    out, call = prepared(query, key, value, mask, scale, threads)
    call()
    return out


def prepared(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, threads: int
) -> tuple[Tensor, Callable[[], object]]:
    """Returns the tensor for the result of `folded_attention`, and the call that computes it, as `joint_linear.prepared`."""
    library = kernels()
    assert library is not None, "callers check it"
    out = _fake(query, key, value, mask, scale, threads)
    of_mask = (0, 0) if mask is None else (mask.stride(0) if mask.shape[0] > 1 else 0, mask.stride(2))
    strides = [stride for given in (query, key, value) for stride in given.stride()[:2]]
    sizes = (ctypes.c_int64 * 13)(*query.shape[:3], key.shape[2], query.shape[3], *strides, *of_mask)
    data = [ctypes.c_void_p(given if given is None else given.data_ptr()) for given in (query, key, value, mask, out)]
    is_half = ctypes.c_int32(query.dtype == torch.bfloat16)
    return out, partial(library.sage_folded_attention, *data, sizes, ctypes.c_double(scale), is_half, ctypes.c_int64(threads))


OPERATORS.impl("folded_attention", folded_attention, "CPU")
