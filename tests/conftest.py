"""Shared fixtures: tiny random targets of both families, and a guard against the network.

Imports torch only inside the fixtures: the process that distributes the tests among others has no use for it.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.browser import NO_BROWSER

if TYPE_CHECKING:
    from support.accelerator import Traffic
    from support.fake_cuda import FakeCuda
    from support.fork_server import ForkServer

    import sage


# Files whose tests share a costly fixture, or what an earlier test has made: one process runs each of them.
ONE_PROCESS = (
    "tests/docs/test_commands.py",
    "tests/docs/test_packaging.py",
    "tests/docs/test_pages.py",
    "tests/docs/test_papers.py",
    "tests/pages/test_in_browser.py",
    "tests/passes/test_compiled.py",
    "tests/training/test_ranks.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives a file in `ONE_PROCESS` to one process, and other tests one by one to the process that is free."""
    from xdist.scheduler import LoadScopeScheduling  # is not on every machine with a GPU that runs some of the tests

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return path if path in ONE_PROCESS else nodeid

    return Scheduler(config, log)


@pytest.fixture(autouse=True)
def plain_linear() -> Iterator[None]:
    """Takes back that ZeRO stage 3 replaces `nn.functional.linear` for the whole process."""
    yield
    if (torch := sys.modules.get("torch")) is not None:
        torch.nn.functional.linear = torch._C._nn.linear


def pytest_configure() -> None:
    gc.disable()  # until everything is imported, which frees nothing


def pytest_collection_finish() -> None:
    gc.freeze()  # no collection visits the imported modules again
    gc.enable()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After each file, exempts what lives on from later collections, of which DeepSpeed demands several per engine."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Runs slow tests first where several processes share the tests, so that no process waits for a slow test at the end."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says in a line of its own that the pages were not opened in a browser."""
    if why := next(
        (text for one in terminalreporter.stats.get("skipped", ()) if NO_BROWSER in (text := str(one.longrepr))), ""
    ):
        terminalreporter.write_line(f"SKIPPED the tests of pages in a browser: {why}", red=True)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps tests out of the user's cache folder: compiled passes, measured costs, prepared examples. Shared by processes."""
    folder = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str((folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "user_cache"))
        yield


@pytest.fixture(autouse=True, scope="session")
def shorter_tests() -> None:
    """Leaves out what tests need not repeat."""
    from support.shortcuts import shorten

    shorten()


@pytest.fixture
def rendered_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws and renders the plots of a test."""
    from support import shortcuts

    from train.report import run_page, style

    monkeypatch.setattr(style, "save", shortcuts.save_rendered)
    monkeypatch.setattr(run_page, "draw_curves", shortcuts.draw_curves)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any connection beyond this machine fails the test."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise AssertionError(f"a test reached for the network: {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture(autouse=True)
def fresh_logging() -> Iterator[None]:
    """Undoes what a command that ran in this process has configured: its handlers write to a stream that ends with its test."""
    root_handlers, formatwarning = list(logging.root.handlers), warnings.formatwarning
    yield
    warnings.formatwarning = formatwarning
    for name in ("train", "data_prep", "checkpoints", "sage"):
        package = logging.getLogger(name)
        package.handlers, package.propagate = [], True
        package.setLevel(logging.NOTSET)
    for handler in list(logging.root.handlers):
        if type(handler) is logging.StreamHandler and handler not in root_handlers:
            logging.root.removeHandler(handler)


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of untrained pocket targets, by family; shared by all tests, not to be changed."""
    from support.train_helpers import make_target

    where = tmp_path_factory.mktemp("pocket_targets")
    return {family: make_target(where, family) for family in ("qwen2_5_vl", "llava_onevision")}


@pytest.fixture(scope="session")
def target(targets: dict[str, Path]) -> Path:
    """Folder of an untrained pocket Qwen2.5-VL."""
    return targets["qwen2_5_vl"]


@pytest.fixture(scope="session")
def commands() -> Iterator[ForkServer]:
    """Runs commands and files of tests/ as forks of a process that has imported what they need."""
    from support.fork_server import ForkServer
    from support.train_helpers import ROOT, environment

    given = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "MPLBACKEND": "agg", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # read at import
    server = ForkServer(environment() | given)
    yield server
    server.close()


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    from support.fake_cuda import FakeCuda

    return FakeCuda(monkeypatch)


@pytest.fixture
def sage_export(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs `sage-export`; returns exit code, stdout and stderr."""
    from support.messages import exit_code

    from train.cli.export import main

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = exit_code(main, *arguments)
        return code, *capsys.readouterr()

    return run


@pytest.fixture(params=["qwen2_5_vl", "llava_onevision"])
def tiny_target(request: pytest.FixtureRequest) -> sage.Target:
    """Both families in turn."""
    from support.models import make_llava, make_qwen

    return make_qwen() if request.param == "qwen2_5_vl" else make_llava()


@pytest.fixture
def traffic() -> Iterator[Traffic]:
    """A pretend accelerator for the duration of a test: its counts."""
    import torch
    from support import accelerator

    if not accelerator.IS_SUPPORTED:
        pytest.skip(f"torch {torch.__version__} cannot register a device type written in Python")
    with accelerator.pretend_accelerator() as traffic:
        yield traffic


@pytest.fixture
def tiny_qwen() -> sage.Target:
    from support.models import make_qwen

    return make_qwen()


@pytest.fixture
def tiny_llava() -> sage.Target:
    from support.models import make_llava

    return make_llava()
