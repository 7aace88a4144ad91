"""Trains a draft head from Python, with a callback, and prints the measured table.

python examples/train_from_python.py [RUN_FOLDER] [STEPS]

Without a folder it trains in runs/from_python, which it replaces.
"""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Mapping

from sage import training

FOLDER = "runs/from_python"


class PrintProgress(training.Callback):
    """Prints one line per log step."""

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        print(f"step {step}: loss {metrics['loss']:.3f}, about {metrics['estimated_tokens_per_pass']:.2f} tokens per pass")


def main(folder: str = FOLDER, steps: str = "60") -> None:
    if folder == FOLDER:
        shutil.rmtree(folder, ignore_errors=True)  # from the last time; training.run refuses an existing run
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = training.compose(
        "target=pocket_qwen2_5_vl",
        "draft=eagle",
        "data=pocket",
        "data.num_examples=512",
        "optim.lr=8e-3",
        "train.epochs=null",
        f"train.max_steps={steps}",
        "train.global_batch_size=16",
        "train.micro_batch_size=8",
        "decode.policies=[autoregressive,chain,sage]",
        "decode.num_prompts=2",
        "decode.max_new_tokens=32",
        f"run.dir={folder}",
    )
    report = training.run(config, callbacks=[PrintProgress()])
    for name, figures in report["policies"].items():
        identical = f"{figures['match']}/{figures['total']}"
        print(f"{name}: {figures['tokens_per_target_pass']:.2f} tokens per target pass, {identical} texts identical")


if __name__ == "__main__":
    main(*sys.argv[1:])
