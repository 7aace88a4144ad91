"""The hand-over of a draft in training: saved in Hugging Face format, judged by the decoder, the best one kept.

Owns: `draft/` and `draft_best/` of a run folder, which figure is the score. Does not own: measuring (train.validate).
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import torch

import sage
from checkpoints.store import replace_folder
from train.config import PolicyName
from train.loop import Run
from train.resume import rng_state, set_rng_state
from train.validate import validate

logger = logging.getLogger(__name__)
DRAFT, BEST = "draft", "draft_best"


def save_draft(run: Run) -> Path:
    """Writes `draft/`; it loads on one process without DeepSpeed. Every rank has to call it."""
    folder = Path(run.config.run.dir) / DRAFT
    weights = run.engine.draft_state()
    if run.ranks.is_main:
        part = folder.with_name(f".{DRAFT}.part")
        shutil.rmtree(part, ignore_errors=True)
        run.engine.draft.save_pretrained(part, state_dict=weights)
        replace_folder(part, folder)
    return folder


def validate_draft(run: Run, prompts: list[Any]) -> None:
    """Saves the draft, measures what was saved on rank 0, keeps it as `draft_best/` if none before was better.

    The random generators are left as they were, so validating more or less often does not change a run.
    """
    folder, generators = save_draft(run), rng_state(run.ranks.device)
    score = _measure(run, folder, prompts) if run.ranks.is_main else None
    score = run.ranks.share(score)  # the other ranks wait here
    set_rng_state(generators, run.ranks.device)
    if score is None or (run.state.best is not None and score <= run.state.best):
        return
    run.state.best, run.state.best_step = score, run.state.step
    if run.ranks.is_main:
        part = folder.with_name(f".{BEST}.part")
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(folder, part)
        replace_folder(part, folder.with_name(BEST))


@torch.no_grad()
def _measure(run: Run, folder: Path, prompts: list[Any]) -> float | None:
    logger.info("validating at step %d on %d prompts", run.state.step, len(prompts))
    target = run.teacher.target
    draft = sage.load_draft(folder, target)
    report = validate(run.config, target, draft, run.state.step, run.config.run.dir, prompts, draft_name=str(folder))
    run.tracker.log(flatten(report), run.state.step)
    run.report = report
    return score_of(report)


def score_of(report: dict[str, Any]) -> float | None:
    """tokens_per_target_pass of the policy that stands for the run: `sage`, else the first one that drafts."""
    drafting = [name for name in report["policies"] if name != PolicyName.autoregressive]
    if not drafting:
        return None
    name = "sage" if "sage" in drafting else drafting[0]
    return float(report["policies"][name]["tokens_per_target_pass"])


def flatten(report: dict[str, Any]) -> dict[str, float]:
    """The figures of a report under `validation/POLICY/NAME`, for sinks that draw curves."""
    return {
        f"validation/{policy}/{name}": float(value)
        for policy, figures in report["policies"].items()
        for name, value in figures.items()
        if isinstance(value, (int, float))
    }
