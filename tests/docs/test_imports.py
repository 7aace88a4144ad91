"""Imports between packages and between the rooms of sage/ and train/, compared with the graphs drawn in ARCHITECTURE.md."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from support.train_helpers import python

ROOT = Path(__file__).parents[2]
PACKAGES = ("sage", "data_prep", "checkpoints", "train", "benchmarks")
MAX_ROOMS = 15
FORBIDDEN = {  # third-party packages, by the package that may not import them
    "sage": {"hydra", "omegaconf", "deepspeed", "datasets", "wandb", "matplotlib", "rich"},
    "data_prep": {"hydra", "omegaconf", "deepspeed", "wandb"},
    "checkpoints": {"hydra", "omegaconf", "deepspeed", "wandb"},
}
ONLY_IN = {"deepspeed": "train/engine/", "wandb": "train/monitor/"}
ONLY_IN |= dict.fromkeys(("fastapi", "starlette", "uvicorn", "prometheus_client"), "sage/serving/")
BY_NAME = {"sage/training/__init__.py": "train"}  # imports a package above by name; only type checkers read its import
NEVER_IMPORTED = {"benchmarks", "tests", "support"}
Graph = dict[str, set[str]]


def imported_modules(source: str) -> set[str]:
    """Modules imported anywhere in a file, also inside functions and under TYPE_CHECKING."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@cache
def read_sources() -> dict[str, set[str]]:
    """Path relative to the repository -> imported modules, of every file of the packages."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    found = {path.relative_to(ROOT).as_posix(): imported_modules(path.read_text()) for path in paths}
    for path, package in BY_NAME.items():
        found[path] = {module for module in found[path] if module.split(".")[0] != package}
    return found


def package_graph(sources: dict[str, set[str]]) -> Graph:
    graph: Graph = {package: set() for package in PACKAGES}
    for path, modules in sources.items():
        package = path.split("/")[0]
        graph[package] |= {module.split(".")[0] for module in modules} & (set(PACKAGES) | NEVER_IMPORTED) - {package}
    return graph


def room_graph(sources: dict[str, set[str]], package: str) -> Graph:
    """Imports between the folders of a package. Its `__init__.py` is the room `api`, used by imports of the package itself."""
    rooms = {parts[1] for path in sources if len(parts := path.split("/")) > 2 and parts[0] == package}
    graph: Graph = {room: set() for room in rooms}
    for path, modules in sources.items():
        top, own, *_ = path.split("/")
        own = "api" if own == "__init__.py" else own
        if top == package and own != "__main__.py":
            used = {
                "api" if module == package else module.split(".")[1] for module in modules if module.split(".")[0] == package
            }
            graph.setdefault(own, set()).update(used & {*rooms, "api"} - {own})
    return graph


def drawn_graph(title: str, text: str) -> Graph:
    """Reads a fenced block ```TITLE with lines `NAME -> NAME, NAME`, the highest name first."""
    block = re.search(rf"^```{title}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert block, f"ARCHITECTURE.md has no block ```{title}"
    lines = [line.partition("->") for line in block.group(1).splitlines() if line.strip()]
    return {name.strip(): {used.strip() for used in arrows.split(",") if used.strip()} for name, _, arrows in lines}


@pytest.mark.parametrize("package", ["benchmarks", "checkpoints", "data_prep", "sage", "train"])
def test_modules_form_no_circle(package: str) -> None:
    """Not even with the imports under TYPE_CHECKING and inside functions; CycleError names the modules."""
    sources = {path: modules for path, modules in read_sources().items() if path.startswith(f"{package}/")}
    names = {path: path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in sources}
    graph = {names[path]: modules & set(names.values()) - {names[path]} for path, modules in sources.items()}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("title", ["packages", "sage", "train"])
def test_imports_are_the_drawn_ones_and_point_down(title: str) -> None:
    sources = read_sources()
    graph = package_graph(sources) if title == "packages" else room_graph(sources, title)
    drawn = drawn_graph(title, (ROOT / "ARCHITECTURE.md").read_text())
    assert graph == drawn and len(graph) <= MAX_ROOMS
    order = list(drawn)
    assert [f"{name} -> {used}" for name in order for used in drawn[name] & set(order[: order.index(name)])] == []


def forbidden_imports(path: str, modules: set[str]) -> set[str]:
    """Third-party packages that a file may not import."""
    used = {module.split(".")[0] for module in modules}
    return used & FORBIDDEN.get(path.split("/")[0], set()) | {
        name for name, home in ONLY_IN.items() if name in used and not path.startswith(home)
    }


def test_no_package_imports_a_forbidden_third_party() -> None:
    found = {path: forbidden for path, modules in read_sources().items() if (forbidden := forbidden_imports(path, modules))}
    assert found == {}


LIGHT = {  # in one process, in this order
    "import sage.io.tables": {"torch", "numpy", "transformers"},
    "import data_prep, data_prep.config as c; c.validate(c.DataConfig())": {"torch"},
    "import sage.drafts.registry, train.config.schema": {"torch"},
    "from train.cli.export import parse_args": {"torch"},
}
WITH_TORCH = {"import sage; sage.generate; sage.load_target; sage.trees.sage.confidence": FORBIDDEN["sage"] - {"httpx", "rich"}}


@pytest.mark.slow
@pytest.mark.parametrize("heavy", [LIGHT, WITH_TORCH])
def test_imports_are_light(heavy: dict[str, set[str]], tmp_path: Path) -> None:
    lines = [f"{statement}; print({names!r} & set(sys.modules))" for statement, names in heavy.items()]
    done = python("-c", "\n".join(["import sys", *lines]), cwd=tmp_path)
    assert done.stdout == "set()\n" * len(heavy), done.stderr
