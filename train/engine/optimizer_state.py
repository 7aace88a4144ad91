"""What AdamW keeps of each trained parameter, whole and by name: the float32 weight and its two moments.

DeepSpeed keeps them in one of four ways, by ZeRO stage and precision: in the parameter itself, in a float32 copy of it, in
flat partitions linked to it, or in partitions of the parameter's own. This is the only place that knows which. Whole
tensors by name do not depend on stage or number of ranks, so any of both can go on with what another one saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

WEIGHT, MOMENTS = "weight", ("exp_avg", "exp_avg_sq")
KINDS = (WEIGHT, *MOMENTS)


class Masters:
    """Reads and writes them, one parameter at a time. Every rank has to make the same calls.

    Args:
        draft: the module DeepSpeed has wrapped.
        wrapper: DeepSpeed's optimizer around `optimizer`, or `optimizer` itself where it needs none.
        optimizer: torch's AdamW.
        deepspeed: the package.
    """

    def __init__(self, draft: nn.Module, wrapper: Any, optimizer: torch.optim.Optimizer, deepspeed: Any) -> None:
        self.parameters = {name: p for name, p in draft.named_parameters() if p.requires_grad}
        self._wrapper, self._optimizer, self._deepspeed = wrapper, optimizer, deepspeed
        first = next(iter(self.parameters.values()))
        self._is_partitioned, self._is_linked = hasattr(first, "ds_id"), hasattr(first, "_hp_mapping")

    @torch.no_grad()
    def read(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """(name, whole float32 tensor on the device) of every parameter; `kind` is one of KINDS."""
        self._prime()
        for name, parameter in self.parameters.items():
            yield name, self._whole(parameter, kind)

    @torch.no_grad()
    def write(self, name: str, kind: str, value: Tensor) -> None:
        """Puts back what `read` gave, on however many ranks; with the weight the one that is computed with follows.

        Args:
            value: whole, float32, on any device.
        """
        self._prime()
        parameter = self.parameters[name]
        value = value.to(parameter.device)
        if self._is_partitioned:
            self._write_partition(parameter, kind, value)
        elif self._is_linked:
            self._write_linked(parameter, kind, value)
        else:
            self._tensor(self._copy_of(parameter), kind).copy_(value)
        if kind == WEIGHT:
            with self._deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=self._is_partitioned):
                if not self._is_partitioned or torch.distributed.get_rank() == 0:
                    parameter.data.copy_(value)

    @property
    def step(self) -> int:
        """Steps AdamW has taken, for its bias correction."""
        return max((int(state["step"]) for state in self._optimizer.state.values()), default=0)

    @step.setter
    def step(self, count: int) -> None:
        self._prime()
        for state in self._optimizer.state.values():
            state["step"].fill_(count)

    # -- DeepSpeed's ways of keeping them -----------------------------------------------------------------------------

    def _whole(self, parameter: nn.Parameter, kind: str) -> Tensor:
        utils = self._deepspeed.utils
        if not (self._is_partitioned or self._is_linked):
            return self._tensor(self._copy_of(parameter), kind)
        if kind == WEIGHT:
            found: Tensor = utils.safe_get_full_fp32_param(parameter)
        else:
            found = utils.safe_get_full_optimizer_state(parameter, kind)
        return found

    def _write_linked(self, parameter: nn.Parameter, kind: str, value: Tensor) -> None:
        if kind == WEIGHT:
            self._deepspeed.utils.safe_set_full_fp32_param(parameter, value)
        else:
            self._deepspeed.utils.safe_set_full_optimizer_state(parameter, value, kind)

    def _write_partition(self, parameter: Any, kind: str, value: Tensor) -> None:
        """ZeRO-3: this rank's part of the flat value, the last one padded with zeros."""
        size = parameter.ds_tensor.numel()
        part = torch.zeros(size, dtype=value.dtype, device=value.device)
        own = value.flatten()[torch.distributed.get_rank() * size :][:size]
        part[: len(own)] = own
        if kind == WEIGHT:
            self._deepspeed.utils.safe_set_local_fp32_param(parameter, part)
        else:
            self._deepspeed.utils.safe_set_local_optimizer_state(parameter, part, kind)

    def _copy_of(self, parameter: nn.Parameter) -> Tensor:
        """Without ZeRO: the float32 copy of a bf16 parameter, or the parameter itself."""
        groups = zip(getattr(self._wrapper, "fp16_groups", ()), getattr(self._wrapper, "fp32_groups", ()), strict=True)
        for small, wide in groups:
            for one, copy in zip(small, wide, strict=True):
                if one is parameter:
                    found: Tensor = copy
                    return found
        return parameter

    def _tensor(self, key: Tensor, kind: str) -> Tensor:
        found: Tensor = key.data if kind == WEIGHT else self._optimizer.state[key][kind]
        return found

    def _prime(self) -> None:
        """AdamW makes its state at the first step; a resumed run needs it before."""
        for key in self._flat():
            if not self._optimizer.state[key]:
                is_fused = self._optimizer.defaults["fused"]
                step = torch.zeros((), device=key.device if is_fused else "cpu")
                moments = {kind: torch.zeros_like(key) for kind in MOMENTS}
                self._optimizer.state[key] = {"step": step, **moments}
        if self._is_linked:
            self._wrapper._lazy_init_hp_params_optimizer_state()

    def _flat(self) -> list[Tensor]:
        """The tensors AdamW steps on. ZeRO-3 takes them out of the optimizer's groups between steps."""
        if self._is_partitioned:
            return list(self._wrapper.fp32_partitioned_groups_flat)
        return [tensor for group in self._optimizer.param_groups for tensor in group["params"]]
