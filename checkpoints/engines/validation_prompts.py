"""Held-out prompts that an engine takes: those of a run's `data.validation`, or of the pocket world for a pocket target."""

from __future__ import annotations

from pathlib import Path

from checkpoints.run_folder import read_run_config
from data_prep import pocket
from data_prep.build import prompts
from data_prep.config import DataConfig, data_config
from data_prep.conversation import Conversation, media_parts

NUM_READ = 4  # times the prompts needed, since those with videos are left out


def validation_prompts(run: Path | None, target: str, count: int) -> list[Conversation]:
    """Returns up to `count` first questions without videos.

    Args:
        run: the draft's run; None if its draft was copied out of it.
        target: folder of the target.

    Raises:
        ValueError: the run's data cannot be read, or holds no such prompt; no run, and the target is no pocket target.
    """
    if run is not None:
        config = data_config(read_run_config(run).get("data") or {})
    elif Path(target).resolve().is_relative_to(Path(pocket.__file__).parent / "targets"):
        config = DataConfig()
    else:
        raise ValueError("RUN: its prompts are those of a run's data.validation; give a run, RUN/draft or RUN/draft_best")
    found = prompts(config, "validation", NUM_READ * count)
    usable = [one for one in found if not any(part["type"] == "video" for part in media_parts(one.messages))]
    if not usable:
        raise ValueError(f"data.validation: its first {len(found)} prompts all have videos; the check needs images or text")
    return usable[:count]
