"""Stand-ins for a GPU: `torch.cuda` with recorded calls, and attention kernels in the layouts and with the arguments of torch.

`varlen_attn` has the signature of torch 2.11; later versions add optional arguments. Nothing is read from the device.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sage.runtime import prefix_attention
from sage.runtime.prefix_attention import softmax_attention

LSE_ALIGNMENT = 32  # queries; of the memory-efficient kernel


class FakeCuda:
    """Pretends that there are `num_gpus` GPUs; their tensors stay on the CPU.

    Attributes:
        calls: (function, argument) in the order of the calls.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_gpus: int = 4) -> None:
        self.calls: list[tuple[str, object]] = []
        for name in ("synchronize", "set_device"):
            monkeypatch.setattr(torch.cuda, name, lambda device=None, name=name: self.calls.append((name, device)))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda on: self.calls.append(("enable_cudnn_sdp", on)))
        empty = torch.empty

        def empty_on_cpu(*size: object, device: object = None, **options: object) -> torch.Tensor:
            return empty(*size, device="cpu" if "cuda" in str(device) else device, **options)

        monkeypatch.setattr(torch, "empty", empty_on_cpu)


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> tuple[Tensor, Tensor]:
    """Returns attention [T_q, H, d] and its log-sum-exp [H, T_q]; plus infinity for an empty sequence, as the flash kernel."""
    assert return_aux.lse and scale is not None and type(max_q) is type(max_k) is int
    for states in (query, key, value):
        assert states.dim() == 3 and states.stride(-1) == 1 and states.shape[1:] == query.shape[1:]
    for ends in (cu_seq_q, cu_seq_k):
        assert ends.dtype is torch.int32 and ends.is_contiguous() and ends.device == query.device
    queries, keys = (torch.arange(len(states), device=query.device) for states in (query, key))
    number = (queries[:, None] >= cu_seq_q[1:]).sum(1)
    seen = (keys >= cu_seq_k[number][:, None]) & (keys < cu_seq_k[number + 1][:, None])
    mask = torch.zeros_like(seen, dtype=query.dtype).masked_fill(~seen, -torch.inf)
    out, lse = softmax_attention(query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), mask, scale)
    return out.transpose(0, 1).contiguous(), lse.masked_fill(lse.isinf(), torch.inf)


def efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor, compute_log_sumexp: bool, *, scale: float
) -> tuple[Tensor, Tensor, None, None]:
    """`aten._scaled_dot_product_efficient_attention`: a transposed result, and a log-sum-exp of padded queries."""
    assert compute_log_sumexp and all(stride % 8 == 0 for stride in attn_bias.stride()[:-1])
    out, lse = softmax_attention(query[0], key[0], value[0], attn_bias[0], scale)
    padding = -query.shape[2] % LSE_ALIGNMENT
    transposed = out[None].transpose(1, 2).contiguous().transpose(1, 2)
    return transposed, torch.nn.functional.pad(lse, (0, padding), value=torch.nan)[None], None, None


def use_gpu_kernels(monkeypatch: pytest.MonkeyPatch, device_type: str) -> Counter[str]:
    """Makes attention in two parts call these kernels on a device; returns the number of calls of each, which grows."""
    calls = Counter[str]()

    def counted(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls[kernel.__name__] += 1
            return kernel(*args, **options)

        return call

    monkeypatch.setattr(prefix_attention, "KERNEL_DEVICES", (device_type,))
    monkeypatch.setattr(prefix_attention, "varlen_attn", counted(varlen_attn))
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_efficient_attention", counted(efficient_attention))
    return calls
