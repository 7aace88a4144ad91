"""What tests leave out, because it takes a large part of their time and a few tests that do it suffice.

Applied to the processes of pytest and, by `support.fork_server`, to those of the commands.
"""

from __future__ import annotations

from copy import copy
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.hydra import Hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from matplotlib.figure import Figure
from PIL import Image
from torch.distributed.launcher import api

from train.report import run_page, style

save_rendered, svg_rendered, draw_curves = style.save, style.svg, run_page.draw_curves
_PARSED: dict[tuple[str, str], Any] = {}


def shorten() -> None:
    """Leaves out plots, the composition that only reads `hydra.mode`, and what Hydra parses repeatedly."""
    style.save, style.svg, run_page.draw_curves = save_blank, lambda *_: "<svg></svg>", lambda *_: Figure()
    FileConfigSource.load_config = _load_config  # type: ignore[method-assign]
    OverridesParser.parse_rule = _parse_rule  # type: ignore[method-assign]
    Hydra.get_mode = _mode  # type: ignore[method-assign]


def fork_ranks() -> None:
    """Makes the ranks of a command forks of it; tests/training/test_launch.py starts them as users do."""
    api.LaunchConfig = partial(api.LaunchConfig, start_method="fork")  # type: ignore[misc, assignment]


def save_blank(made: Figure, path: Path) -> None:
    """Writes a white image of the plot's size. Tests with the fixture `rendered_plots` render theirs."""
    width, height = made.canvas.get_width_height()
    Image.new("RGB", (width, height), "white").save(path)


def _load_config(source: FileConfigSource, config_path: str, load: Any = FileConfigSource.load_config) -> ConfigResult:
    """As Hydra's own, with the parser of libyaml."""
    with mock.patch.object(yaml, "SafeLoader", getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        return load(source, config_path)


def _parse_rule(parser: OverridesParser, text: str, rule: str, parse: Any = OverridesParser.parse_rule) -> Any:
    """As Hydra's own, once per text: parsing an override takes ten milliseconds, and tests share most of theirs."""
    if (text, rule) not in _PARSED:
        _PARSED[text, rule] = parse(parser, text, rule)
    return copy(_PARSED[text, rule])


def _mode(hydra: Hydra, config_name: str | None, overrides: list[str], compose: Any = Hydra.get_mode) -> RunMode | None:
    """As Hydra's own, which composes the configuration an additional time; in `conf/` only the group `sweep` sets a mode."""
    is_set = any(word.startswith(("sweep=", "hydra.mode=")) for word in overrides)
    return compose(hydra, config_name, overrides) if is_set else None
