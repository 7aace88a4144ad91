"""Muon, and access to an optimizer's state of each parameter, unsharded and by name.

Muon is momentum whose update of a matrix is orthogonalized, for the linear layers of a draft; AdamW for all other parameters.

Ref: Jordan et al., Muon, https://kellerjordan.github.io/posts/muon (Newton-Schulz iteration and its coefficients); Liu et al.,
arXiv 2502.16982, section 2.2, equation 4 (updates of AdamW's size, so that both take the same learning rate).
Differs by: `torch.optim.Muon` needs whole matrices. Under ZeRO-1 and 2 the optimizer has this rank's part of all weights, one
flat tensor, so each rank puts together and orthogonalizes the matrices that it holds a part of.

DeepSpeed stores the state, a float32 weight and its two moments, in the parameter itself (float32 without ZeRO), in flat
partitions linked to it (ZeRO-1 and 2), or in partitions of the parameter (ZeRO-3). Unsharded tensors by name depend on neither
stage nor precision, so a checkpoint can be loaded under any ZeRO stage and world size.

Shapes: M rows and N columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
MOMENTUM = 0.95  # decay of the momentum
SCALE = 0.2  # root mean square of the updates of AdamW, about
MIN_NORM = 1e-7
IS_MATRICES = "is_matrices"  # key of a parameter group: whether its updates are orthogonalized


class Muon(torch.optim.AdamW):
    """Muon for `matrices` [M, N] each, torch's AdamW for `others`; both have the `options` of AdamW.

    The momentum is kept as `exp_avg`; matrices have no second moment.
    """

    def __init__(self, matrices: Sequence[Tensor], others: Sequence[Tensor], **options: Any) -> None:
        groups: list[dict[str, Any]] = [{"params": [*matrices], IS_MATRICES: True}, {"params": [*others], IS_MATRICES: False}]
        super().__init__([group for group in groups if group["params"]], **options)
        self.matrices = tuple(matrices)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Takes one step; a tensor without a gradient stays as it is."""
        gradients = []
        for group in self.param_groups:
            for tensor in group["params"] if group[IS_MATRICES] else ():
                if (gradient := tensor.grad) is None:
                    continue
                state = self.state[tensor]
                if not state:
                    state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(tensor))
                state["step"] += 1
                average = state["exp_avg"].lerp_(gradient, 1 - MOMENTUM)
                self._update(tensor, gradient.lerp(average, MOMENTUM), group["lr"], group["weight_decay"])  # Nesterov
                gradients.append((tensor, gradient))
                tensor.grad = None  # AdamW leaves it out
        super().step(closure)
        for tensor, gradient in gradients:
            tensor.grad = gradient

    def _update(self, tensor: Tensor, average: Tensor, lr: float, weight_decay: float) -> None:
        """Updates a matrix, or the part of all matrices that ZeRO leaves to this rank, one flat tensor."""
        tensor.mul_(1 - lr * weight_decay)
        if tensor.ndim == 2:
            tensor.sub_(orthogonalized(average), alpha=lr * step_size(tensor))
            return
        for matrix in self.matrices:
            parts: Any = matrix  # DeepSpeed adds where this rank's part lies, None without one, and the ranks with the others
            mapping, whole = parts._hp_mapping, average.new_zeros(matrix.shape)
            if mapping is not None:
                in_matrix, in_flat = mapping.lp_fragment_address, mapping.hp_fragment_address
                part = average.narrow(0, in_flat.start, in_flat.numel)
                whole.view(-1).narrow(0, in_matrix.start, in_matrix.numel).copy_(part)
            torch.distributed.all_reduce(whole, group=parts._dp_group)
            if mapping is not None:
                change = orthogonalized(whole).reshape(-1).narrow(0, in_matrix.start, in_matrix.numel)
                tensor.narrow(0, in_flat.start, in_flat.numel).sub_(change, alpha=lr * step_size(matrix))


def orthogonalized(matrix: Tensor) -> Tensor:
    """Returns about U V^T for a matrix U S V^T [M, N]: singular values near 1. In bfloat16 on a GPU, float32 on a CPU.

    The iteration converges to values between 0.7 and 1.2 in five steps; exact ones would take more and help nothing.
    """
    x = matrix.bfloat16() if matrix.is_cuda else matrix
    x = x / x.norm().clamp_min(MIN_NORM)
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    first, third, fifth = COEFFICIENTS
    for _ in range(ITERATIONS):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=third, alpha=fifth), x, beta=first)
    return (x.T if is_tall else x).to(matrix.dtype)


def step_size(matrix: Tensor) -> float:
    """Returns the factor that gives an orthogonalized update the size of one of AdamW's."""
    return SCALE * float(max(matrix.shape)) ** 0.5


def matrices_of(draft: nn.Module) -> list[nn.Parameter]:
    """Returns the trained weights of linear layers, except lm_heads, whose rows are tokens as those of an embedding are."""
    weights = {
        id(module.weight)
        for name, module in draft.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] != "lm_head" and min(module.weight.shape) > 1
    }
    return [parameter for parameter in draft.parameters() if id(parameter) in weights and parameter.requires_grad]


WEIGHT, SECOND_MOMENT = "weight", "exp_avg_sq"
MOMENTS = ("exp_avg", SECOND_MOMENT)
KINDS = (WEIGHT, *MOMENTS)


class OptimizerState:
    """Reads and writes the state of one parameter at a time. Every rank has to make the same calls.

    `wrapper` is DeepSpeed's optimizer around `optimizer`, or `optimizer` itself.
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
        parameter: Any = self.parameters[name]
        value = value.to(parameter.device)
        if self._is_partitioned:  # ZeRO-3: this rank's part of the flat value; the last part is padded with zeros
            size = parameter.ds_tensor.numel()
            part = value.flatten()[torch.distributed.get_rank() * size :][:size]
            self._access("set_local", kind, parameter, nn.functional.pad(part, (0, size - len(part))))
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

    def _access(self, action: str, kind: str, *arguments: Tensor) -> Any:
        """Calls DeepSpeed's function of that name for a parameter and perhaps a value; it takes a moment's name as well."""
        if kind == WEIGHT:
            return getattr(self._deepspeed.utils, f"safe_{action}_fp32_param")(*arguments)
        return getattr(self._deepspeed.utils, f"safe_{action}_optimizer_state")(*arguments, kind)

    def _tensor(self, key: Tensor, kind: str) -> Tensor:
        return key.data if kind == WEIGHT else self._optimizer.state[key][kind]

    def allocate(self) -> None:
        """Allocates the optimizer's state, which it does itself at the first step only; a resumed run needs it before."""
        for key, kinds in self._flat_tensors():
            if not self._optimizer.state[key]:
                is_fused = self._optimizer.defaults["fused"]
                step = torch.zeros((), device=key.device if is_fused else "cpu")
                moments = {kind: torch.zeros_like(key) for kind in kinds}
                self._optimizer.state[key] = {"step": step, **moments}
        if self._is_linked:
            self._wrapper._lazy_init_hp_params_optimizer_state()

    def _flat_tensors(self) -> list[tuple[Tensor, Sequence[str]]]:
        """Returns the tensors that the optimizer updates, with the names of their moments."""
        if self._is_partitioned:  # ZeRO-3 removes them from the optimizer's groups between steps
            return [(tensor, MOMENTS) for tensor in self._wrapper.fp32_partitioned_groups_flat]
        return [
            (tensor, MOMENTS[:1] if group.get(IS_MATRICES) else MOMENTS)
            for group in self._optimizer.param_groups
            for tensor in group["params"]
        ]
