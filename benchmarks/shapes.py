"""Published targets with random weights, complete or with fewer layers."""

from __future__ import annotations

from typing import Any

import torch
import yaml

from sage.io.files import config_dir
from sage.targets import Target
from sage.targets.families import family_of


def published_architecture(name: str) -> dict[str, Any]:
    """Returns the published sizes of a target of conf/target, as in its config.json; ValueError for a name without."""
    files = {file.stem: yaml.safe_load(file.read_text(encoding="utf-8")) for file in (config_dir() / "target").glob("*.yaml")}
    known = {target: file["architecture"] for target, file in sorted(files.items()) if "architecture" in file}
    if name not in known:
        raise ValueError(f"{name}: no target with published sizes; choose one of {', '.join(known)}")
    return dict(known[name])


def limit_layers(architecture: Any, num_layers: int | None, name: str) -> int:
    """Leaves so many text layers in the configuration of the target `name`, all for None; returns how many it had."""
    text = architecture.get_text_config()
    complete = int(text.num_hidden_layers)
    if num_layers is not None and not 1 <= num_layers <= complete:
        raise ValueError(f"--layers {num_layers}: {name} takes 1 to {complete}")
    text.num_hidden_layers = num_layers or complete
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[: text.num_hidden_layers]
    return complete


def limit_vision(architecture: Any) -> None:
    """Leaves one block in the vision tower, which passes over text do not read."""
    vision: Any = getattr(architecture, "vision_config", None)
    for key in {"depth", "num_hidden_layers"} & set(vars(vision or object)):
        setattr(vision, key, 1)
    if hasattr(vision, "deepstack_visual_indexes"):
        vision.deepstack_visual_indexes = []


def random_target(architecture: Any, dtype: torch.dtype, device: torch.device) -> Target:
    with device:
        return Target(family_of(architecture).auto_class.from_config(architecture, dtype=dtype))
