"""Held-out prompts that an engine takes: those of a run's `data.validation`, or of the pocket world for a pocket target."""

from __future__ import annotations

from pathlib import Path

from checkpoints.run_folder import read_run_config
from data_prep import pocket
from data_prep.build import prompts
from data_prep.config import DataConfig, data_config
from data_prep.conversation import Conversation, media_parts
from data_prep.splits import Split

NUM_READ = 4  # times the prompts needed, since those with videos are left out


def prompt_data(run: Path | None, target: str) -> DataConfig:
    """Returns the data whose held-out prompts are asked.

    Args:
        run: the draft's run; None if its draft was copied out of it.
        target: folder of the target.

    Raises:
        ValueError: the run's settings cannot be read; no run, and the target is no pocket target.
    """
    if run is not None:
        return data_config(read_run_config(run).get("data") or {})
    if Path(target).resolve().is_relative_to(Path(pocket.__file__).parent / "targets"):
        return DataConfig()
    raise ValueError("RUN: its prompts are those of a run's data.validation; give a run, RUN/draft or RUN/draft_best")


def validation_prompts(data: DataConfig, count: int) -> list[Conversation]:
    """Returns up to `count` first questions without videos.

    Raises:
        ValueError: the data cannot be read, or hold no such prompt.
    """
    found = prompts(data, Split.validation, NUM_READ * count)
    usable = [one for one in found if not any(part["type"] == "video" for part in media_parts(one.messages))]
    if not usable:
        raise ValueError(f"data.validation: its first {len(found)} prompts all have videos; the check needs images or text")
    return usable[:count]
