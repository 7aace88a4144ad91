"""Pocket targets with more weights and the same function, for measurements: the option `--widen-to MB`, and a command.

    python -m benchmarks.wide --target pocket_qwen2_5_vl --megabytes 62 --out wide_62

The MLPs of the text layers get more rows in gate and up, random with the standard deviation of the present ones, and a zero
column of down for each: every pass reads and multiplies the added weights, and they add nothing. Texts stay the same, drafts
stay valid, and a pass takes as long as that of a larger target.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

from benchmarks.shapes import Shape, shape_of
from data_prep.pocket.architecture import FAMILIES, WEIGHTS, WIDTH
from sage.commands import cli
from sage.io.files import locked, read_json, user_cache_dir, write_json, writing
from sage.io.manifest import sha256
from sage.targets.loading import path_of_target

OPTION = "--widen-to"
MAX_MLP = 65536  # 1.8 GB of weights in float32
MLP_WEIGHT = re.compile(r"\.layers\.\d+\.mlp\.(gate|up|down)_proj\.weight$")  # of text layers
SEED = 0  # of the added rows
REMEDY = f"give one of {', '.join(f'pocket_{name}' for name in FAMILIES)}, or a folder of data_prep.pocket.build"


def add_widen_option(parser: argparse.ArgumentParser) -> None:
    """Adds the option; `widened` reads it."""
    text = "widens a pocket target, without changing its function, until a float32 pass reads that many megabytes of weights"
    parser.add_argument(OPTION, type=float, metavar="MB", help=f"{text}; such as 62 or 226")


def widened(target: str, args: argparse.Namespace) -> str:
    """Returns the target to measure; raises ValueError for one that cannot be widened."""
    return target if args.widen_to is None else str(wide_target(target, args.widen_to, OPTION))


def wide_target(target: str, megabytes: float, key: str = OPTION) -> Path:
    """Returns a pocket target with about that many megabytes of weights (`size_for`): the target itself where that is its size,
    else a widened one, which is made once and kept in the cache folder.

    Raises:
        ValueError: not a pocket target, or a size that it cannot be widened to; names `key`.
        CannotWrite: the cache folder cannot be written.
    """
    folder, config = _read_source(target, key)
    size = size_for(shape_of(target, config), megabytes, key)
    if size == config["text_config"]["intermediate_size"]:
        return folder
    kept = user_cache_dir() / "wide_targets" / f"{folder.name}_mlp{size}_{sha256(folder / WEIGHTS)[:16]}"
    with locked(kept, "another XDG_CACHE_HOME"):
        if not kept.exists():
            widen(folder, config, size, kept)
    return kept


def _read_source(target: str, key: str) -> tuple[Path, dict[str, Any]]:
    """Returns folder and config.json of the pocket target of that name or folder; ValueError for any other target."""
    folder = Path(path_of_target(target))
    if not (folder / "config.json").is_file():
        raise ValueError(f"{key}: {target}: no folder with a config.json; {REMEDY}")
    config = read_json(folder / "config.json")
    kind, width = config.get("model_type"), config.get("text_config", {}).get("hidden_size")
    if kind not in FAMILIES or width != WIDTH:
        raise ValueError(f"{key}: {target}: not a pocket target ({kind}, hidden_size {width}); {REMEDY}")
    return folder, config


def size_for(shape: Shape, megabytes: float, key: str = OPTION) -> int:
    """Returns the multiple of the present `intermediate_size` with which a float32 pass reads closest to that many megabytes
    (1e6 bytes) of weights; ValueError for fewer than the target has itself, or for too many.
    """
    present_mb = 4 * shape.pass_parameters / 1e6
    step_mb = 4 * 3 * shape.hidden_size * shape.intermediate_size * shape.num_layers / 1e6
    most_mb = present_mb + step_mb * (MAX_MLP / shape.intermediate_size - 1)
    if not present_mb - step_mb / 2 <= megabytes <= most_mb:
        raise ValueError(f"{key}: {megabytes:g} megabytes; allowed for {shape.name}: {present_mb:.0f} to {most_mb:.0f}")
    return shape.intermediate_size * (1 + round((megabytes - present_mb) / step_mb))


@torch.no_grad()
def widen(folder: Path, config: dict[str, Any], size: int, out: Path) -> None:
    """Writes the target in `folder`, with an `intermediate_size` of `size`, to the folder `out`; raises CannotWrite."""
    generator = torch.Generator().manual_seed(SEED)
    tensors = load_file(folder / WEIGHTS)
    wide = {name: _widened(name, weight, size, generator) for name, weight in sorted(tensors.items())}
    with writing(out, "another folder") as inside:
        shutil.copytree(folder, inside, ignore=shutil.ignore_patterns(WEIGHTS, "config.json", "score.json"))
        write_json(inside / "config.json", {**config, "text_config": {**config["text_config"], "intermediate_size": size}})
        save_file(wide, inside / WEIGHTS, metadata={"format": "pt"})
        (inside / WEIGHTS).chmod(0o644)


def _widened(name: str, weight: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Returns gate or up [size, D] with random rows added, down [D, size] with zero columns; any other tensor as it is."""
    kind = MLP_WEIGHT.search(name)
    if kind is None:
        return weight
    if kind[1] == "down":
        return pad(weight, (0, size - weight.shape[1]))
    rows = torch.randn(size - len(weight), weight.shape[1], generator=generator) * weight.float().std()
    return torch.cat((weight, rows.to(weight.dtype)))


def main() -> int:
    parser = cli.new_parser("python -m benchmarks.wide", description=__doc__)
    parser.add_argument("--target", required=True, metavar="NAME_OR_DIR", help="a pocket target")
    parser.add_argument("--megabytes", required=True, type=float, metavar="MB", help="weights that a float32 pass reads")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="a new folder")
    options = parser.parse_args()
    if options.out.exists():
        raise ValueError(f"--out: {options.out} exists; give a new folder, or remove it")
    folder, config = _read_source(options.target, "--target")
    size = size_for(shape_of(options.target, config), options.megabytes, "--megabytes")
    widen(folder, config, size, options.out)
    print(f"{options.out}: MLP of {size}")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
