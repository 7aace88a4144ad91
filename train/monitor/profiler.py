"""Traces a range of steps with torch.profiler, for chrome://tracing and Perfetto."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

logger = logging.getLogger(__name__)
FOLDER = "profile"


class ProfileWindow:
    """Traces steps `first` to `last`.

    Args:
        run_dir: a trace per rank is written to `profile/rank_00000.json` in this folder.
        window: `train.profile`, [first, last], counted from 1; None traces nothing.
    """

    def __init__(self, run_dir: str | Path, window: list[int] | None, rank: int) -> None:
        self.path = Path(run_dir) / FOLDER / f"rank_{rank:05d}.json"
        self.window = window
        self._profile: Any = None

    def at(self, step: int) -> None:
        """Starts or stops the trace; call before every step with the number of finished steps."""
        if self.window is None:
            return
        first, last = self.window
        if first - 1 <= step < last and self._profile is None:
            has_gpu = torch.cuda.is_available()
            self._profile = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_gpu else [])])
            self._profile.start()
        elif step >= last:
            self.close()

    def close(self) -> None:
        """Stops the trace and writes it, if one was started."""
        if self._profile is None:
            return
        self._profile.stop()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self.path))
        logger.info("profile: %s", self.path)
        self._profile = None
