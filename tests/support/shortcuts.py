"""What tests leave out, because it takes a large part of their time and a few tests that do it suffice.

Applied to the processes of pytest and, by `support.fork_server`, to those of the commands.
"""

import gc
import pickle
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra._internal.defaults_list import DefaultsList, Overrides
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ResultDefault
from hydra.types import RunMode
from matplotlib.figure import Figure
from omegaconf import DictConfig
from PIL import Image
from torch import multiprocessing

from sage.costs import measure
from sage.io.files import config_dir
from sage.runtime import timing
from train.report import run_page, style

save_rendered, draw_curves = style.save, run_page.draw_curves
_COMPOSED: dict[tuple[Any, ...], Any] = {}  # by `_defaults_list` and `_merged`


def shorten() -> None:
    """Leaves out plots, garbage collection of imported modules, most runs of timed passes, the composition that only reads
    `hydra.mode`, and what Hydra merges repeatedly.
    """
    style.save, run_page.draw_curves = save_blank, lambda *_: Figure()
    gc.unfreeze = lambda: None  # what conftest.py has frozen stays frozen after a measurement
    measure.REPEATS = measure.MIN_REPEATS = 2
    timing.MORE = 1  # on a busy machine, every run is disturbed
    CachingConfigRepository.__init__ = _share  # type: ignore[method-assign]
    Hydra.get_mode = _mode  # type: ignore[method-assign]
    config_loader_impl.create_defaults_list = _defaults_list
    ConfigLoaderImpl._compose_config_from_defaults_list = _merged  # type: ignore[method-assign]


def fork_ranks() -> None:
    """Makes the ranks of a command forks of it; tests/training/test_launch.py starts them as users do."""
    multiprocessing.start_processes = partial(multiprocessing.start_processes, start_method="fork")


def save_blank(made: Figure, path: Path) -> None:
    """Writes a white image of the plot's size. Tests with the fixture `rendered_plots` render theirs."""
    width, height = made.canvas.get_width_height()
    Image.new("RGB", (width, height), "white").save(path)


def _share(repo: CachingConfigRepository, delegate: ConfigRepository) -> None:
    """As Hydra's own, without a copy of the sources, which nothing changes."""
    repo.delegate, repo.cache = copy(delegate), {}


def _defaults_list(
    repo: Any,
    config_name: str | None,
    overrides_list: list[Any],
    prepend_hydra: bool,
    skip_missing: bool,
    make: Any = config_loader_impl.create_defaults_list,
) -> DefaultsList:
    """As Hydra's own, once per combination of choices, which most command lines of the tests share."""
    values = Overrides(repo, overrides_list).config_overrides
    choices = tuple(override.input_line for override in overrides_list if not any(override is value for value in values))
    arguments = {"config_name": config_name, "prepend_hydra": prepend_hydra, "skip_missing": skip_missing}
    found = _once(repo, (*arguments.values(), choices), lambda: make(repo=repo, overrides_list=overrides_list, **arguments))
    return replace(found, config_overrides=values)


def _merged(
    loader: ConfigLoaderImpl,
    defaults: list[ResultDefault],
    repo: Any,
    make: Any = ConfigLoaderImpl._compose_config_from_defaults_list,
) -> DictConfig:
    """As Hydra's own, once per list of files."""
    files = tuple((one.config_path, one.package, one.parent, one.is_self, one.primary) for one in defaults)
    content: bytes = _once(repo, files, lambda: pickle.dumps(make(loader, defaults, repo)))
    return pickle.loads(content)


def _once(repo: Any, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """Returns what `make` has returned for the same key and the same schemas; files of a test's own are read every time."""
    if any(source.scheme() == "file" and source.path != str(config_dir()) for source in repo.get_sources()):
        return make()
    schemas = list(_leaves(ConfigStore.instance().repo))
    key = (*key, *map(id, schemas))
    if key not in _COMPOSED:
        _COMPOSED[key] = make(), schemas  # which keeps their ids from being used again
    return _COMPOSED[key][0]


def _leaves(tree: dict[str, Any]) -> Iterator[Any]:
    for value in tree.values():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield value


def _mode(hydra: Hydra, config_name: str | None, overrides: list[str], compose: Any = Hydra.get_mode) -> RunMode | None:
    """As Hydra's own, which composes the configuration an additional time; in `conf/` only the group `sweep` sets a mode."""
    is_set = any(word.startswith(("sweep=", "hydra.mode=")) for word in overrides)
    return compose(hydra, config_name, overrides) if is_set else None
