"""`python -m data_prep.pocket.build --family qwen2_5_vl --out DIR --seed 0`: trains a pocket target from a seed.

Writes the target's folder with `score.json`: command, seed, score by kind of fact, hash of the weights.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import sage
from data_prep.pocket import architecture, training
from data_prep.pocket.families import FAMILIES
from data_prep.pocket.score import score_table, score_target
from sage.commands import cli
from sage.io.files import write_json
from sage.io.manifest import sha256

logger = logging.getLogger(__name__)


def train(family: str, seed: int, recipe: training.Recipe) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Runs all stages of a recipe; returns the model and its tokenizer."""
    tokenizer = architecture.new_tokenizer(family, training.world_texts(recipe.num_texts))
    model = architecture.new_model(family, tokenizer, recipe.stages[0].layers, seed)
    processor = architecture.new_processor(family, tokenizer)
    training.pretrain_vision(model, processor, recipe, seed)
    for number, stage in enumerate(recipe.stages):
        if model.config.text_config.num_hidden_layers != stage.layers:
            model = architecture.deepen(model, family, tokenizer, stage.layers, seed)
        training.run_stage(model, processor, stage, recipe, 100 * seed + number + 1)
    return model, tokenizer


def report(folder: Path, family: str, seed: int, wall_s: float) -> dict[str, Any]:
    """Scores the saved target, whose weights are rounded to bfloat16, and writes `score.json`."""
    result = score_target(sage.load_target(folder, dtype=torch.float32))
    facts = {
        "command": f"python -m data_prep.pocket.build --family {family} --out {folder.name} --seed {seed}",
        "family": family, "seed": seed, "wall_s": round(wall_s), "threads": torch.get_num_threads(),
        "sha256": sha256(folder / architecture.WEIGHTS), "bytes": (folder / architecture.WEIGHTS).stat().st_size,
        "torch": torch.__version__, "transformers": transformers.__version__,
    }  # fmt: skip
    write_json(folder / "score.json", facts | result)
    return result


def main() -> int:
    parser = cli.new_parser("python -m data_prep.pocket.build", description=__doc__)
    parser.add_argument("--family", required=True, choices=FAMILIES)
    parser.add_argument("--out", required=True, type=Path, help="the target's folder; an existing one is replaced")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    # Matrices this small do not benefit from a second thread, and one thread gives the same sums on every machine.
    torch.set_num_threads(1)
    start = time.monotonic()
    model, tokenizer = train(options.family, options.seed, training.RECIPES[options.family])
    architecture.save(model, tokenizer, options.family, options.out)
    print(score_table(report(options.out, options.family, options.seed, time.monotonic() - start)))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
