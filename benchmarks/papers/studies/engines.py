"""Decoding speed beside vLLM's: the same target and draft, one process each, in turns."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from benchmarks.engines.measure import Comparison
from benchmarks.engines.measure import measure as measure_beside_vllm
from benchmarks.papers import runs
from benchmarks.papers.figures import Json
from benchmarks.papers.lab import Lab
from benchmarks.papers.markdown import times_with_interval
from benchmarks.papers.study import Expectation, Study
from sage.bench.options import variants
from sage.bench.runners import HF_COMPILED, HF_GENERATE

logger = logging.getLogger(__name__)
GOALS = {  # of the ratios
    "autoregressive": (1.0, "our autoregressive loop at least level with vLLM's"),
    "same draft": (1.2, "our fastest policy at least 1.2 times vLLM's fastest setting with the same draft"),
    "any draft": (1.4, "our fastest policy with any draft at least 1.4 times vLLM's fastest setting"),
}


def _measure(lab: Lab) -> None:
    """Measures `engines_TARGET` where vLLM serves drafts; skipped without the environment of `make engines-env`."""
    sizes = lab.sizes["engines"]
    if not Path(sizes["python"]).is_file():
        logger.warning("engines: SKIPPED, %s does not exist; `make engines-env` creates it", sizes["python"])
        return

    def compute(target: str, drafts: Mapping[str, str]) -> Json:
        comparison = Comparison(
            python=Path(sizes["python"]),
            target=lab.settings.targets[target],
            drafts={label: lab.run(run) / runs.DRAFT for label, run in drafts.items()},
            variants=variants(None, sizes["policies"]),
            baselines=[HF_GENERATE, HF_COMPILED],
            depths=sizes["depths"],
            num_prompts=sizes["prompts"],
            repeats=sizes["repeats"],
            passes=sizes["passes"],
            max_new_tokens=lab.settings.max_new_tokens,
        )
        return {"target": target, **measure_beside_vllm(comparison)}

    for target, drafts in sizes["runs"].items():
        lab.figures("engines", f"engines_{target}", partial(compute, target, drafts), list(drafts.values()), study=sizes)


def _expectations(found: Mapping[str, Json]) -> Iterator[Expectation]:
    for title, part in found.items():
        for name, one in part["ratios"].items():
            goal, claim = GOALS[name]
            evidence = f"`{one['ours']}` / `{one['theirs']}`: {times_with_interval(one['ratio'], one['range'])}"
            yield Expectation(f"{title}: {claim}", one["ratio"] >= goal, evidence)


STUDY = Study(name="engines", measure=_measure, expectations=_expectations, is_per_target=True)
