"""Side-by-side measurement of policies and of what a user would pick instead; `python -m sage.bench` is its command line.

runners = [PolicyRunner(target, draft, "sage"), *(baseline_runner(target, name) for name in ("autoregressive", "hf_generate"))]
report = build_report(measure(runners, prompts, Sampling()), target, "my draft", policies=["sage"])
"""

from sage.bench.measure import BenchPrompt, Measurement, measure
from sage.bench.report import build_report, write_json, write_text
from sage.bench.runners import AUTOREGRESSIVE, BASELINES, HFRunner, PolicyRunner, Run, Runner, Sampling, baseline_runner
from sage.bench.table import format_table

__all__ = [
    "AUTOREGRESSIVE",
    "BASELINES",
    "BenchPrompt",
    "HFRunner",
    "Measurement",
    "PolicyRunner",
    "Run",
    "Runner",
    "Sampling",
    "baseline_runner",
    "build_report",
    "format_table",
    "measure",
    "write_json",
    "write_text",
]
