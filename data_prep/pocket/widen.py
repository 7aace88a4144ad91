"""`python -m data_prep.pocket.widen --target pocket_qwen2_5_vl --mlp 2048 --out DIR`: more weights, the same function.

The MLPs of the text layers get more rows in gate and up, random with the standard deviation of the present ones, and a zero
column of down for each: every pass reads and multiplies the added weights, and they add nothing. Texts stay the same, drafts
stay valid, and a pass takes as long as that of a larger target. The folder has a manifest, and a record
(`sage.targets.widened`) that is verified when a draft is loaded for it.
"""

from __future__ import annotations

import math
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoConfig

from data_prep.pocket.architecture import WEIGHTS
from data_prep.pocket.families import FAMILIES, HEADS, KV_HEADS, WIDTH
from sage.bench.shapes import Shape, shape_of
from sage.commands import cli
from sage.io.files import check_writable, locked, read_json, user_cache_dir, write_json, writing
from sage.io.manifest import MANIFEST, write_manifest
from sage.targets.loading import path_of_target
from sage.targets.target import fingerprint_of
from sage.targets.widened import RECORD, Widening, is_widened, projection_of, tensors_digest

MAX_MLP = 65536  # 1.8 GB of weights in float32
NOT_COPIED = (WEIGHTS, "config.json", "score.json", MANIFEST)
REMEDY = f"give one of {', '.join(f'pocket_{name}' for name in FAMILIES)}, or a folder of data_prep.pocket.build"


@dataclass(frozen=True)
class Source:
    """A pocket target: its name in conf/target or absolute path, its folder, and config.json."""

    name: str
    folder: Path
    config: dict[str, Any]

    @property
    def shape(self) -> Shape:
        return shape_of(self.name, self.config)


def find_source(target: str, key: str = "--target") -> Source:
    """Returns the pocket target of that name or folder; ValueError for any other target, or one that is widened already."""
    path = path_of_target(target)
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{key}: {target}: no folder with a config.json; {REMEDY}")
    if is_widened(folder):
        raise ValueError(f"{key}: {target}: is widened already; give its source, {Widening.read(folder).source}")
    config = read_json(folder / "config.json")
    text = config.get("text_config", {})
    sizes = tuple(text.get(name) for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    if config.get("model_type") not in FAMILIES or sizes != (WIDTH, HEADS, KV_HEADS) or not (folder / WEIGHTS).is_file():
        raise ValueError(f"{key}: {target}: not a pocket target ({config.get('model_type')}, hidden_size {sizes[0]}); {REMEDY}")
    return Source(str(folder.absolute()) if path == target else target, folder, config)


def size_for(source: Source, megabytes: float) -> int:
    """Returns the multiple of the present `intermediate_size` with which a float32 pass reads closest to that many megabytes
    (1e6 bytes) of weights.
    """
    shape = source.shape
    if not 0 < megabytes < math.inf:
        raise ValueError(f"{megabytes:g} megabytes; give a positive number")
    step_bytes = 4 * 3 * shape.hidden_size * shape.intermediate_size * shape.num_layers
    more = round((1e6 * megabytes - 4 * shape.pass_parameters) / step_bytes)
    if more < 0:
        present_mb = 4 * shape.pass_parameters / 1e6
        raise ValueError(f"{megabytes:g} megabytes are less than {source.name} has itself; give at least {present_mb:.0f}")
    return shape.intermediate_size * (1 + more)


@torch.no_grad()
def widen(source: Source, size: int, out: Path, seed: int = 0) -> None:
    """Writes the widened target to a new folder.

    Args:
        size: `intermediate_size` of its text layers.
        seed: of the added rows.

    Raises:
        ValueError: the size is not above the present one or is too large, or `out` exists.
        CannotWrite: `out` cannot be written.
    """
    present = source.shape.intermediate_size
    if not present < size <= MAX_MLP:
        raise ValueError(f"{source.name}: cannot be widened to an MLP of {size}; give {present + 1} to {MAX_MLP}")
    if out.exists():
        raise ValueError(f"--out: {out} exists; give a new folder, or remove it")
    check_writable(out)
    tensors = load_file(source.folder / WEIGHTS)
    generator = torch.Generator().manual_seed(seed)
    wide = {name: _widened(name, weight, size, generator) for name, weight in sorted(tensors.items())}
    record = Widening(
        source=source.name,
        source_digest=tensors_digest(tensors),
        fingerprint=fingerprint_of(AutoConfig.from_pretrained(source.folder)),
        source_size=present,
        size=size,
        seed=seed,
    )
    with writing(out, "another --out") as inside:
        shutil.copytree(source.folder, inside, ignore=shutil.ignore_patterns(*NOT_COPIED))
        text = {**source.config["text_config"], "intermediate_size": size}
        write_json(inside / "config.json", {**source.config, "text_config": text})
        save_file(wide, inside / WEIGHTS, metadata={"format": "pt"})
        (inside / WEIGHTS).chmod(0o644)
        record.write(inside)
        write_manifest(inside, step=0)


def _widened(name: str, weight: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Returns gate or up [size, D] with random rows added, down [D, size] with zero columns; any other tensor as it is."""
    kind = projection_of(name)
    if kind is None:
        return weight
    if kind == "down":
        return pad(weight, (0, size - weight.shape[1]))
    rows = torch.randn(size - len(weight), weight.shape[1], generator=generator) * weight.float().std()
    return torch.cat((weight, rows.to(weight.dtype)))


def wide_target(target: str, megabytes: float, key: str = "--widen-to") -> Path:
    """Returns a pocket target with about that many megabytes of weights (`size_for`): the target itself where that is its size,
    else a widened one, which is made once and kept in the cache folder.

    Raises:
        ValueError: not a pocket target, or a size that it cannot be widened to; names `key`.
        CannotWrite: the cache folder cannot be written.
    """
    source = find_source(target, key)
    try:
        size = size_for(source, megabytes)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
    if size == source.shape.intermediate_size:
        return source.folder
    digest = tensors_digest(load_file(source.folder / WEIGHTS))[:16]
    kept = user_cache_dir() / "wide_targets" / f"{source.folder.name}_mlp{size}_{digest}"
    with locked(kept, "another XDG_CACHE_HOME"):
        if not (kept / RECORD).is_file():
            widen(source, size, kept)
    return kept


def main() -> int:
    parser = cli.new_parser("python -m data_prep.pocket.widen", description=__doc__)
    parser.add_argument("--target", required=True, metavar="NAME_OR_DIR", help="a pocket target")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="a new folder")
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--mlp", type=int, metavar="N", help="intermediate_size of the text layers")
    size.add_argument("--megabytes", type=float, metavar="MB", help="weights that a float32 pass reads, in place of --mlp")
    parser.add_argument("--seed", type=int, default=0, help="of the added rows (default %(default)s)")
    options = parser.parse_args()
    source = find_source(options.target)
    mlp = options.mlp if options.megabytes is None else size_for(source, options.megabytes)
    widen(source, mlp, options.out, options.seed)
    wide = shape_of(source.name, read_json(options.out / "config.json"))
    print(f"{options.out}: MLP of {mlp}; a float32 pass reads {4 * wide.pass_parameters / 1e6:.1f} MB of weights")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
