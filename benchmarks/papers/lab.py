"""What studies measure with: targets, drafts, prompts, recordings and cost tables, each made when first asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import sage
from benchmarks.papers import runs
from benchmarks.papers.figures import Figures, Json
from benchmarks.papers.settings import Settings, StudySettings
from data_prep.pocket import world
from sage.bench import BenchPrompt, PolicyRunner, Runner, baseline_runner, measure
from sage.bench.measurement import Measurement
from sage.bench.runners import AUTOREGRESSIVE, HF_ASSISTED, find_assistant
from sage.costs.measure import measure_costs
from sage.costs.tables import Costs
from sage.drafts import Draft
from sage.replay.recording import Recording, record
from sage.targets import Target

logger = logging.getLogger(__name__)
CANDIDATES = max(sage.policy(name).candidates for name in sage.POLICIES)  # recorded per node, for whoever looks at most
FIGURES = "results"  # the folder of figures and pictures, beside the page


class Lab:
    """One place to measure in.

    Args:
        settings: what is trained and measured.
        figures: where results go.
    """

    def __init__(self, settings: Settings, figures: Figures) -> None:
        self.settings, self.figures = settings, figures
        self._known: dict[Any, Any] = {}
        torch.set_num_threads(settings.threads)

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def target(self, name: str) -> Target:
        """The target of that short name, in fp32."""
        path = self.settings.targets[name]
        return self._once(("target", name), lambda: sage.load_target(path, dtype=torch.float32))

    def run(self, name: str) -> Path:
        """A run's folder; trains it where it is missing."""
        return runs.trained(self.settings, name)

    def draft(self, run: str) -> Draft:
        """The draft of a run, on the run's own target."""
        target = self.settings.training.runs[run].target
        return self._once(("draft", run), lambda: sage.load_draft(self.run(run) / runs.DRAFT, self.target(target)))

    def main(self, target: str) -> Draft:
        """The draft that a target is measured with."""
        return self.draft(self.settings.main[target])

    def origin(self, *names: str) -> Json:
        """What figures of these runs depend on: their command lines and targets."""
        chosen = {name: runs.overrides(self.settings, name) for name in names}
        return {"runs": chosen, "targets": {name: self.settings.training.runs[name].target for name in names}}

    # -- on what -------------------------------------------------------------------------------------------------------

    def prompts(self, target: str, split: str, families: Sequence[str], per_family: int, start: int = 0) -> list[BenchPrompt]:
        """First questions of held-out conversations, the families taking turns."""
        key = ("prompts", target, split, *families, per_family, start)
        return self._once(key, lambda: self._prompts(target, split, families, per_family, start))

    def _prompts(self, target: str, split: str, families: Sequence[str], per_family: int, start: int) -> list[BenchPrompt]:
        talks = [world.sample(split, start + number, [family]) for number in range(per_family) for family in families]
        prepare = self.target(target).prepare
        return [
            BenchPrompt(name=f"{talk.id}-{talk.family}", family=talk.family, inputs=prepare(talk.messages[:1]))
            for talk in talks
        ]

    def tested(self, target: str, study: StudySettings) -> list[BenchPrompt]:
        """A study's prompts, of the test split."""
        return self.prompts(target, "test", study.families, study.prompts)

    def recordings(self, target: str, prompts: Sequence[BenchPrompt], policy: Any = None) -> list[Recording]:
        """What the target's main draft said while these prompts were decoded, greedily."""
        model, draft = self.target(target), self.main(target)
        options = {"policy": policy, "candidates": CANDIDATES, "max_new_tokens": self.settings.max_new_tokens}
        return [record(model, draft, dict(one.inputs), **options) for one in prompts]

    def costs(self, target: str) -> Costs:
        """What passes cost on this machine, at the context of an answer's middle."""
        return self._once(("costs", target), lambda: self._costs(target))

    def _costs(self, target: str) -> Costs:
        first = self.prompts(target, "validation", self.settings.families[:1], 1)[0]
        context = int(first.inputs["input_ids"].shape[1]) + self.settings.max_new_tokens // 4
        return measure_costs(self.target(target), self.main(target), context, context + self.settings.max_new_tokens)

    # -- with whom -----------------------------------------------------------------------------------------------------

    def contestant(
        self, target: str, label: str, policy: str, options: Mapping[str, Any], run: str | None = None
    ) -> PolicyRunner:
        """A policy with options, under a label, on the target's main draft or that of another run."""
        draft = self.main(target) if run is None else self.draft(run)
        return PolicyRunner(self.target(target), draft, label, sage.policy(policy, **options))

    def baselines(self, target: str, names: Sequence[str] = ()) -> list[Runner]:
        """Our own autoregressive loop and the other decoders named; assisted generation where the target has an assistant."""
        wanted = list(dict.fromkeys([AUTOREGRESSIVE, *names]))
        assistant, helper = self.settings.assistants.get(target), None
        if assistant is None:
            wanted = [name for name in wanted if name != HF_ASSISTED]
        elif HF_ASSISTED in wanted:
            helper = find_assistant(self.target(target), None, self.draft(assistant))
        return [baseline_runner(self.target(target), name, helper) for name in wanted]

    def contest(
        self,
        target: str,
        runners: Sequence[Runner],
        prompts: Sequence[BenchPrompt],
        repeats: int,
        warmup: int = 1,
        **sampling: Any,
    ) -> Measurement:
        """Everybody on every prompt, interleaved; greedy unless `sampling` says otherwise.

        Policies that learn decode the prompts first that the others were tuned on.
        """
        chosen = sage.Sampling(**{"max_new_tokens": self.settings.max_new_tokens, **sampling})
        for runner in runners:
            if isinstance(runner, PolicyRunner) and runner.policy.learns:
                for lesson in self.lessons(target):
                    runner.run(lesson.inputs, chosen)
        return measure(runners, prompts, chosen, repeats, warmup, _progress)

    def lessons(self, target: str) -> list[BenchPrompt]:
        """What policies are tuned on: prompts of the validation split."""
        return self.prompts(target, "validation", self.settings.families, self.settings.tuning.prompts)

    # -- results -------------------------------------------------------------------------------------------------------

    def make(self, item: str, name: str, inputs: Json, measure_it: Callable[[], Json]) -> Json:
        """Figures `name` of an item, measured where they are missing or out of date."""
        return self.figures.make(name, inputs | self._basis(), measure_it, f"make results-{item}")

    def _basis(self) -> Json:
        settings = self.settings
        targets = {name: runs.weights(path) for name, path in settings.targets.items()}
        return {"threads": settings.threads, "targets": targets, "max_new_tokens": settings.max_new_tokens}

    def study(self, study: StudySettings) -> Json:
        """A study's settings as what its figures depend on."""
        return {"study": asdict(study)}


def _progress(done: int, total: int) -> None:
    if done == total or done % max(total // 4, 1) == 0:
        logger.info("  %d of %d", done, total)
