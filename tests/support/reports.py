"""A report made by hand, as returned by `sage.bench.report.build_report`, with realistic figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PHASES = ("draft_steps", "verify", "accept", "commit", "policy", "other")


def _policy(speedup: float, accepted: float, shares: Sequence[float]) -> dict[str, Any]:
    """Figures of a policy; `shares` of decoding time by `PHASES`, 2.4 s at a speedup of 1."""
    levels = [{"depth": d, "tried": 160 // d, "kept": round(160 // d * (0.5 + 0.1 * accepted - 0.04 * d))} for d in range(1, 9)]
    phases = {phase: share * 2.4 / speedup for phase, share in zip(PHASES, shares, strict=True)}
    return {
        "mean_accepted_draft": accepted,
        "tokens_per_target_pass": accepted + 1,
        "tokens_per_s": 150 * speedup,
        "speedup": speedup,
        "speedup_end_to_end": 1 + 0.8 * (speedup - 1),
        "speedup_ci": [speedup * 0.93, speedup * 1.06],
        "match": 16,
        "total": 16,
        "match_hf": 16,
        "first_gaps": [],
        "time_s": {"vision": 0.1, "target_prefill": 0.2, "draft_prefill": 0.02 * (accepted > 0)} | phases,
        "acceptance_by_depth": levels if accepted else [],
        "nodes_per_round": 10.0,
        "draft_steps_per_round": 5.0,
        "per_prompt": [],
    }


def example_report() -> dict[str, Any]:
    """The content of a report.json."""
    lookup = {"tokens_per_s": 163.0, "speedup": 1.09, "speedup_end_to_end": 1.05, "speedup_ci": [0.98, 1.21]}
    return {
        "schema": 1,
        "target": "pocket_qwen2_5_vl",
        "draft": "runs/demo/draft",
        "device": "cpu",
        "dtype": "float32",
        "prompts": 16,
        "max_new_tokens": 128,
        "temperature": 0.0,
        "seed": 0,
        "repeats": 3,
        "step": 400,
        "fastest_baseline": "hf_generate",
        "policies": {
            "autoregressive": _policy(0.93, 0.0, (0, 0.97, 0, 0.01, 0, 0.02)),
            "static": _policy(1.86, 2.98, (0.27, 0.67, 0.02, 0.01, 0.01, 0.02)),
            "sage": _policy(2.24, 3.87, (0.33, 0.59, 0.02, 0.01, 0.03, 0.02)),
        },
        "baselines": {
            "autoregressive": {"tokens_per_s": 139.5, "speedup": 0.93, "speedup_end_to_end": 0.94},
            "hf_generate": {"tokens_per_s": 150.0, "speedup": 1.0, "speedup_end_to_end": 1.0},
            "hf_prompt_lookup": lookup,
        },
        "failed_baselines": {},
        "margins": {"policy": "sage", "over": {"static": {"ratio": 1.2, "ci": [1.1, 1.3]}}},
        "by_family": {"caption": {"sage": {"prompts": 16, "tokens_per_target_pass": 4.9, "speedup": 2.3}}},
        "machine": {"system": "Linux x86_64", "cpu": "AMD EPYC", "cores": 2, "torch_threads": 2, "load_average": 1.1},
        "versions": {"python": "3.12.3", "torch": "2.13.0", "transformers": "5.23.0"},
        "command": "sage-validate checkpoint=runs/demo",
    }


def with_cost_aware(report: dict[str, Any]) -> dict[str, Any]:
    """Adds a policy with calibration, and a replay."""
    report["policies"]["cost_aware"] = _policy(2.5, 4.0, (0.33, 0.59, 0.02, 0.01, 0.03, 0.02))
    rows = [{"depth": 1, "labels": 4500, "before": 0.1, "after": 0.05}]
    figures = {"rounds": 250, "labels": 4500, "before": 0.1, "after": 0.05, "expected": 3.5, "accepted": 4.0}
    report["calibration"] = {"cost_aware": figures | {"by_depth": rows}}
    replayed = {"rounds": 200, "mean_accepted_draft": 3.0, "tokens_per_target_pass": 4.02, "nodes_per_round": 5.0, "depth": 5.0}
    replayed |= {"draft_steps_per_round": 4.9, "coverage": 0.987, "cut": 0.012, "tokens_per_s": 612.3}
    report["replay"] = {"recorder": {"policy": "eagle2", "total": 64}, "rounds": 200, "policies": {"chain": replayed}}
    return report
