"""Trains the draft under DeepSpeed: sharding, gradient reduction, the optimizer step.

With `train.precision=bf16`, autograd returns bf16 gradients of each micro-batch; they are summed over micro-batches and ranks
in float32. DeepSpeed has no float32 accumulation without ZeRO, so stage 0 runs as stage 1 there.
"""

from __future__ import annotations

import logging
import os
import warnings
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from checkpoints.store import write_tensors
from train.config.derived import zero_stage
from train.config.schema import Config, Offload, OptimizerKind, Precision
from train.distill.student import Student
from train.distill.teacher import Pairs
from train.engine.optimizers import KINDS, WEIGHT, Muon, OptimizerState, matrices_of
from train.launch.ranks import Ranks

DEPRECATED = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"


class Engine:
    """A draft under DeepSpeed.

    Args:
        student: on the device, in float32; with `train.precision=bf16` the engine casts it and keeps a float32 copy.
        accumulation: the most micro-batches per rank and optimizer step.
        is_quantized: whether the target is.
    """

    draft_saved_at: int | None = None  # step of the weights that `draft/` holds; None: not saved by this process

    def __init__(self, student: Student, config: Config, ranks: Ranks, accumulation: int, is_quantized: bool = False) -> None:
        deepspeed = import_deepspeed(ranks.device.type)
        draft: Any = student.draft
        self.ranks, self.student, self.draft = ranks, student, draft
        self._bad_gradient = torch.zeros((), dtype=torch.bool, device=ranks.device)
        optimizer = make_optimizer(draft, config, ranks.device)
        settings = deepspeed_config(config, ranks.world_size, accumulation)
        if is_quantized:  # stage 3 replaces `nn.functional.linear`, also for the target, by one that reads plain tensors only
            settings["zero_optimization"]["memory_efficient_linear"] = False
        with redirect_stdout(StringIO()):  # the wrapper for bf16 prints the memory in use
            self._engine, self._optimizer, _, _ = deepspeed.initialize(
                model=student,
                optimizer=optimizer,
                config=settings,
                dist_init_required=False if deepspeed.comm.is_initialized() else None,
            )
        self.optimizer_state = OptimizerState(draft, self._optimizer, optimizer, deepspeed)
        self._gathered, self._comm = deepspeed.zero.GatheredParameters, deepspeed.comm
        self._is_complete = False  # whether the last micro-batch of a step has been added
        self._trained = [parameter for parameter in draft.parameters() if parameter.requires_grad]
        for parameter in self._trained:
            parameter.register_hook(self._check_gradient)
        # DeepSpeed's wrapper for bf16 under ZeRO-1 takes the norm over parameters with a gradient on this rank, and adds the
        # gradients of each micro-batch to its float32 sum.
        self._needs_every_gradient = hasattr(self._optimizer, "bf16_groups")

    def __call__(self, pairs: Pairs, lm_head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Runs the student's forward; returns the loss of a micro-batch and its metrics (see `Student.forward`)."""
        return self._engine(pairs, lm_head)

    def backward(self, loss: Tensor, is_last: bool = True) -> None:
        """Adds the gradient of `loss`, a sum over this rank's micro-batch already divided by the global token count.

        DeepSpeed averages gradients over ranks, but the global mean needs their sum; `world_size` undoes the division. Steps
        may have different numbers of micro-batches, so `is_last`, on every rank, replaces DeepSpeed's own count.
        """
        self._engine.set_gradient_accumulation_boundary(is_last)
        if self._needs_every_gradient:
            for parameter in self._trained:
                parameter.grad = torch.zeros_like(parameter)
        self._engine.backward(loss * self.ranks.world_size, scale_wrt_gas=False)
        self._is_complete = is_last
        if not is_last:
            self._engine.step()  # before an accumulation boundary this only counts the micro-batch

    def step(self, lr: float) -> float:
        """Takes one optimizer step after the last `backward` of the step; returns the gradient norm before clipping."""
        assert self._is_complete, "the last micro-batch of the step has not been added"
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        is_plain = not self._engine.zero_optimization()  # then DeepSpeed reports no norm
        norm = torch.nn.utils.get_total_norm([p.grad for p in self._trained if is_plain and p.grad is not None])
        self._engine.step()
        self._is_complete = False
        reported = self._engine.get_global_grad_norm()
        return float(norm if reported is None else reported)

    def draft_state(self) -> dict[str, Tensor]:
        """Returns the complete weights by name on the CPU of rank 0, an empty dict elsewhere. Every rank has to call it."""
        parameters = list(self.draft.parameters())
        with self._gathered(parameters, enabled=any(hasattr(p, "ds_id") for p in parameters)):
            if not self.ranks.is_main:
                return {}
            return {name: value.detach().cpu().clone() for name, value in self.draft.state_dict().items()}

    def save(self, folder: Path) -> None:
        """Writes float32 weights, the optimizer's moments and the draft's buffers to `folder`, unsharded and by name.

        Every rank has to call it; rank 0 writes one file at a time. OSError if it cannot.
        """
        problem = None
        for kind in KINDS:
            tensors = {
                name: value.to("cpu", copy=True) for name, value in self.optimizer_state.read(kind) if self.ranks.is_main
            }
            buffers = self._buffers() if kind == WEIGHT else {}
            try:
                if self.ranks.is_main and problem is None:
                    write_tensors(folder / f"{kind}.safetensors", tensors | buffers, {"step": str(self.optimizer_state.step)})
            except OSError as error:  # raised at the end: the other ranks enter the next collective read
                problem = error
        if problem is not None:
            raise problem

    def load(self, folder: Path) -> None:
        """Restores the files of `save`, on every rank; raises ValueError if they were saved from another draft or optimizer."""
        buffers = self._buffers()
        for kind in KINDS:
            path = folder / f"{kind}.safetensors"
            with safe_open(path, framework="pt") as file:
                names = {**self.optimizer_state.having(kind), **(buffers if kind == WEIGHT else {})}
                if names.keys() != set(file.keys()):
                    other = sorted(names.keys() ^ set(file.keys()))
                    raise ValueError(f"{path}: was saved from another draft or optimizer; {other[0]} is on one side only")
                for name in names:
                    value = file.get_tensor(name)
                    if name in buffers:
                        buffers[name].copy_(value)
                    else:
                        self.optimizer_state.write(name, kind, value)
                self.optimizer_state.step = int(file.metadata()["step"])

    def _buffers(self) -> dict[str, Tensor]:
        """Returns the draft's persistent buffers by name, for instance the token map of a draft vocabulary."""
        parameters = dict(self.draft.named_parameters(remove_duplicate=False))
        return {name: value for name, value in self.draft.state_dict().items() if name not in parameters}

    def close(self) -> None:
        """Destroys DeepSpeed's process groups, so that another engine can be created in this process."""
        self._comm.destroy_process_group()

    def take_bad_gradient(self) -> Tensor:
        """Returns and resets whether a gradient on this rank was not finite; bool [] on the device, without synchronization."""
        is_bad, self._bad_gradient = self._bad_gradient, torch.zeros_like(self._bad_gradient)
        return is_bad

    def _check_gradient(self, gradient: Tensor) -> None:
        self._bad_gradient = self._bad_gradient | ~gradient.isfinite().all()


def deepspeed_config(config: Config, world_size: int, accumulation: int) -> dict[str, Any]:
    """Returns DeepSpeed's configuration dictionary; gradients are summed in float32 in either precision."""
    chosen = config.deepspeed
    zero: dict[str, Any] = {
        "stage": zero_stage(config),
        "overlap_comm": chosen.overlap_comm,
        "reduce_bucket_size": chosen.bucket_elements,
        "allgather_bucket_size": chosen.bucket_elements,
    }
    if chosen.offload_optimizer is Offload.cpu:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    size = config.train.micro_batch_size if config.train.micro_batch_tokens is None else 1
    return {
        "train_batch_size": size * accumulation * world_size,
        "train_micro_batch_size_per_gpu": size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": config.optim.grad_clip,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": config.optim.kind is OptimizerKind.muon,
        "bf16": {"enabled": config.train.precision is Precision.bf16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "steps_per_print": None,
        **chosen.extra,
    }


def make_optimizer(draft: nn.Module, config: Config, device: torch.device) -> torch.optim.Optimizer:
    """Builds torch's AdamW, which needs no compiler, or Muon; fused in a run on GPUs, also if its state is offloaded."""
    optim = config.optim
    options: dict[str, Any] = {
        "lr": optim.lr,
        "betas": (optim.beta1, optim.beta2),
        "eps": optim.eps,
        "weight_decay": optim.weight_decay,
        "fused": device.type == "cuda",
    }
    trained = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    if optim.kind is OptimizerKind.adamw:
        return torch.optim.AdamW(trained, **options)
    matrices = matrices_of(draft)
    known = {id(matrix) for matrix in matrices}
    return Muon(matrices, [parameter for parameter in trained if id(parameter) not in known], **options)


def import_deepspeed(device_type: str) -> Any:
    """Imports DeepSpeed for a type of device, without its log messages and without compiling operators."""
    os.environ.setdefault("DS_ACCELERATOR", device_type)
    import deepspeed

    if device_type == "cpu":  # it would compile a shared-memory operator, which is used for inference only
        from deepspeed import ops  # the table of compatible operators is built at its first use, by running compilers

        ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not logging.getLogger("train").isEnabledFor(logging.DEBUG):
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=DEPRECATED, category=FutureWarning)
    return deepspeed
