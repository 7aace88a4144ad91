"""Joining ranks that torchrun, deepspeed or srun has started."""

from __future__ import annotations

import os
import re

from train.config.schema import ConfigError

PORTS = range(20_000, 32_000)  # SLURM jobs find their meeting port in here, by job number; Linux gives connections others


def join_environment() -> int | None:
    """The number of ranks somebody else has started, or None. Translates srun's variables into torch's.

    Raises:
        ConfigError: variables of a launcher are there, but not all of them.
    """
    environment = os.environ
    if "RANK" in environment or "WORLD_SIZE" in environment:
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in environment]
        if missing:
            raise ConfigError(f"{', '.join(missing)}: missing beside the other launcher variables; use torchrun or unset RANK")
        return int(environment["WORLD_SIZE"])
    if "SLURM_STEP_ID" in environment and int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        environment["RANK"] = environment["SLURM_PROCID"]
        environment["LOCAL_RANK"] = environment["SLURM_LOCALID"]
        environment["WORLD_SIZE"] = environment["SLURM_STEP_NUM_TASKS"]
        environment.setdefault("MASTER_ADDR", first_host(environment["SLURM_STEP_NODELIST"]))
        job = int(environment["SLURM_JOB_ID"]) * 7 + int(environment["SLURM_STEP_ID"])
        environment.setdefault("MASTER_PORT", str(PORTS[job % len(PORTS)]))
        return int(environment["WORLD_SIZE"])
    return None


def first_host(nodelist: str) -> str:
    """`gpu[003-007,9],big1` -> `gpu003`."""
    found = re.match(r"([^,\[]+)(?:\[([^,\-\]]+))?", nodelist)
    assert found, nodelist
    return found.group(1) + (found.group(2) or "")
