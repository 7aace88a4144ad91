"""The environment variables of launchers: torchrun, deepspeed, srun."""

from __future__ import annotations

import os
import re
import socket
from functools import partial

from train.config.schema import ConfigError

RENDEZVOUS_PORTS = range(20_000, 32_000)  # below Linux's ephemeral ports; a SLURM job's port follows from its number
TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MAX_COMPILERS = 4  # processes of Inductor per rank; a run compiles a few kernels per class of layer


def detect_launcher() -> int | None:
    """Returns the world size set by an external launcher, None without one; sets torch's variables from srun's."""
    environment = os.environ
    if "RANK" in environment or "WORLD_SIZE" in environment:
        missing = [name for name in TORCH_VARIABLES if name not in environment]
        if missing:
            raise ConfigError(f"{', '.join(missing)}: missing beside the other launcher variables; use torchrun or unset RANK")
        return world_size()
    if "SLURM_STEP_ID" in environment and int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        environment["RANK"] = environment["SLURM_PROCID"]
        environment["LOCAL_RANK"] = environment["SLURM_LOCALID"]
        environment["WORLD_SIZE"] = environment["SLURM_STEP_NUM_TASKS"]
        first = re.match(r"([^,\[]+)(?:\[([^,\-\]]+))?", environment["SLURM_STEP_NODELIST"])  # `gpu[003-007,9],big1`
        assert first is not None
        environment.setdefault("MASTER_ADDR", first.group(1) + (first.group(2) or ""))
        job = int(environment["SLURM_JOB_ID"]) * 7 + int(environment["SLURM_STEP_ID"])
        environment.setdefault("MASTER_PORT", str(RENDEZVOUS_PORTS[job % len(RENDEZVOUS_PORTS)]))
        return world_size()
    return None


def _number(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


rank = partial(_number, "RANK", 0)  # of this process over all machines
local_rank = partial(_number, "LOCAL_RANK", 0)  # of this process on its machine
world_size = partial(_number, "WORLD_SIZE", 1)  # ranks over all machines


def local_world_size() -> int:
    """Returns the number of ranks on this machine, which torchrun and deepspeed set."""
    return _number("LOCAL_WORLD_SIZE", _number("LOCAL_SIZE", 1))


def node() -> str:
    """Returns a name that the ranks of this machine share; launchers number them in a row."""
    number = os.environ.get("GROUP_RANK", os.environ.get("SLURM_NODEID"))  # of torchrun and srun
    if number is None:
        number = str(rank() // local_world_size() if local_world_size() > 1 else 0)
    return f"{socket.gethostname()} {number}"


def is_main_rank() -> bool:
    """Whether this process is rank 0; also known inside srun before `detect_launcher` is called."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def is_first_on_node() -> bool:
    """Whether this process reports errors that occur before the ranks are joined: each node has files of its own."""
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"


def has_own_threads(is_cpu: bool) -> bool:
    """Whether OMP_NUM_THREADS sets the threads of this rank; torchrun sets it to 1 where it is missing."""
    threads = os.environ.get("OMP_NUM_THREADS")  # a rank on a GPU ignores 1: an offloaded optimizer would take one core
    return threads is not None and (is_cpu or threads != "1" or "TORCHELASTIC_RUN_ID" not in os.environ)


def set_rank(rank: int, world_size: int, store_port: int) -> None:
    """Numbers this process, one of `world_size` on a single machine, whose parent hosts their store."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "TORCHELASTIC_USE_AGENT_STORE": str(True)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store_port)}


def set_torch_defaults() -> None:
    """Sets what torch reads when it is imported, where the user has not."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # lengths of examples differ
    compilers = min(len(os.sched_getaffinity(0)) // local_world_size(), MAX_COMPILERS)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(compilers, 1)))
