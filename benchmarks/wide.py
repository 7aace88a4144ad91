"""`python -m benchmarks.wide`: a pocket target, or a Llama, with more weights and the same function.

The MLPs of the text layers get more rows in gate and up, random with the standard deviation of the present ones, and a zero
column of down for each: every pass reads and multiplies the added weights, and they add nothing. Texts stay the same, drafts
stay valid, and a pass takes as long as that of a larger target.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoConfig

from data_prep.pocket.architecture import FAMILIES, WEIGHTS, WIDTH
from sage.commands.cli import new_parser, run
from sage.io.files import naming_write_errors, read_json, write_json
from sage.io.folders import new_folder
from sage.targets.loading import meta_target, path_of_target

MAX_MLP = 65536  # 1.8 GB of weights in float32
MLP_WEIGHT = re.compile(r"\.layers\.\d+\.mlp\.(gate|up|down)_proj\.weight$")  # of text layers
SEED = 0  # of the added rows
REMEDY = f"give one of {', '.join(f'pocket_{name}' for name in FAMILIES)}, or a folder of data_prep.pocket.build"


def widen_to(target: str, megabytes: float, out: Path) -> int:
    """Writes the target with MLPs so wide that a float32 pass reads about that many megabytes of weights.

    Returns:
        its `intermediate_size`.

    Raises:
        ValueError: neither a pocket target nor a Llama, or a size that it cannot be widened to.
        CannotWrite: the folder `out` cannot be written.
    """
    folder = Path(path_of_target(target))
    if not (folder / "config.json").is_file():
        raise ValueError(f"--target: {target}: no folder with a config.json; {REMEDY}")
    config = read_json(folder / "config.json")
    kind, width = config.get("model_type"), config.get("text_config", config).get("hidden_size")
    if kind != "llama" and (kind not in FAMILIES or width != WIDTH):
        raise ValueError(f"--target: {target}: not a pocket target ({kind}, hidden_size {width}); {REMEDY}")
    size = size_for(folder, megabytes)
    widen(folder, config, size, out)
    return size


def size_for(folder: Path, megabytes: float) -> int:
    """Returns the multiple of the present `intermediate_size` with which a float32 pass reads closest to that many megabytes
    (1e6 bytes) of weights; ValueError for fewer than the target has itself, or for too many.
    """
    target = meta_target(AutoConfig.from_pretrained(folder))
    size, mlp = target.text_config.intermediate_size, 3 * target.hidden_size * target.text_config.intermediate_size
    read = [*target.text_model.layers.parameters(), target.lm_head.weight]  # of the embedding, single rows
    present_mb, step_mb = 4 * sum(weight.numel() for weight in read) / 1e6, 4 * mlp * target.num_layers / 1e6
    most_mb = present_mb + step_mb * (MAX_MLP / size - 1)
    if not present_mb - step_mb / 2 <= megabytes <= most_mb:
        raise ValueError(f"--megabytes: {megabytes:g} megabytes; allowed for {folder.name}: {present_mb:.0f} to {most_mb:.0f}")
    return int(size * (1 + round((megabytes - present_mb) / step_mb)))


@torch.no_grad()
def widen(folder: Path, config: dict[str, Any], size: int, out: Path) -> None:
    """Writes the target in `folder`, with an `intermediate_size` of `size`, to the folder `out`; raises CannotWrite."""
    generator = torch.Generator().manual_seed(SEED)
    tensors = load_file(folder / WEIGHTS)
    wide = {name: _widened(name, weight, size, generator) for name, weight in sorted(tensors.items())}
    with naming_write_errors(out, "another folder"), new_folder(out) as inside:
        shutil.copytree(folder, inside, dirs_exist_ok=True, ignore=shutil.ignore_patterns(WEIGHTS, "config.json", "score.json"))
        config.get("text_config", config)["intermediate_size"] = size
        write_json(inside / "config.json", config)
        save_file(wide, inside / WEIGHTS, metadata={"format": "pt"})


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
    parser = new_parser("python -m benchmarks.wide", description=__doc__)
    parser.add_argument("--target", required=True, metavar="NAME_OR_DIR", help="a pocket target")
    parser.add_argument("--megabytes", required=True, type=float, metavar="MB", help="weights that a float32 pass reads")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="a new folder")
    options = parser.parse_args()
    if options.out.exists():
        raise ValueError(f"--out: {options.out} exists; give a new folder, or remove it")
    print(f"{options.out}: MLP of {widen_to(options.target, options.megabytes, options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
