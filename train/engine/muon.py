"""Muon: momentum whose update of a matrix is orthogonalized, for the linear layers of a draft; AdamW for all other parameters.

Ref: Jordan et al., Muon, https://kellerjordan.github.io/posts/muon (Newton-Schulz iteration and its coefficients); Liu et al.,
arXiv 2502.16982, section 2.2, equation 4 (updates of AdamW's size, so that both take the same learning rate).
Differs by: `torch.optim.Muon` needs whole matrices. Under ZeRO-1 and 2 the optimizer has this rank's part of all weights, one
flat tensor, so matrices are put together for each step. Ranks share the orthogonalization: each does it for the matrices that
it holds a part of.

Shapes: M rows and N columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """Muon for `matrices` [M, N] each, torch's AdamW for `others`.

    The momentum is kept as `exp_avg`; matrices have no second moment.

    Args:
        options: of AdamW; learning rate and weight decay are those of Muon, too.
    """

    def __init__(self, matrices: Sequence[Tensor], others: Sequence[Tensor], **options: Any) -> None:
        groups: list[dict[str, Any]] = [
            {"params": [*matrices], IS_MATRICES: True},
            {"params": [*others], IS_MATRICES: False},
        ]
        super().__init__([group for group in groups if group["params"]], **options)
        self.matrices = tuple(matrices)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Takes one step; a tensor without a gradient stays as it is."""
        gradients = []
        for group in self.param_groups:
            for tensor in group["params"] if group[IS_MATRICES] else ():
                if tensor.grad is not None:
                    gradients.append((tensor, tensor.grad))
                    self._update(tensor, self._averaged(tensor, tensor.grad), group["lr"], group["weight_decay"])
                    tensor.grad = None  # AdamW leaves it out
        super().step(closure)
        for tensor, gradient in gradients:
            tensor.grad = gradient

    def _averaged(self, tensor: Tensor, gradient: Tensor) -> Tensor:
        """Returns Nesterov's momentum after adding the gradient."""
        state = self.state[tensor]
        if not state:
            state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(tensor))
        state["step"] += 1
        average: Tensor = state["exp_avg"].lerp_(gradient, 1 - MOMENTUM)
        return gradient.lerp(average, MOMENTUM)

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
                _in_matrix(mapping, whole).copy_(_in_flat(mapping, average))
            torch.distributed.all_reduce(whole, group=parts._dp_group)
            if mapping is not None:
                change = _in_matrix(mapping, orthogonalized(whole))
                _in_flat(mapping, tensor).sub_(change, alpha=lr * step_size(matrix))


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
    found = {
        id(module.weight)
        for name, module in draft.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] != "lm_head" and min(module.weight.shape) > 1
    }
    return [parameter for parameter in draft.parameters() if id(parameter) in found and parameter.requires_grad]


def _in_matrix(mapping: Any, whole: Tensor) -> Tensor:
    """Returns this rank's part of a matrix [M, N], a vector; a view if the matrix is contiguous."""
    place = mapping.lp_fragment_address
    return whole.reshape(-1).narrow(0, place.start, place.numel)


def _in_flat(mapping: Any, flat: Tensor) -> Tensor:
    """Returns the view of this rank's part of a matrix in its flat tensor."""
    place = mapping.hp_fragment_address
    return flat.narrow(0, place.start, place.numel)
