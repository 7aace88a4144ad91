"""Decoding speed beside vLLM's: the same target and draft, one process each, in turns."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
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
    if not has_engine(sizes, "engines"):
        return

    def compute(target: str, drafts: Mapping[str, str]) -> Json:
        path, baselines = lab.settings.targets[target], [HF_GENERATE, HF_COMPILED]
        return {"target": target, **beside_vllm(lab, path, drafts, sizes, baselines)}

    for target, drafts in sizes["runs"].items():
        lab.figures("engines", f"engines_{target}", partial(compute, target, drafts), list(drafts.values()), study=sizes)


def has_engine(sizes: Json, study: str) -> bool:
    """Returns whether the environment with vLLM exists; warns if not."""
    exists = Path(sizes["python"]).is_file()
    if not exists:
        logger.warning("%s: SKIPPED, %s does not exist; `make engines-env` creates it", study, sizes["python"])
    return exists


def beside_vllm(lab: Lab, path: str, drafts: Mapping[str, str], sizes: Json, baselines: Sequence[str] = ()) -> Json:
    """Returns the figures of our decoders and of vLLM's on the target in `path`; `drafts` are runs by label."""
    comparison = Comparison(
        python=Path(sizes["python"]),
        target=path,
        drafts={label: lab.run(run) / runs.DRAFT for label, run in drafts.items()},
        variants=variants(None, sizes["policies"]),
        baselines=baselines,
        depths=sizes["depths"],
        num_prompts=sizes["prompts"],
        repeats=sizes["repeats"],
        passes=sizes["passes"],
        max_new_tokens=lab.settings.max_new_tokens,
    )
    return measure_beside_vllm(comparison)


def _expectations(found: Mapping[str, Json]) -> Iterator[Expectation]:
    for title, part in found.items():
        for name, one in part["ratios"].items():
            goal, claim = GOALS[name]
            evidence = f"`{one['ours']}` / `{one['theirs']}`: {times_with_interval(one['ratio'], one['range'])}"
            yield Expectation(f"{title}: {claim}", one["ratio"] >= goal, evidence)


STUDY = Study(name="engines", measure=_measure, expectations=_expectations, is_per_target=True)
