"""A target's answers on the way from the decoder to training examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import sage
from data_prep.build import build_dataset
from data_prep.chat import encode_example
from data_prep.config import DataConfig, RegenerateConfig
from data_prep.own_answers import OwnShare, measure_own
from data_prep.sources import SourceConfig
from data_prep.tools.actions import regenerate_data


def own_answers(target: sage.Target, chats: list[list[Any]], folder: Path) -> tuple[OwnShare, list[int]]:
    """Writes the target's answers to some chats and reads them back; returns how many of their tokens are the target's own
    choice, and these tokens.
    """
    (folder / "rows.jsonl").write_text("\n".join(json.dumps({"messages": messages}) for messages in chats))
    config = DataConfig(sources={"it": SourceConfig(kind="auto", path=str(folder / "rows.jsonl"))}, holdout=0.0)
    config.cache_dir, out = str(folder / "cache"), folder / "own.jsonl"
    regenerate_data(config, target, None, RegenerateConfig(max_new_tokens=12), "train", out)
    config.sources["it"].path = str(out)
    dataset = build_dataset(config, target.processor)
    examples = [encode_example(dataset.conversation(i), target.processor) for i in range(len(dataset))]
    ids = torch.cat([example["input_ids"][example["loss_mask"]] for example in examples]).tolist()
    return measure_own(target, (("it", example) for example in examples)), ids
