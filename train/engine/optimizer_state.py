"""Access to the optimizer's state of each trained parameter, unsharded and by name: the float32 weight and its two moments; a
matrix under Muon has the first one alone.

DeepSpeed stores them in one of three ways: in the parameter itself (float32 without ZeRO), in flat partitions linked to it
(ZeRO-1 and 2), or in partitions of the parameter (ZeRO-3). Unsharded tensors by name depend on neither stage nor precision, so
a checkpoint can be loaded under any ZeRO stage and world size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from train.engine.muon import IS_MATRICES, Muon

WEIGHT, SECOND_MOMENT = "weight", "exp_avg_sq"
MOMENTS = ("exp_avg", SECOND_MOMENT)
KINDS = (WEIGHT, *MOMENTS)


class OptimizerState:
    """Reads and writes the state of one parameter at a time. Every rank has to make the same calls.

    Args:
        draft: the module wrapped by DeepSpeed.
        wrapper: DeepSpeed's optimizer around `optimizer`, or `optimizer` itself if there is none.
        optimizer: torch's AdamW, or `Muon`.
        deepspeed: the package.
    """

    def __init__(self, draft: nn.Module, wrapper: Any, optimizer: torch.optim.Optimizer, deepspeed: Any) -> None:
        self.parameters = {name: p for name, p in draft.named_parameters() if p.requires_grad}
        self._wrapper, self._optimizer, self._deepspeed = wrapper, optimizer, deepspeed
        self._matrices = {id(matrix) for matrix in optimizer.matrices} if isinstance(optimizer, Muon) else set()
        first = next(iter(self.parameters.values()))
        self._is_partitioned, self._is_linked = hasattr(first, "ds_id"), hasattr(first, "_hp_mapping")
        if len(optimizer.param_groups) > 1:  # DeepSpeed links the states of all groups after the first step of the first one
            self.allocate()

    def having(self, kind: str) -> dict[str, nn.Parameter]:
        """Returns the parameters with a state of that kind, by name; matrices under Muon have no second moment."""
        return {name: p for name, p in self.parameters.items() if kind != SECOND_MOMENT or id(p) not in self._matrices}

    @torch.no_grad()
    def read(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, unsharded float32 tensor on the device) of every parameter that has one; `kind` is one of `KINDS`."""
        self.allocate()
        is_plain = not (self._is_partitioned or self._is_linked)
        for name, parameter in self.having(kind).items():
            yield name, self._tensor(parameter, kind) if is_plain else self._access("get_full", kind, parameter)

    @torch.no_grad()
    def write(self, name: str, kind: str, value: Tensor) -> None:
        """Writes an unsharded float32 `value` from any device; a weight also to the parameter used in the forward pass."""
        self.allocate()
        parameter = self.parameters[name]
        value = value.to(parameter.device)
        if self._is_partitioned:
            self._write_partition(parameter, kind, value)
        elif self._is_linked:
            self._access("set_full", kind, parameter, value)
        else:
            self._tensor(parameter, kind).copy_(value)
        if kind == WEIGHT:
            with self._deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=self._is_partitioned):
                if not self._is_partitioned or torch.distributed.get_rank() == 0:
                    parameter.data.copy_(value)

    @property
    def step(self) -> int:
        """Number of steps taken, for AdamW's bias correction."""
        return max((int(state["step"]) for state in self._optimizer.state.values()), default=0)

    @step.setter
    def step(self, count: int) -> None:
        self.allocate()
        for state in self._optimizer.state.values():
            state["step"].fill_(count)

    # -- storage by stage and precision --------------------------------------------------------------------------------

    def _access(self, action: str, kind: str, *arguments: Tensor) -> Any:
        """Calls DeepSpeed's function of that name for a parameter and perhaps a value; it takes a moment's name as well."""
        if kind == WEIGHT:
            return getattr(self._deepspeed.utils, f"safe_{action}_fp32_param")(*arguments)
        return getattr(self._deepspeed.utils, f"safe_{action}_optimizer_state")(*arguments, kind)

    def _write_partition(self, parameter: Any, kind: str, value: Tensor) -> None:
        """ZeRO-3: writes this rank's part of the flat value; the last part is padded with zeros."""
        size = parameter.ds_tensor.numel()
        part = torch.zeros(size, dtype=value.dtype, device=value.device)
        own = value.flatten()[torch.distributed.get_rank() * size :][:size]
        part[: len(own)] = own
        self._access("set_local", kind, parameter, part)

    def _tensor(self, key: Tensor, kind: str) -> Tensor:
        return key.data if kind == WEIGHT else self._optimizer.state[key][kind]

    def allocate(self) -> None:
        """Allocates the optimizer's state, which it does itself at the first step only; a resumed run needs it before."""
        for key, kinds in self._flat():
            if not self._optimizer.state[key]:
                is_fused = self._optimizer.defaults["fused"]
                step = torch.zeros((), device=key.device if is_fused else "cpu")
                moments = {kind: torch.zeros_like(key) for kind in kinds}
                self._optimizer.state[key] = {"step": step, **moments}
        if self._is_linked:
            self._wrapper._lazy_init_hp_params_optimizer_state()

    def _flat(self) -> list[tuple[Tensor, Sequence[str]]]:
        """Returns the tensors that the optimizer updates, and which moments they have. ZeRO-3 removes them from the optimizer's
        groups between steps.
        """
        if self._is_partitioned:
            return [(tensor, MOMENTS) for tensor in self._wrapper.fp32_partitioned_groups_flat]
        return [
            (tensor, MOMENTS[:1] if group.get(IS_MATRICES) else MOMENTS)
            for group in self._optimizer.param_groups
            for tensor in group["params"]
        ]
