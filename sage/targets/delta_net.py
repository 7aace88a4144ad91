"""The linear layers of targets, with the states of our caches in place of the model's."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

CHUNKED = "torch_chunk_gated_delta_rule"  # in the model's module: transformers' own, or that of the package fla


class DeltaNet:
    """Base class of a model's gated delta net: the model's own `forward` unless a cache is ours."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[1, T, D] -> [1, T, D]."""
        states: Any = kwargs.get("cache", kwargs.get("cache_params"))  # its name since transformers 5.24, and before
        if not hasattr(states, "mix"):
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        # In the model's order: ZeRO-3 gathers weights module by module, and ranks without requests run the model's forward.
        inputs, gate, beta, decay = self.projected(hidden_states)
        decay = -self.A_log.float().exp() * nn.functional.softplus(decay.float() + self.dt_bias)
        mixed = states.mix(self, inputs, decay, beta.sigmoid())
        out = self.norm(mixed.reshape(-1, self.head_v_dim), gate.reshape(-1, self.head_v_dim))
        return self.out_proj(out.view(*hidden_states.shape[:-1], -1))

    def projected(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the inputs of the convolution [1, T, C], the gate, beta and decay, of which the last two are not scaled."""
        if hasattr(self, "in_proj_qkv"):
            return self.in_proj_qkv(hidden), self.in_proj_z(hidden), self.in_proj_b(hidden), self.in_proj_a(hidden)
        *parts, gate, beta, decay = self.fix_query_key_value_ordering(self.in_proj_qkvz(hidden), self.in_proj_ba(hidden))
        return torch.cat([part.flatten(2) for part in parts], -1), gate, beta, decay

    def chunked_rule(
        self: Any, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Runs the model's chunked kernel; returns its output [1, T, H, dv] and the last state [1, H, dk, dv]."""
        rule = getattr(sys.modules[type(self).__mro__[2].__module__], CHUNKED)
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        return rule(query, key, value, g=decay, beta=beta, initial_state=state, **options)


def use_our_states(text_model: Any) -> None:
    """Changes the class of a text model's linear layers, which keep weights and names."""
    for layer in text_model.layers:
        net = getattr(layer, "linear_attn", None)
        if net is not None and not isinstance(net, DeltaNet):
            kind: Any = type(net)
            net.__class__ = _with_our_states(kind)


@cache
def _with_our_states(kind: type) -> type:
    return type(kind.__name__, (DeltaNet, kind), {"__module__": kind.__module__})
