"""DeepSpeed around the draft: sharding, gradient exchange, the optimizer step. The only file that imports it.

Owns: DeepSpeed's configuration, the loss scale that undoes its averaging, gradient checks, whole weights out of shards.
Does not own: the loss, the data, when to save.
"""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from checkpoints.tensors import write_tensors
from train.config.schema import Config, Offload, Precision
from train.distill.pairs import Pairs
from train.distill.student import Student
from train.engine.optimizer_state import KINDS, WEIGHT, Masters
from train.launch.ranks import Ranks

DEPRECATED = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"


class Engine:
    """A draft under DeepSpeed.

    Args:
        student: the draft and its objective, on the device, in float32; with `train.precision=bf16` the engine casts it and
            keeps float32 masters.
        config: the run's.
        ranks: already joined.
        accumulation: micro-batches per rank and optimizer step.
    """

    def __init__(self, student: Student, config: Config, ranks: Ranks, accumulation: int) -> None:
        deepspeed = import_deepspeed(ranks.device.type)
        draft: Any = student.draft
        self.ranks, self.student, self.draft, self.accumulation = ranks, student, draft, accumulation
        self._bad_gradient = torch.zeros((), dtype=torch.bool, device=ranks.device)
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed insists on it
        optimizer = make_optimizer(draft, config, ranks.device)
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=student,
            optimizer=optimizer,
            config=deepspeed_config(config, ranks.world_size, accumulation),
            dist_init_required=False if deepspeed.comm.is_initialized() else None,
        )
        _rewind(optimizer)
        self._masters = Masters(draft, self._optimizer, optimizer, deepspeed)
        self._gathered, self._comm = deepspeed.zero.GatheredParameters, deepspeed.comm
        self._micro = 0
        for parameter in draft.parameters():
            if parameter.requires_grad:
                parameter.register_hook(self._watch)

    def __call__(self, pairs: Pairs, lm_head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The student's forward: the loss of a micro-batch and what is reported of it."""
        output: tuple[Tensor, Tensor, Tensor] = self._engine(pairs, lm_head)
        return output

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of `loss`, a sum over this rank's micro-batch already divided by the global token count.

        DeepSpeed averages gradients over ranks where the global mean needs their sum, hence the factor.
        """
        self._engine.backward(loss * self.ranks.world_size, scale_wrt_gas=False)
        self._micro += 1
        if self._micro < self.accumulation:
            self._engine.step()  # not at a boundary yet: this only counts the micro-batch

    def step(self, lr: float) -> float:
        """One optimizer step after `accumulation` calls of `backward`.

        Returns:
            the norm of the whole gradient before clipping.
        """
        assert self._micro == self.accumulation, (self._micro, self.accumulation)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        norm = self._plain_norm()
        self._engine.step()
        self._micro = 0
        known = self._engine.get_global_grad_norm()
        return float(norm if known is None else known)

    def draft_state(self) -> dict[str, Tensor]:
        """The whole weights by name, on the CPU; empty except on rank 0. Every rank has to call it."""
        parameters = list(self.draft.parameters())
        with self._gathered(parameters, enabled=any(hasattr(p, "ds_id") for p in parameters)):
            if not self.ranks.is_main:
                return {}
            return {name: value.detach().cpu().clone() for name, value in self.draft.state_dict().items()}

    def save(self, folder: Path) -> None:
        """Writes float32 weights, AdamW's moments and the draft's buffers below `folder`, whole and by name.

        Any stage and number of ranks can load them. Every rank has to call it; rank 0 writes, a third of it at a time.

        Raises:
            OSError: the files could not be written.
        """
        problem = None
        for kind in KINDS:
            found = {name: value.to("cpu", copy=True) for name, value in self._masters.read(kind) if self.ranks.is_main}
            buffers = self._buffers() if kind == WEIGHT else {}
            try:
                if self.ranks.is_main and problem is None:
                    write_tensors(folder / f"{kind}.safetensors", found | buffers, {"step": str(self._masters.step)})
            except OSError as error:  # told at the end: the other ranks are on their way into the next read
                problem = error
        if problem is not None:
            raise problem

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote. Every rank has to call it.

        Raises:
            ValueError: what is there was saved from another draft.
        """
        buffers = self._buffers()
        for kind in KINDS:
            path = folder / f"{kind}.safetensors"
            with safe_open(path, framework="pt") as file:
                names = {**self._masters.parameters, **(buffers if kind == WEIGHT else {})}
                if names.keys() != set(file.keys()):
                    other = sorted(names.keys() ^ set(file.keys()))
                    raise ValueError(f"{path}: was saved from another draft; {other[0]} is on one side only")
                for name in names:
                    value = file.get_tensor(name)
                    if name in buffers:
                        buffers[name].copy_(value)
                    else:
                        self._masters.write(name, kind, value)
                self._masters.step = int(file.metadata()["step"])

    def _buffers(self) -> dict[str, Tensor]:
        """The draft's persistent buffers by name, a draft vocabulary's maps for instance."""
        parameters = dict(self.draft.named_parameters(remove_duplicate=False))
        return {name: value for name, value in self.draft.state_dict().items() if name not in parameters}

    def close(self) -> None:
        """Lets go of DeepSpeed's process groups, so that another engine can be made in this process."""
        self._comm.destroy_process_group()

    def take_bad_gradient(self) -> Tensor:
        """Whether any gradient since the last call was not finite on this rank; a tensor, so that nothing waits for it."""
        found, self._bad_gradient = self._bad_gradient, torch.zeros_like(self._bad_gradient)
        return found

    def _watch(self, gradient: Tensor) -> None:
        self._bad_gradient = self._bad_gradient | ~gradient.isfinite().all()

    def _plain_norm(self) -> float | Tensor:
        """Without ZeRO and mixed precision DeepSpeed clips but keeps the norm to itself."""
        grads = [p.grad for p in self.draft.parameters() if p.grad is not None]
        if self._engine.zero_optimization() or not grads:
            return float("nan")
        return torch.nn.utils.get_total_norm(grads)


def _rewind(optimizer: torch.optim.Optimizer) -> None:
    """Puts step counts back to zero.

    DeepSpeed allocates optimizer state by a step with zero gradients; its bf16 wrapper without ZeRO leaves that step counted,
    so that Adam's bias correction would make the first real step a quarter too small.
    """
    for state in optimizer.state.values():
        state["step"] = torch.zeros_like(state["step"])


def deepspeed_config(config: Config, world_size: int, accumulation: int) -> dict[str, Any]:
    """DeepSpeed's own dictionary, from ours."""
    chosen = config.deepspeed
    zero: dict[str, Any] = {
        "stage": chosen.stage,
        "overlap_comm": chosen.overlap_comm,
        "reduce_bucket_size": chosen.bucket_elements,
        "allgather_bucket_size": chosen.bucket_elements,
    }
    if chosen.offload_optimizer is Offload.cpu:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_batch_size": config.train.micro_batch_size * accumulation * world_size,
        "train_micro_batch_size_per_gpu": config.train.micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": config.optim.grad_clip,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": config.train.precision is Precision.bf16},
        "steps_per_print": None,
        **chosen.extra,
    }


def make_optimizer(draft: nn.Module, config: Config, device: torch.device) -> torch.optim.Optimizer:
    """torch's AdamW: no compiler needed on a CPU, its fused kernel on a GPU."""
    optim = config.optim
    return torch.optim.AdamW(
        [parameter for parameter in draft.parameters() if parameter.requires_grad],
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        fused=device.type == "cuda" and config.deepspeed.offload_optimizer is Offload.none,
    )


def import_deepspeed(device_type: str) -> Any:
    """DeepSpeed for this kind of device, without its chatter and without compiling anything at start.

    The shared-memory operator it would build with a C++ compiler on CPUs serves inference only.
    """
    os.environ.setdefault("DS_ACCELERATOR", device_type)
    import deepspeed
    from deepspeed import ops

    ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not logging.getLogger("train").isEnabledFor(logging.DEBUG):
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=DEPRECATED, category=FutureWarning)
    return deepspeed
