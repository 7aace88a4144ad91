"""Grouped-query attention under a tree mask, without repeating keys and values.

The `sdpa` implementation of transformers materializes repeated keys and values as soon as a mask is given (7x for 28 query and
4 KV heads). Here the query heads of a group are folded into the query rows instead, and the mask is tiled once per pass.

Shapes: B batch, H query heads, G heads per KV head, N queries, S keys, d head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from sage.runtime.cache import Queries
from sage.runtime.prefix_attention import HALF, PassKeys, attend_in_parts

NAME = "sage_tree"
VARLEN = "sage_flash_varlen"  # transformers packs windows for implementations named flash


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_masked: bool | None = None,
    attention_recorder: AttentionRecorder | None = None,
    pass_keys: PassKeys | None = None,
    packed_queries: Queries | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention for the AttentionInterface of transformers.

    The text model forwards `is_masked`, `attention_recorder`, `pass_keys` and `packed_queries` from its own keyword arguments.

    Args:
        query: [B, H, N, d].
        key, value: [B, H // G, S, d].
        attention_mask: additive float [1 or B, 1, G * N, S] from `tile_mask`; None attends as `causal_attention`.
        is_masked: whether the pass has a mask, which some text models drop.
        attention_recorder: records this layer.
        pass_keys: of a pass that attends to its keys in two parts, in place of a mask; B = 1, and keys and values are buffers.
        packed_queries: of a pass of several requests: queries are [1, H, T, d], and the result is [1, T, H, d].

    Returns:
        [B, N, H, d] and None for the weights.

    Raises:
        RuntimeError: the text model has lost the mask, or needs attention that is not implemented here.
    """
    _check_arguments(attention_mask, is_masked, pass_keys, kwargs)
    if pass_keys is not None:
        parts = pass_keys[kwargs.get("sliding_window") is not None]
        return attend_in_parts(query, key, value, parts, scaling or query.shape[-1] ** -0.5).transpose(1, 2), None
    if packed_queries is not None:
        return packed_attention(query, key, value, attention_mask, packed_queries, scaling), None
    batch, heads, length, size = query.shape
    kv_heads = key.shape[1]
    if attention_recorder is not None:
        attention_recorder.add(query, key, scaling or size**-0.5, attention_mask)
    if attention_mask is None and length > 1:
        out = causal_attention(query, key, value, scaling)
    else:
        folded = query.reshape(batch, kv_heads, -1, size)
        out = nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
        out = out.reshape(batch, heads, length, size)  # kernels of GPUs return a transposed result
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, tree_attention)


