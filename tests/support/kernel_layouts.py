"""Results of attention kernels in the memory layout that CUDA's fused kernels give them, which no device on the CPU has.

The memory-efficient and the flash kernel allocate their result as [B, queries, heads, d] and return it transposed (torch 2.13:
`meta__scaled_dot_product_efficient_attention` and `meta__scaled_dot_product_flash_attention` in torch/_meta_registrations.py);
cuDNN follows the strides of the query. A `view` of such a result that merges heads and queries raises.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn


def use_cuda_layouts(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Makes `scaled_dot_product_attention` return transposed results; returns the list of their shapes, which grows."""
    attend, shapes = nn.functional.scaled_dot_product_attention, []

    def transposed(*args: Any, **options: Any) -> Tensor:
        out = attend(*args, **options)
        shapes.append(out.shape)
        return out.transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", transposed)
    return shapes
