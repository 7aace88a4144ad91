"""Disk space that the states and drafts of a run need, checked before it trains. Does not own: writing them."""

from __future__ import annotations

import shutil
from pathlib import Path

from checkpoints.run_folder import BEST_DRAFT, DRAFT, state_folder
from train.config.schema import ConfigError, TrainConfig

STATE_BYTES = 12  # per trained parameter: a float32 weight and two moments
NUM_DRAFTS = 3  # draft/, draft_best/, and the one that replaces either


def num_states(train: TrainConfig, steps: int | None) -> int:
    """Returns the highest number of states that a run of so many steps has on disk, with the one that is being written.

    The last state is written twice if the last validation has the best score. Of a run without a limit of steps, those of
    `train.keep_every` are not counted.
    """
    if steps is None:
        return train.keep_last + 2
    saves = steps // train.save_every + bool(steps % train.save_every) if train.save_every else 1
    kept = train.keep_last + 1  # and that of the best draft
    if train.keep_every and train.save_every:
        kept += sum(step % train.keep_every == 0 for step in range(train.save_every, steps + 1, train.save_every))
    return min(saves, kept) + 1


def check_space(run: Path, train: TrainConfig, steps: int | None, num_trained: int, draft_bytes: int) -> None:
    """Refuses a run whose states and drafts do not fit on the disk of its folder.

    Args:
        run: its folder; what a run to be resumed has written counts as free.
        steps: of the run, if it has a limit.
        num_trained: trained parameters.
        draft_bytes: of the weights of a saved draft.

    Raises:
        ConfigError: names the folder, the needed and the free bytes.
    """
    states = num_states(train, steps)
    needed = states * num_trained * STATE_BYTES + NUM_DRAFTS * draft_bytes
    nearest = next(folder for folder in (run.absolute(), *run.absolute().parents) if folder.exists())
    written = sum(_size(folder) for folder in (state_folder(run), run / DRAFT, run / BEST_DRAFT))
    free = shutil.disk_usage(nearest).free + written
    if needed > free:
        raise ConfigError(
            f"run.dir={run}: needs {_shown(needed)} for up to {states} state(s) and the drafts, {_shown(free)} are free there; "
            "free space, lower train.keep_last, raise train.save_every or train.keep_every, or give a run.dir on another disk"
        )


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0


def _shown(count: int) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.2f} MB"
