"""The process group of a run, collective operations on small CPU values, and nodes that do not share a disk."""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoints.store import saving
from sage.commands.cli import EXIT_CRASH
from sage.io.files import atomic_path
from sage.io.folders import part_path
from train.config.schema import ConfigError
from train.launch import cluster_env
from train.launch.supervisor import RankFailed

logger = logging.getLogger(__name__)
# Of collective operations on a GPU: PyTorch's default, which the groups created by DeepSpeed have. No rank waits there while
# rank 0 works alone.
NCCL_TIMEOUT_S = 1800
JOIN_TIMEOUT_S = 900  # for all ranks to start, before they load anything
CHUNK_BYTES = 1 << 26  # of a file that are sent at once
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
    # DeepSpeed requires LOCAL_RANK and takes it for the index of this rank's GPU
    os.environ["LOCAL_RANK"] = str(cluster_env.local_rank() if picked.index is None else picked.index)
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
        f"rank {rank} on {socket.gethostname()}: {missing} of {world_size} did not join at {os.environ['MASTER_ADDR']}:"
        f"{os.environ['MASTER_PORT']} within {limit_s} s; start the command on every node, and see there why one ended{reason}",
        EXIT_CRASH,
    )


def _destroy_group() -> None:
    if dist.is_initialized():  # closing the engine may have destroyed it already
        dist.destroy_process_group()


def is_first_failure() -> bool:
    """Counts a failure of this rank in the group's store; returns whether it is the first of all ranks.

    If the rank that hosts the store has exited, it has failed earlier and reported its error.
    """
    try:
        return bool(dist.distributed_c10d._get_default_store().add("failed ranks", 1) == 1)
    except RuntimeError:
        return False


def pick_device(device: str, local_rank: int) -> torch.device:
    """Returns the device of a rank and makes it torch's current device; ConfigError without the GPU that it needs."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and not count:
        raise ConfigError(NO_GPU)
    if device == "cpu" or not count:
        return torch.device("cpu")
    index = 0 if count == 1 else local_rank  # launchers show a rank all GPUs of its machine or its own alone
    if index >= count:
        raise ConfigError(f"launch.gpus: rank {local_rank} of this machine finds only {count} GPU(s); start at most {count}")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def check_own_gpu(ranks: Ranks) -> None:
    """Raises ConfigError, on every rank, for ranks that share a GPU."""
    names = ranks.gather(str(torch.cuda.get_device_properties(ranks.device).uuid))
    for rank, name in enumerate(names):
        first = names.index(name)
        if first != rank:
            raise ConfigError(
                f"launch.gpus: ranks {first} and {rank} share the GPU {name}; start one rank per GPU, each with a GPU of its "
                f"own (srun --gpus-per-task=1) or with all GPUs of its machine visible (srun --gpus-per-node=N)"
            )


# -- nodes that do not share a disk: which ranks see a folder of rank 0, and copies of its files for those that do not ----


def blind_ranks(ranks: Ranks, folder: Path) -> dict[int, str]:
    """Returns the ranks that do not see `folder` of rank 0, which is created if needed, and their hosts. Collective."""
    if ranks.world_size == 1:
        return {}
    token = folder / ranks.broadcast(f".seen_{uuid.uuid4().hex}.part")  # a new name: no file server has cached its absence
    if ranks.is_main:
        with saving(folder, then="start again"):
            folder.mkdir(parents=True, exist_ok=True)
            token.touch()
    ranks.gather(None)  # until the token is there
    with suppress(OSError):
        os.listdir(folder.parent)  # opening it makes NFS look again for a folder that did not exist a moment ago
    seen = ranks.gather((token.exists(), socket.gethostname()))
    if ranks.is_main:
        token.unlink(missing_ok=True)
    return {rank: host for rank, (is_seen, host) in enumerate(seen) if not is_seen}


def check_same(ranks: Ranks, subject: str, value: Any) -> None:
    """Raises ConfigError, on every rank, if `value` differs between ranks; `subject` names what it is. Collective."""
    hosts = ranks.gather((socket.gethostname(), value))
    for rank, (host, other) in enumerate(hosts):
        if other != hosts[0][1]:
            raise ConfigError(
                f"{subject}: {other} for rank {rank} on {host}, but {hosts[0][1]} for rank 0 on {hosts[0][0]}; "
                "give every node the same files"
            )


@dataclass(frozen=True, kw_only=True)
class RunDisk:
    """The run folder of rank 0 as this rank sees it."""

    ranks: Ranks
    is_remote: bool = False  # this rank does not see it
    is_copying: bool = False  # this rank keeps the copies of its node
    has_remote: bool = False  # some rank does not see it

    @classmethod
    def of(cls, ranks: Ranks, run: Path) -> RunDisk:
        """Finds out who sees the run folder. Collective."""
        blind = blind_ranks(ranks, run)
        if not blind:
            return cls(ranks=ranks)
        hosts = ", ".join(dict.fromkeys(blind.values()))
        logger.info("run.dir=%s: not shared with %s; states, drafts and reports are on rank 0 alone", run.absolute(), hosts)
        is_remote = ranks.rank in blind
        nodes = ranks.gather((is_remote, cluster_env.node()))
        is_first = nodes.index(nodes[ranks.rank]) == ranks.rank
        return cls(ranks=ranks, is_remote=is_remote, is_copying=is_remote and is_first, has_remote=True)

    def fetch(self, folder: Path) -> Path:
        """Returns where this rank can read a folder that rank 0 has written: there, or in a copy beside it. Collective."""
        copy = part_path(folder.with_name(f"{folder.name}.copy"))
        self.copy(folder, copy)
        return copy if self.is_remote else folder

    def copy(self, folder: Path, to: Path, pattern: str = "**/*") -> None:
        """Copies files of rank 0 to every node that does not see them; SaveFailed on a rank that cannot write. Collective."""
        if not self.has_remote:
            return
        files = sorted(path for path in folder.glob(pattern) if path.is_file()) if self.ranks.is_main else []
        for name, size in self.ranks.broadcast([(str(path.relative_to(folder)), path.stat().st_size) for path in files]):
            with saving(to), atomic_path(to / name) if self.is_copying else nullcontext(Path()) as part:
                for first in range(0, max(size, 1), CHUNK_BYTES):
                    content = self.ranks.broadcast(_read(folder / name, first) if self.ranks.is_main else None)
                    if self.is_copying:
                        with part.open("ab") as file:
                            file.write(content)
        self.ranks.gather(None)  # until the other ranks of the node can read them


def _read(path: Path, first: int) -> bytes:
    with path.open("rb") as file:
        file.seek(first)
        return file.read(CHUNK_BYTES)
