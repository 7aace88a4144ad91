"""Traces a range of steps with torch.profiler, for chrome://tracing and Perfetto."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

logger = logging.getLogger(__name__)


class ProfileWindow:
    """Traces the steps `window`, [first, last] counted from 1, to `profile/rank_00000.json` in `run_dir`; None: none."""

    def __init__(self, run_dir: str | Path, window: list[int] | None, rank: int) -> None:
        self.path = Path(run_dir) / "profile" / f"rank_{rank:05d}.json"
        self.first, self.last = window or (0, 0)
        self._profile: profile | None = None

    def at(self, step: int) -> None:
        """Starts or stops the trace; call before every step with the number of finished steps."""
        if step >= self.last:
            self.close()
        elif step >= self.first - 1 and self._profile is None:
            has_gpu = torch.cuda.is_available()
            self._profile = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_gpu else [])])
            self._profile.start()

    def close(self) -> None:
        if self._profile is not None:
            self._profile.stop()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self.path))
            logger.info("profile: %s", self.path)
            self._profile = None
