"""The process group of a run, and collective operations on small CPU values."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sage.commands.cli import EXIT_CRASH
from train.config.schema import ConfigError
from train.launch import cluster_env
from train.launch.supervisor import RankFailed

# Of collective operations on a GPU: PyTorch's default, which the groups created by DeepSpeed have. No rank waits there while
# rank 0 works alone.
NCCL_TIMEOUT_S = 1800
JOIN_TIMEOUT_S = 900  # for all ranks to start, before they load anything
NO_GPU = "launch.device=cuda: PyTorch sees no GPU; use launch.device=cpu, or install a CUDA build of torch"


@dataclass(frozen=True)
class Ranks:
    """This process among all of the run. Scalars travel on the CPU (gloo), gradients on the device (NCCL on GPUs)."""

    rank: int
    world_size: int
    device: torch.device
    group: Any = None  # of the collective operations on the CPU; None: the default group, on a CPU

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum of a small tensor over all ranks, float64 on the CPU."""
        total = values.detach().to("cpu", torch.float64, copy=True)
        dist.all_reduce(total, group=self.group)
        return total

    def wait_for_all(self) -> None:
        """Waits for all ranks without the time limit of other collective operations; GPUs stay idle meanwhile."""
        if self.world_size > 1:
            group = dist.new_group(backend="gloo", timeout=timedelta(days=365))
            dist.all_reduce(torch.zeros(1), group=group)
            dist.destroy_process_group(group)

    def gather(self, item: Any) -> list[Any]:
        """Returns every rank's picklable `item`, in rank order, on every rank."""
        items: list[Any] = [None] * self.world_size
        dist.all_gather_object(items, item, group=self.group)
        return items

    def gather_on_main(self, item: Any) -> list[Any]:
        """Returns every rank's picklable `item`, in rank order, on rank 0, and an empty list elsewhere."""
        items: list[Any] = [None] * self.world_size if self.is_main else []
        dist.gather_object(item, items or None, dst=0, group=self.group)
        return items

    def per_node(self) -> int:
        """Returns the ranks on each machine if they are equally many and numbered machine by machine, else all ranks."""
        nodes = self.gather(cluster_env.node())
        machines = list(dict.fromkeys(nodes))
        size = len(nodes) // len(machines)
        return size if nodes == [machine for machine in machines for _ in range(size)] else self.world_size

    def broadcast(self, item: Any) -> Any:
        """Returns rank 0's picklable `item` on every rank."""
        box = [item]
        dist.broadcast_object_list(box, src=0, group=self.group, device=torch.device("cpu"))
        return box[0]


@contextmanager
def process_group(device: str, timeout_s: int) -> Iterator[Ranks]:
    """Initializes the process group that the environment describes, and destroys it at the end.

    `timeout_s` limits a collective operation on the CPU. ConfigError for `cuda` without a GPU, or several ranks for one GPU;
    RankFailed if some ranks have not started within `JOIN_TIMEOUT_S`, or within `timeout_s`.
    """
    picked = pick_device(device, cluster_env.local_rank())
    rank, world_size = cluster_env.rank(), cluster_env.world_size()
    is_cuda = picked.type == "cuda"
    cluster_env.set_device_index(picked.index)
    # A single rank needs neither port nor network; without a group DeepSpeed would look for MPI.
    store = dist.HashStore() if world_size == 1 else _join(rank, world_size, min(timeout_s, JOIN_TIMEOUT_S))
    backend, limit = ("cpu:gloo,cuda:nccl", NCCL_TIMEOUT_S) if is_cuda else ("gloo", timeout_s)
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timedelta(seconds=limit), store=store)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) if is_cuda else None
    ranks = Ranks(rank, world_size, picked, group)
    try:
        if is_cuda:
            check_own_gpu(ranks)
        yield ranks
    except BaseException:
        if world_size == 1:
            _destroy_group()
        raise  # with several ranks, destroying the group could wait for ranks that have exited; this process exits soon
    _destroy_group()


def _join(rank: int, world_size: int, limit_s: int) -> dist.Store:
    """Returns the store of the ranks, once all of them have reached it."""
    expected = [f"joined/{other}" for other in range(world_size)]
    missing = "other ranks"
    try:
        store, *_ = next(dist.rendezvous("env://", rank, world_size, timeout=timedelta(seconds=limit_s)))
        store.set(expected[rank], socket.gethostname())
        with suppress(dist.DistStoreError):
            store.wait(expected, timedelta(seconds=limit_s))
        if not (absent := [str(other) for other, key in enumerate(expected) if not store.check([key])]):
            return store
        missing, reason = f"rank(s) {', '.join(absent)}", ""
    except RuntimeError as error:
        reason = f" ({' '.join(str(error).split())[:120]})"
    raise RankFailed(
        f"rank {rank} on {socket.gethostname()}: {missing} of {world_size} did not join at {cluster_env.meeting_point()} "
        f"within {limit_s} s; start the command on every node, and see there why one ended{reason}",
        EXIT_CRASH,
    )


def _destroy_group() -> None:
    if dist.is_initialized():  # closing the engine may have destroyed it already
        dist.destroy_process_group()


def has_peers() -> bool:
    """Whether this process is in a group with other ranks."""
    return dist.is_initialized() and dist.get_world_size() > 1


def is_first_failure() -> bool:
    """Counts a failure of this rank in the group's store; returns whether it is the first of all ranks.

    If the rank that hosts the store has exited, it has failed earlier and reported its error.
    """
    try:
        return bool(dist.distributed_c10d._get_default_store().add("failed ranks", 1) == 1)
    except RuntimeError:
        return False


def pick_device(device: str, local_rank: int) -> torch.device:
    """Returns the device of a rank and makes it torch's current device; ConfigError without the GPU that it needs.

    Launchers show a rank either all GPUs of its machine, of which it takes that of its local rank, or its own GPU alone.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and not count:
        raise ConfigError(NO_GPU)
    if device == "cpu" or not count:
        return torch.device("cpu")
    index = 0 if count == 1 else local_rank
    if index >= count:
        raise ConfigError(f"launch.gpus: rank {local_rank} of this machine finds only {count} GPU(s); start at most {count}")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def check_own_gpu(ranks: Ranks) -> None:
    """Raises ConfigError, on every rank, for ranks that share a GPU."""
    uuids = ranks.gather(str(torch.cuda.get_device_properties(ranks.device).uuid))
    for rank, uuid in enumerate(uuids):
        first = uuids.index(uuid)
        if first != rank:
            raise ConfigError(
                f"launch.gpus: ranks {first} and {rank} share the GPU {uuid}; start one rank per GPU, each with a GPU of its "
                f"own (srun --gpus-per-task=1) or with all GPUs of its machine visible (srun --gpus-per-node=N)"
            )
