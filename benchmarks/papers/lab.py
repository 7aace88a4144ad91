"""What studies share: targets, drafts, prompts, recordings, costs and runners, created on first use, and timed comparisons."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import sage
from benchmarks.engines.prompts import question
from benchmarks.papers import runs
from benchmarks.papers.figures import FigureStore, Json
from benchmarks.papers.runs import Settings
from sage.bench.measurement import BenchPrompt, Measurement, measure
from sage.bench.runners import AUTOREGRESSIVE, HF_ASSISTED, PolicyRunner, Runner, baseline_runner, find_assistant
from sage.bench.summary import pooled_counts, summarize, tokens_ratio
from sage.costs.measure import measure_costs
from sage.costs.tables import Costs
from sage.drafts.draft import Draft
from sage.replay.recording import Recording, record
from sage.targets import Target

NUM_CANDIDATES = max(sage.policy(name).num_candidates for name in sage.POLICIES)  # recorded per node: enough for every policy
logger = logging.getLogger(__name__)
STORED = (
    *("tokens_per_target_pass", "mean_accepted_draft", "nodes_per_round", "draft_steps_per_round", "rounds", "tokens"),
    *("tokens_per_s", "tokens_per_s_ci", "speedup", "speedup_ci", "speedup_end_to_end", "speedup_end_to_end_ci"),
    *("match", "total", "match_hf", "first_gaps", "time_s", "is_autoregressive", "prompt_tokens", "draft_context"),
)


class Lab:
    """Creates and caches what the studies measure with; figures are written to `store`."""

    def __init__(self, settings: Settings, store: FigureStore) -> None:
        self.settings, self.sizes, self.store = settings, settings.sizes, store
        self._cache: dict[Any, Any] = {}
        torch.set_num_threads(settings.threads)

    def with_draft(self, target: str, run: str) -> Lab:
        """Returns a lab that measures the target with the draft of another run."""
        return Lab(replace(self.settings, main_runs={**self.settings.main_runs, target: run}), self.store)

    def _cached(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    @property
    def targets(self) -> list[str]:
        """Short names of the targets; studies of one target measure the first."""
        return list(self.settings.targets)

    def target(self, name: str) -> Target:
        """Returns the target with that short name, in fp32, its passes as the settings say."""
        path, passes = self.settings.targets[name], self.settings.passes
        return self._cached(("target", name), lambda: sage.load_target(path, dtype=torch.float32, passes=passes))

    def run(self, name: str) -> Path:
        """Returns the folder of a run; trains the run if it is missing."""
        return runs.ensure_trained(self.settings, name)

    def draft(self, run: str) -> Draft:
        """Returns the draft of a run, attached to the run's target."""
        target = self.settings.training.runs[run].target
        return self._cached(("draft", run), lambda: sage.load_draft(self.run(run) / runs.DRAFT, self.target(target)))

    def main_draft(self, target: str) -> Draft:
        """Returns the draft that the target is measured with."""
        return self.draft(self.settings.main_runs[target])

    def main_runs(self, *targets: str) -> list[str]:
        """Returns the runs of the main drafts of these targets, by default of all."""
        return [self.settings.main_runs[target] for target in targets or self.targets]

    def prompts(self, target: str, split: str, families: Sequence[str], per_family: int, start: int = 0) -> list[BenchPrompt]:
        """Returns first questions of held-out conversations, one task family after the other."""

        def make() -> list[BenchPrompt]:
            talks = [question(split, start + number, family) for number in range(per_family) for family in families]
            prepare = self.target(target).prepare
            return [BenchPrompt(name=one.id, family=one.family, inputs=prepare(one.messages)) for one in talks]

        return self._cached(("prompts", target, split, *families, per_family, start), make)

    def test_prompts(self, target: str, study: str, per_family: int | None = None) -> list[BenchPrompt]:
        """Returns the prompts of a study, from the test split, by default as many as its settings say."""
        return self.prompts(target, "test", self.sizes[study]["families"], per_family or self.sizes[study]["prompts"])

    def tuning_prompts(self, target: str) -> list[BenchPrompt]:
        """Returns the prompts that policies are tuned on, from the validation split."""
        return self.prompts(target, "validation", self.settings.families, self.sizes["tuning"]["prompts"])

    def recordings(self, target: str, prompts: Sequence[BenchPrompt]) -> list[Recording]:
        """Records the distributions of the target's main draft while these prompts are decoded greedily."""
        model, draft = self.target(target), self.main_draft(target)
        options: dict[str, Any] = {"num_candidates": NUM_CANDIDATES, "max_new_tokens": self.settings.max_new_tokens}
        return [record(model, draft, dict(prompt.inputs), **options) for prompt in prompts]

    def costs(self, target: str) -> Costs:
        """Returns the costs of passes on this machine, at the context length of a quarter of an answer."""

        def make() -> Costs:
            first, limit = self.prompts(target, "validation", self.settings.families[:1], 1)[0], self.settings.max_new_tokens
            context = int(first.inputs["input_ids"].shape[1]) + limit // 4
            return measure_costs(self.target(target), self.main_draft(target), context, context + limit)

        return self._cached(("costs", target), make)

    def runner(
        self, target: str, label: str, policy: str, options: Mapping[str, Any] | None = None, run: str = "", **others: Any
    ) -> PolicyRunner:
        """Returns a labelled runner of a policy, on the target's main draft or on the draft of `run`."""
        draft = self.draft(run) if run else self.main_draft(target)
        return PolicyRunner(self.target(target), draft, label, sage.policy(policy, **(options or {})), **others)

    def baselines(self, target: str, names: Sequence[str] = ()) -> list[Runner]:
        """Returns our autoregressive loop and the named decoders; assisted generation only if the target has an assistant."""
        names = list(dict.fromkeys([AUTOREGRESSIVE, *names]))
        run, assistant = self.settings.assistant_runs.get(target), None
        if run is None:
            names = [name for name in names if name != HF_ASSISTED]
        elif HF_ASSISTED in names:
            assistant = find_assistant(self.target(target), None, self.draft(run))
        return [baseline_runner(self.target(target), name, assistant) for name in names]

    def figures(self, study: str, name: str, measure: Callable[[], Json], names: Sequence[str] = (), /, **inputs: Any) -> Json:
        """Returns the figures `name` of a study; measures them if they are missing or outdated.

        They depend on the runs `names`, their command lines and targets, and on `inputs` (sizes, options).
        """
        settings = self.settings
        commands = {"runs": {run: runs.overrides(settings, run) for run in names}} if names else {}
        targets = sorted({settings.training.runs[run].target for run in names})
        shared = {
            "threads": settings.threads,
            "targets": {target: runs.weights_digest(settings.targets[target]) for target in targets},
            "max_new_tokens": settings.max_new_tokens,
            "passes": settings.passes,
        }
        return self.store.get_or_measure(name, {**commands, **inputs, **shared}, measure, f"make results-{study}")