def _check_arguments(
    attention_mask: Tensor | None, is_masked: bool | None, pass_keys: PassKeys | None, more: dict[str, Any]
) -> None:
    if is_masked is None:
        raise RuntimeError("tree attention: the text model does not forward its keyword arguments to the attention function")
    if is_masked and attention_mask is None:
        raise RuntimeError(
            "tree attention: the text model has lost the mask of the pass, and attention would be causal; its family has to "
            "pass a mask that the text model accepts (see `Family.tree_mask`)"
        )
    for name in ("softcap", "s_aux"):
        if more.get(name) is not None:
            raise RuntimeError(f"tree attention: {name} is not implemented")
    if more.get("sliding_window") is not None and attention_mask is None and pass_keys is None:
        raise RuntimeError("tree attention: a sliding window needs a mask (see `Family.prefill_mask` and `Family.tree_mask`)")


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention within the parts of a packed sequence, by torch's flash kernel, for the vision tower of Qwen2.5-VL.

    Args:
        query, key, value: [1, H, P, d], the patches of all windows.
        scaling: d ** -0.5, which is what the kernel uses.
        cu_seq_lens_q: IntTensor [windows + 1], boundaries of the windows.
        max_length_q: patches of the largest one.

    Returns:
        [1, P, H, d] and None for the weights.
    """
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    out = varlen_attn(query, key, value, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    return out[None], None


AttentionInterface.register(VARLEN, varlen_attention)


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, queries: Queries, scale: float | None = None
) -> Tensor:
    """Attention of the queries of several requests, each to the keys of its own.

    Args:
        query: [1, H, T, d].
        key, value: [B, H // G, S, d].
        mask: additive [B, 1, G * N, S] from `tile_mask`.

    Returns:
        [1, T, H, d].
    """
    padded = queries.pad(query[0].transpose(0, 1)).transpose(1, 2).contiguous()  # [B, H, N, d], as kernels for few rows need it
    folded = padded.view(padded.shape[0], key.shape[1], -1, padded.shape[-1])
    out = nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
    return queries.unpad(out.reshape(padded.shape).transpose(1, 2))[None]


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """Attention of each query to the keys up to its own; the last query and the last key are of the same token.

    On GPUs without a mask, which would take N x S numbers and exclude the flash kernel. Of the kernels without mask, only flash
    takes grouped heads, in half precision; for other dtypes keys and values are repeated there.

    Args:
        query: [B, H, N, d]; key, value: [B, H // G, S, d], S >= N.

    Returns:
        [B, H, N, d].
    """
    group = query.shape[1] // key.shape[1]
    if group > 1 and not _takes_grouped_heads(query):
        key, value = (states[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for states in (key, value))
        group = 1
    attend = partial(nn.functional.scaled_dot_product_attention, query, key, value, scale=scale, enable_gqa=group > 1)
    if query.shape[2] == key.shape[2]:
        return attend(is_causal=True)
    return attend(attn_mask=_lower_right(query.shape[2], key.shape[2], query.device))


def select_backends(device: torch.device) -> None:
    """Disables the cuDNN backend of `scaled_dot_product_attention` in this process if `device` is a GPU.

    cuDNN is torch's first choice on Hopper and Blackwell and builds an execution plan for each pair of query and key lengths
    (23 to 42 ms on an H100, pytorch pull request 191576). In decoding, the number of keys grows in every round, so every pass
    would build one. With a mask and a backward pass it can return NaN (pytorch issue 196678).
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def _lower_right(queries: int, keys: int, device: torch.device) -> Tensor:
    """Returns causal attention of the last `queries` of `keys` tokens: for GPUs without a mask, elsewhere Bool [N, S]."""
    if device.type == "cuda":
        return causal_lower_right(queries, keys)
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def _takes_grouped_heads(query: Tensor) -> bool:
    """Whether a fused kernel of the device shares keys and values between heads."""
    return query.device.type == "cpu" or query.dtype in HALF


class AttentionRecorder:
    """Sums, over the layers of a prefill, the attention of the text after the last image to the visual tokens.

    Args:
        visual_T: BoolTensor [T], the visual tokens.
    """

    def __init__(self, visual_T: Tensor) -> None:
        self.visual = visual_T.nonzero()[:, 0]
        last = int(self.visual[-1]) if len(self.visual) else len(visual_T)
        after = torch.arange(len(visual_T), device=visual_T.device) > last
        self.text = (after & ~visual_T).nonzero()[:, 0]
        self.total = torch.zeros(len(self.visual), device=visual_T.device)
        self.num_layers = 0

    def add(self, query: Tensor, key: Tensor, scaling: float, mask: Tensor | None = None) -> None:
        """Adds one layer. query: [1, H, T, d]; key: [1, KV, S, d], the last T the prompt's; mask: of the pass."""
        if not len(self.visual) or not len(self.text):
            return
        heads, size = query.shape[1], query.shape[-1]
        past = key.shape[2] - query.shape[2]
        text, visual = self.text.to(key.device), self.visual.to(key.device)
        folded = query[0, :, text].view(key.shape[1], -1, size)
        scores = (folded @ key[0].transpose(1, 2)).view(heads, len(text), -1) * scaling
        if mask is None:
            columns = torch.arange(key.shape[2], device=key.device)
            scores = scores.masked_fill(columns > past + text[:, None], -torch.inf)
        else:
            scores = scores + mask[0, 0, text]
        self.total += scores.float().softmax(-1)[..., past + visual].sum(1).mean(0).to(self.total.device)
        self.num_layers += 1

    def mean(self) -> Tensor:
        """[P], mean over layers, heads and text queries."""
        return self.total / max(self.num_layers * len(self.text), 1)


@contextmanager
def use_tree_attention(text_model: nn.Module) -> Iterator[None]:
    """Makes `text_model` attend with `tree_attention` within the block; restores its own implementation afterwards."""
    config: Any = text_model.config
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
