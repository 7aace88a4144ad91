"""The processes of one run: who am I, and the few things ranks tell each other.

Owns: joining and leaving the process group, sums, barriers and objects over all ranks. Does not own: gradients (the engine's)
and starting processes (train.launch.launcher).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """This process among all of the run. Scalars travel on the CPU (gloo), gradients on the device (NCCL on GPUs)."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks of a small tensor, on the CPU; exact in float64."""
        total = values.detach().to("cpu", torch.float64, copy=True)
        dist.all_reduce(total)
        return total

    def barrier(self) -> None:
        """Returns once every rank has come here. A gloo reduction, so that idle GPUs do not spin."""
        dist.all_reduce(torch.zeros(1))

    def gather(self, item: Any) -> list[Any]:
        """Every rank's picklable `item`, in rank order, on every rank."""
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, item)
        return found

    def share(self, item: Any) -> Any:
        """Rank 0's picklable `item` on every rank."""
        box = [item]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]


@contextmanager
def joined(device: str, timeout_s: int) -> Iterator[Ranks]:
    """Joins the process group that the environment describes (see train.launch.launcher), and leaves it at the end.

    Args:
        device: `auto`, `cpu` or `cuda`; `auto` takes a GPU where there is one.
        timeout_s: how long one rank waits for another before it gives up.

    Raises:
        ValueError: a GPU is asked for and none is there, or there are fewer than ranks on this machine.
    """
    where = pick_device(device, local_rank())
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    backend = "cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo"
    if where.type == "cuda":
        torch.cuda.set_device(where)
    # One rank needs no port and no network; DeepSpeed would otherwise look for MPI.
    alone: dict[str, Any] = {"store": dist.HashStore()} if world_size == 1 else {}
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s), **alone)
    try:
        yield Ranks(rank, world_size, where)
    except BaseException:
        if world_size == 1:
            _leave()
        raise  # with more, leaving could wait for ranks that are gone; the process is about to end
    _leave()


def _leave() -> None:
    if dist.is_initialized():  # the engine may have left before us
        dist.destroy_process_group()


def is_joined() -> bool:
    """Whether this process is in a group with others."""
    return dist.is_initialized() and dist.get_world_size() > 1


def fails_first() -> bool:
    """Counts a failure of this rank; whether it is the first of all ranks.

    Where the rank that keeps the count has gone, it has failed before: it or the launcher has said why.
    """
    try:
        return bool(dist.distributed_c10d._get_default_store().add("failed ranks", 1) == 1)
    except RuntimeError:
        return False


def local_rank() -> int:
    """The number of this rank on its machine."""
    return int(os.environ.get("LOCAL_RANK", 0))


def pick_device(device: str, local_rank: int) -> torch.device:
    """The device of a rank.

    Raises:
        ValueError: see `joined`.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and not count:
        raise ValueError("launch.device=cuda: PyTorch sees no GPU; use launch.device=cpu, or install a CUDA build of torch")
    if device == "cpu" or not count:
        return torch.device("cpu")
    if local_rank >= count:
        raise ValueError(f"launch.gpus: rank {local_rank} of this machine finds only {count} GPU(s); start at most {count}")
    return torch.device("cuda", local_rank)
