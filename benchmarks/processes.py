"""Servers as processes of their own, on chosen cores, until they answer."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from sage.io.machine import pin
from train.serve_check.vllm_process import tail_of

START_S, STOP_S, POLL_S = 600.0, 30.0, 0.2


@dataclass
class Server:
    """A process that serves at an address once it has started."""

    process: subprocess.Popen[bytes]
    address: str
    label: str
    log: Path

    def wait(self) -> None:
        """Waits until it accepts requests; ValueError if it ends, or takes too long."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if httpx.get(f"{self.address}/health", timeout=5).is_success:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(POLL_S)
        raise ValueError(f"{self.label}: does not start, see {tail_of(self.log)}")


def free_port() -> int:
    """Returns a port of this machine that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def pinned(command: Sequence[str], cores: Sequence[int], variables: Mapping[str, str], **files: Any) -> subprocess.Popen[bytes]:
    """Starts a process on some cores; it leads a group, to which its own processes belong."""
    process = subprocess.Popen(command, env=dict(variables), start_new_session=True, **files)
    pin(process.pid, cores)
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process, and those that it has started."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # processes that it has started
    process.wait()
