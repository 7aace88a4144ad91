"""What tests leave out, because it takes a large part of their time and a few tests that do it suffice.

Applied to the processes of pytest and, by `support.fork_server`, to those of the commands.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from hydra._internal.hydra import Hydra
from hydra.types import RunMode
from matplotlib.figure import Figure
from PIL import Image
from torch.distributed.launcher import api

from train.report import style

save_rendered = style.save


def shorten() -> None:
    """Leaves out the rendering of plots, and the composition that only reads `hydra.mode`."""
    style.save = save_blank
    Hydra.get_mode = _mode  # type: ignore[method-assign]


def fork_ranks() -> None:
    """Makes the ranks of a command forks of it; tests/training/test_launch.py starts them as users do."""
    api.LaunchConfig = partial(api.LaunchConfig, start_method="fork")  # type: ignore[misc, assignment]


def save_blank(made: Figure, path: Path) -> None:
    """Writes a white image of the plot's size. Tests with the fixture `rendered_plots` render theirs."""
    width, height = made.canvas.get_width_height()
    Image.new("RGB", (width, height), "white").save(path)


def _mode(hydra: Hydra, config_name: str | None, overrides: list[str], compose: Any = Hydra.get_mode) -> RunMode | None:
    """As Hydra's own, which composes the configuration an additional time; in `conf/` only the group `sweep` sets a mode."""
    is_set = any(word.startswith(("sweep=", "hydra.mode=")) for word in overrides)
    return compose(hydra, config_name, overrides) if is_set else None
