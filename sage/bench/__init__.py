"""Side-by-side measurement of policies and baselines; `python -m sage.bench` is its command line.

runners = [PolicyRunner(target, draft, "sage"), *(baseline_runner(target, name) for name in ("autoregressive", "hf_generate"))]
report = build_report(measure(runners, prompts, sage.Sampling()), target, "my draft", policies=["sage"])

Names are loaded on first use, so that `sage.bench.tables` comes without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sage.bench.measurement import BenchPrompt, Measurement, measure
    from sage.bench.report import build_report
    from sage.bench.report_table import format_table
    from sage.bench.runners import (
        AUTOREGRESSIVE,
        BASELINES,
        HFRunner,
        PolicyRunner,
        Runner,
        TimedRun,
        baseline_runner,
    )

_HOME = {
    "AUTOREGRESSIVE": "runners",
    "BASELINES": "runners",
    "BenchPrompt": "measurement",
    "HFRunner": "runners",
    "Measurement": "measurement",
    "PolicyRunner": "runners",
    "TimedRun": "runners",
    "Runner": "runners",
    "baseline_runner": "runners",
    "build_report": "report",
    "format_table": "report_table",
    "measure": "measurement",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'sage.bench' has no attribute {name!r}")
    return getattr(import_module(f"sage.bench.{_HOME[name]}"), name)


__all__ = [
    "AUTOREGRESSIVE",
    "BASELINES",
    "BenchPrompt",
    "HFRunner",
    "Measurement",
    "PolicyRunner",
    "TimedRun",
    "Runner",
    "baseline_runner",
    "build_report",
    "format_table",
    "measure",
]
