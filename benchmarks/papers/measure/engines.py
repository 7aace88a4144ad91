"""Decoding speed beside vLLM's: the same target and draft, one process each, in turns."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from benchmarks.engines.measure import Comparison
from benchmarks.engines.measure import measure as measure_beside_vllm
from benchmarks.papers import runs
from benchmarks.papers.figures import Json
from benchmarks.papers.lab import Lab
from sage.bench.options import variants
from sage.bench.runners import HF_COMPILED, HF_GENERATE

logger = logging.getLogger(__name__)


def measure(lab: Lab) -> None:
    """Measures `engines_TARGET` where vLLM serves drafts; skipped without the environment of `make engines-env`."""
    study = lab.settings.engines
    if not Path(study.python).is_file():
        logger.warning("engines: SKIPPED, %s does not exist; `make engines-env` creates it", study.python)
        return
    for target, drafts in study.runs.items():

        def compute(target: str = target, drafts: dict[str, str] = drafts) -> Json:
            return _compare(lab, target, drafts)

        lab.figures("engines", f"engines_{target}", compute, list(drafts.values()), study=study)


def _compare(lab: Lab, target: str, drafts: dict[str, str]) -> Json:
    study = lab.settings.engines
    comparison = Comparison(
        python=Path(study.python),
        target=lab.settings.targets[target],
        drafts={label: lab.run(run) / runs.DRAFT for label, run in drafts.items()},
        variants=variants(None, study.policies),
        baselines=[HF_GENERATE, HF_COMPILED],
        depths=study.depths,
        num_prompts=study.prompts,
        repeats=study.repeats,
        passes=study.passes,
        max_new_tokens=lab.settings.max_new_tokens,
        cores=sorted(os.sched_getaffinity(0)),
    )
    return {"target": target, **measure_beside_vllm(comparison)}
