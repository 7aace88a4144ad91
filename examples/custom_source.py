"""Your own data source, registered at run time, and a short training run on it.

python examples/custom_source.py [RUN_FOLDER]

Without a folder it trains in runs/custom_source, which it replaces.

In a fork of this project, a source is a module in data_prep/sources with an entry in its `KINDS`; see CONTRIBUTING.md.
"""

from __future__ import annotations

import shutil
import sys

import sage.training as training  # first: it imports the installed packages, whatever this folder contains
from data_prep.conversation import Conversation
from data_prep.sources import KINDS, Kind, SourceConfig
from data_prep.sources.base import Source, Split

FOLDER = "runs/custom_source"
NUM_ROWS = 48


class Arithmetic(Source):
    """Additions of two numbers, computed on the fly. Real sources read files here."""

    name = "arithmetic"

    def __len__(self) -> int:
        return NUM_ROWS

    def conversation(self, index: int) -> Conversation:
        a, b = index % 7, index // 7
        messages = [
            {"role": "user", "content": f"What is {a} plus {b}?"},
            {"role": "assistant", "content": f"The sum of {a} and {b} is {a + b}."},
        ]
        return Conversation(f"sum-{index}", messages, self.name, "arithmetic", {})

    def fingerprint(self) -> str:
        return f"arithmetic {NUM_ROWS}"  # changes whenever the items change


def open_source(label: str, config: SourceConfig, split: Split, cache_dir: str) -> Source:
    """Called with the configuration of the source."""
    return Arithmetic()


def main(folder: str = FOLDER) -> None:
    if folder == FOLDER:
        shutil.rmtree(folder, ignore_errors=True)  # from the last time; training.run refuses an existing run
    KINDS["arithmetic"] = Kind("custom_source", options=())
    config = training.compose(
        "target=pocket_qwen2_5_vl",
        "draft=eagle",
        "data=pocket",
        "data.name=arithmetic",
        "data.num_examples=0",
        "data.sources.pocket.kind=arithmetic",
        "data.cache=rows",
        "data.num_workers=0",
        "optim.lr=8e-3",
        "train.epochs=null",
        "train.max_steps=5",
        "train.global_batch_size=8",
        "train.micro_batch_size=4",
        "decode.policies=[autoregressive,chain]",
        "decode.num_prompts=2",
        "decode.max_new_tokens=16",
        f"run.dir={folder}",
    )
    report = training.run(config)
    print(f"{report['prompts']} prompts, {report['policies']['chain']['match']} texts identical")


if __name__ == "__main__":
    main(*sys.argv[1:])