def compare(
    lab: Lab,
    target: str,
    runners: Sequence[PolicyRunner],
    prompts: Sequence[BenchPrompt],
    repeats: int,
    *,
    baselines: Sequence[str] = (),
    also_as_policies: Sequence[str] = (),
    **sampling: Any,
) -> Json:
    """Returns the figures of `time_runs` over all prompts, and by task family.

    Args:
        also_as_policies: baselines that are reported among the policies, too.
    """
    found = time_runs(lab, target, runners, prompts, repeats, baselines=baselines, **sampling)
    model, labels = lab.target(target), [*(runner.name for runner in runners), *also_as_policies]
    families = dict.fromkeys(prompt.family for prompt in prompts)
    by_family = {family: summary(of_family(found, family), model, labels) for family in families}
    return {**summary(found, model, labels), "passes": lab.settings.passes, "repeats": repeats, "by_family": by_family}


def time_runs(
    lab: Lab,
    target: str,
    runners: Sequence[PolicyRunner],
    prompts: Sequence[BenchPrompt],
    repeats: int,
    *,
    baselines: Sequence[str] = (),
    **sampling: Any,
) -> Measurement:
    """Times runners and baselines on the same prompts, interleaved. Policies that learn online decode the tuning prompts first.

    Args:
        baselines: in addition to our autoregressive loop.
        sampling: greedy unless given.
    """
    chosen = sage.Sampling(**{"max_new_tokens": lab.settings.max_new_tokens, **sampling})
    for runner in runners:
        if runner.policy.needs_costs:
            for prompt in lab.tuning_prompts(target):
                runner.run(prompt.inputs, chosen)
    return measure([*runners, *lab.baselines(target, baselines)], prompts, chosen, repeats, 1, _log_progress)


def compare_row(
    lab: Lab, target: str, runners: Sequence[PolicyRunner], prompts: Sequence[BenchPrompt], repeats: int, **sampling: Any
) -> Json:
    """Returns the figures of one row of a sweep: those of `runners`, and the speed of our autoregressive loop."""
    compared = compare(lab, target, runners, prompts, repeats, **sampling)
    speed = compared["baselines"][AUTOREGRESSIVE]["tokens_per_s"]
    return {"prompts": len(prompts), "policies": compared["policies"], "baselines": {AUTOREGRESSIVE: speed}}


def summary(measurement: Measurement, target: Any, labels: Sequence[str]) -> Json:
    """Returns the stored figures of the runners `labels` and of the baselines."""
    found = summarize(measurement, target, labels)
    parts = {kind: {name: select(part, STORED) for name, part in found[kind].items()} for kind in ("policies", "baselines")}
    return {"prompts": len(measurement.prompts), **select(found, ("fastest_baseline", "failed_baselines", "margins")), **parts}


def tokens_over(measurement: Measurement, label: str, base: str) -> Json:
    """Returns the tokens per target pass of a runner, and their ratio to those of another one."""
    over = tokens_ratio(measurement.runs[label], measurement.runs[base])
    return {"tokens": mean_tokens(measurement, label), "over": over}


def mean_tokens(measurement: Measurement, label: str) -> float:
    """Returns the tokens per target pass of a runner."""
    return pooled_counts(measurement.runs[label])["tokens_per_target_pass"]


def matching_texts(measurement: Measurement, labels: Sequence[str]) -> Json:
    """Returns how many texts of the runners equal those of our autoregressive loop, of how many, and the number of prompts."""
    texts, count = measurement.runs[AUTOREGRESSIVE], len(measurement.prompts)
    match = sum(measurement.runs[label][i][0].tokens == texts[i][0].tokens for label in labels for i in range(count))
    return {"prompts": count, "match": match, "total": len(labels) * count}


def of_family(measurement: Measurement, family: str) -> Measurement:
    """Returns the part of a measurement with the prompts of a task family."""
    indices = [index for index, prompt in enumerate(measurement.prompts) if prompt.family == family]
    return replace(
        measurement,
        prompts=[measurement.prompts[index] for index in indices],
        runs={name: [runs[index] for index in indices] for name, runs in measurement.runs.items()},
    )


def select(part: Mapping[str, Any], names: Sequence[str]) -> Json:
    """Returns the named figures of `part`, those that it has."""
    return {name: part[name] for name in names if name in part}


def _log_progress(done: int, total: int) -> None:
    if done == total or done % max(total // 4, 1) == 0:
        logger.info("  %d of %d", done, total)
