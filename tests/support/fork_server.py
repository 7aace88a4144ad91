"""Runs commands as forks of one process that has imported what they need.

Every command of this project first imports torch, transformers, DeepSpeed and datasets: about three seconds of a core. A fork
has them already, and is otherwise a process of its own: arguments, working directory, environment, streams, signals, exit code.
Commands with another PYTHONPATH need a server of their own.

    server = ForkServer(environment)
    server.install(folder, {"sage-train": "train.cli.train"})  # executables, for PATH
    server.close()
"""

import atexit
import contextlib
import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NoReturn

PRELOADED = (
    *("train.cli.train", "train.cli.validate", "train.cli.data", "sage.commands.generate", "train.cli.export"),
    *("torch", "transformers", "deepspeed", "datasets", "matplotlib.pyplot", "sage.bench.measurement", "train.job.loop"),
    *("train.job.build", "data_prep.pocket.world", "checkpoints.export.exporter"),
    "deepspeed.runtime.zero.muon.muon_optimizer",  # by every engine, whatever its optimizer
    *("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl", "transformers.models.llava_onevision.modeling_llava_onevision"),
)
READY = b"ready\n"
# Isolated and without site-packages: 0.02 s. Stands for the command: passes on its signals, and ends as it does. `python`
# passes on what it runs neither as a module nor as a file.
CLIENT = """\
#!{python} -SE
import json, os, signal, socket, sys
target, arguments = {target!r}, sys.argv[1:]
if target is None:
    if arguments[:1] == ["-m"]:
        target, arguments = arguments[1], arguments[2:]
    elif arguments and arguments[0].endswith(".py"):
        target, arguments = os.path.abspath(arguments[0]), arguments[1:]
    else:
        os.execv({python!r}, [{python!r}, *arguments])
request = json.dumps([target, arguments, os.getcwd(), dict(os.environ)]).encode()
connection = socket.socket(socket.AF_UNIX)
connection.connect({address!r})
socket.send_fds(connection, [len(request).to_bytes(4, "big")], [0, 1, 2])
connection.sendall(request)
answers = connection.makefile()
pid = int(answers.readline())
def pass_on(number, _):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, pass_on)
code = int(answers.readline() or 70)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
if code < 0:
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


class ForkServer:
    """A process that runs commands in forks of itself.

    Args:
        environment: of the server, e.g. PYTHONPATH. A command has that of the process that calls it.

    Raises:
        AssertionError: the server does not start.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory()  # the address of a socket is short
        self._address = f"{self._folder.name}/socket"
        command = [sys.executable, str(Path(__file__)), self._address]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(environment))
        assert self._process.stdout is not None
        assert READY in self._process.stdout, "the server of commands did not start"  # after what imports print

    def script(self, target: str | None) -> str:
        """Returns an executable's text: runs a module (`a.b`) or a file (`/a/b.py`) in a fork; None = `python`."""
        return CLIENT.format(python=sys.executable, target=target, address=self._address)

    def install(self, folder: Path, targets: Mapping[str, str | None]) -> None:
        """Writes executables into a folder for PATH, each with its target for `script`."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, target in targets.items():
            (folder / name).write_text(self.script(target), encoding="utf-8")
            (folder / name).chmod(0o755)

    def command(self, target: str) -> list[str]:
        """Returns a command line that runs a module or a file in a fork; arguments follow."""
        return [sys.executable, "-SE", "-c", self.script(target)]

    def close(self) -> None:
        """Ends the server; commands that still run go on."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
        self._folder.cleanup()


def serve(address: str) -> None:
    """Answers requests until stdin ends. Returns in a fork, which then runs its command."""
    import importlib

    for module in PRELOADED:
        importlib.import_module(module)
    shortcuts = importlib.import_module("shortcuts")  # from the folder of this script
    shortcuts.shorten()
    shortcuts.fork_ranks()
    gc.freeze()  # no collection of a fork visits the imported modules, which would copy them
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    os.write(1, READY)
    while True:
        readable, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in readable:
            sys.exit(0)
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            run_and_report(connection)
        connection.close()
        reap()


def reap() -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def run_and_report(connection: socket.socket) -> NoReturn:
    """In a fork: runs the command of a request in another fork, and reports its process id and its exit code.

    Kills the command and its children if the caller is killed.
    """
    size, streams, _, _ = socket.recv_fds(connection, 4, 3)
    with connection.makefile("rb") as request:
        target, arguments, folder, environment = json.loads(request.read(int.from_bytes(size, "big")))
    child = os.fork()
    if child == 0:
        connection.close()
        os.setsid()
        become(target, arguments, folder, environment, streams)
    for stream in streams:
        os.close(stream)
    connection.sendall(f"{child}\n".encode())
    ended = os.pidfd_open(child)
    readable, _, _ = select.select([connection, ended], [], [])
    if ended not in readable:
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def become(target: str, arguments: list[str], folder: str, environment: dict[str, str], streams: list[int]) -> NoReturn:
    """Turns this process into a command; ends it."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    sys.argv = [target, *arguments]
    if target.endswith(".py"):
        sys.path[0] = str(Path(target).parent)
        end(partial(runpy.run_path, target, run_name="__main__"))
    sys.path[0] = folder
    if not hasattr(sys.modules.get(target), "__path__"):
        sys.modules.pop(target, None)  # it is run again, under another name
    sys.modules.pop(f"{target}.__main__", None)
    end(partial(runpy.run_module, target, run_name="__main__", alter_sys=True))


def end(run: Callable[[], object]) -> NoReturn:
    """Runs a function and exits as Python does, except that nothing is deleted, which would copy the imported modules."""
    code: object = None
    try:
        run()
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    serve(sys.argv[1])
