"""A window of steps under torch's profiler, as a trace that chrome://tracing and Perfetto open."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

logger = logging.getLogger(__name__)
FOLDER = "profile"


class ProfileWindow:
    """Traces steps `first` to `last`; nothing without a window.

    Args:
        run_dir: the traces go to `profile/rank_00000.json` in there, one per rank.
        window: `train.profile`, [first, last], counted from 1.
    """

    def __init__(self, run_dir: str | Path, window: list[int] | None, rank: int) -> None:
        self.path = Path(run_dir) / FOLDER / f"rank_{rank:05d}.json"
        self.window = window
        self._profile: Any = None

    def at(self, step: int) -> None:
        """Call before every step with the number of finished ones."""
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
        """Ends the window and writes the trace, if one is open."""
        if self._profile is None:
            return
        self._profile.stop()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self.path))
        logger.info("profile: %s", self.path)
        self._profile = None
