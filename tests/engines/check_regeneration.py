"""Regenerates rows with a vLLM server and compares them with our decoder's: `make engines-regenerate` runs this.

The pocket Qwen2.5-VL, float32, greedy, conversations with images. Checked are

1. the rows of our decoder, with 1 and with 8 conversations at a time;
2. the same after `kill -9` of the client in the middle, and the same command again;
3. the same after `kill -9` of the server in the middle: the client ends with one line and exit code 2, and the same command
   continues once there is a server again. Every conversation is there once.

    python tests/engines/check_regeneration.py --engine-python .venv-engines/bin/python [--items 200]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.serving import beside_vllm as servers
from sage.io.machine import available_cores

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "data_prep" / "pocket" / "targets" / "pocket_qwen2_5_vl"
FAMILIES = "[question,caption,chart,sign,compare]"  # those with images
CONCURRENCY = 8
POLL_S = 0.05


class Lab:
    """Our command and vLLM's server.

    Args:
        scratch: receives rows, caches and logs.
        python: interpreter of the engine's environment.
        items: number of conversations.
    """

    def __init__(self, scratch: Path, python: Path, items: int) -> None:
        self.scratch, self.items, self.port = scratch, items, servers.free_port()
        shared: dict[str, Any] = {"target": str(TARGET), "python": python.absolute(), "scratch": scratch}
        cores = available_cores()[-1:]
        self._servers = servers.Lab(draft=scratch, export=scratch, cores=cores, max_requests=CONCURRENCY, **shared)

    @contextmanager
    def serving(self) -> Iterator[subprocess.Popen[bytes]]:
        """Runs the server, every time on the same port; its process leads a group, which is killed at the end."""
        with servers.serving(servers.ServerSetting(side=servers.VLLM), self._servers, self.port) as server:
            server.wait()
            yield server.process

    def command(self, name: str, concurrency: int = 0) -> list[str]:
        """Returns the command that writes `NAME.jsonl`; without a concurrency, by our decoder."""
        words = [
            "action=regenerate",
            "target=pocket_qwen2_5_vl",
            f"data.num_examples={self.items}",
            "regenerate.max_new_tokens=128",
        ]
        words += [f"data.sources.pocket.families={FAMILIES}", f"data.cache_dir={self.scratch}/cache", f"out={self.out(name)}"]
        if concurrency:
            words += [f"regenerate.server=http://127.0.0.1:{self.port}/v1", f"regenerate.concurrency={concurrency}"]
            words += ["regenerate.retries=2"]
        return [sys.executable, "-m", "train.cli.data", *words]

    def run(self, name: str, concurrency: int = 0) -> int:
        """Runs the command to its end; returns its exit code."""
        begin = time.monotonic()
        code = subprocess.run(self.command(name, concurrency), cwd=ROOT, check=False).returncode
        print(f"{name}: exit code {code}, {time.monotonic() - begin:.0f} s", flush=True)
        return code

    def run_to_the_middle(self, name: str) -> subprocess.Popen[bytes]:
        """Starts the command; returns its process once a third of the conversations is answered."""
        process = subprocess.Popen(self.command(name, CONCURRENCY), cwd=ROOT)
        while process.poll() is None and self.kept(name) < self.items // 3:
            time.sleep(POLL_S)
        return process

    def out(self, name: str) -> Path:
        return self.scratch / f"{name}.jsonl"

    def kept(self, name: str) -> int:
        """Number of conversations in the part file."""
        part = self.scratch / f"{name}.jsonl.part-0-of-1.jsonl"
        return part.read_bytes().count(b"\n") if part.exists() else 0

    def rows(self, name: str) -> list[Any]:
        """Rows without what may differ: the provenance, and the folder of the images."""
        text = self.out(name).read_text().replace(f"{name}_media/", "") if self.out(name).exists() else ""
        return [{**json.loads(line), "provenance": None} for line in text.splitlines()]


def check(lab: Lab) -> list[str]:
    """Runs all checks; returns what is wrong."""
    lab.run("decoder")
    ours, found = lab.rows("decoder"), []

    def expect(name: str, is_right: bool, what: str) -> None:
        if not is_right:
            found.append(f"{name}: {what}")

    def compare(name: str) -> None:
        rows = lab.rows(name)
        same = sum(a == b for a, b in zip(ours, rows, strict=False))
        print(f"{name}: {same} of {len(ours)} rows equal our decoder's", flush=True)
        expect(name, rows == ours and len(rows) == lab.items, "other rows")

    with lab.serving() as server:
        for name, concurrency in (("one_at_a_time", 1), ("several", CONCURRENCY)):
            lab.run(name, concurrency)
            compare(name)
        client = lab.run_to_the_middle("client_killed")
        client.kill()
        client.wait()
        print(f"client killed: {lab.kept('client_killed')} conversations kept", flush=True)
        expect("client_killed", 0 < lab.kept("client_killed") < lab.items, "not killed in the middle")
        lab.run("client_killed", CONCURRENCY)
        compare("client_killed")
        client = lab.run_to_the_middle("server_killed")
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        code = client.wait()
        print(f"server killed: client's exit code {code}, {lab.kept('server_killed')} conversations kept", flush=True)
        expect("server_killed", code == 2 and 0 < lab.kept("server_killed") < lab.items, "not ended in the middle")
    with lab.serving():
        lab.run("server_killed", CONCURRENCY)
        compare("server_killed")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if all checks pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine-python", type=Path, required=True, help="interpreter of the environment with vLLM")
    parser.add_argument("--items", type=int, default=200, help="number of conversations")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        failures = check(Lab(Path(scratch), args.engine_python, args.items))
    print("\n".join(f"FAILED {failure}" for failure in failures) or "regeneration: all checks pass")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
