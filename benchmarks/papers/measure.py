"""The kinds of measurement: a comparison of decoders, vLLM's decoders, the draft's confidence, acceptance while training.

Figures are kept in a JSON file per study and measured again only when their inputs change.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

import sage
from benchmarks.engines.measure import Comparison, question
from benchmarks.engines.measure import measure as measure_beside_vllm
from benchmarks.papers.runs import DRAFT, Json, Settings, digest, ensure_trained, training_of, weights_digest
from benchmarks.wide import widen_to
from checkpoints.run_folder import METRICS, read_metrics, read_reports
from data_prep.pocket import world
from sage.bench.measurement import BenchPrompt, Measurement, measure, read_jsonl
from sage.bench.options import variants
from sage.bench.report import machine
from sage.bench.runners import AUTOREGRESSIVE, PolicyRunner, baseline_runner
from sage.bench.summary import summarize
from sage.commands.cli import versions
from sage.drafts.draft import open_draft
from sage.drafts.pruning import KEEP_ALL, Pruning
from sage.io.dtypes import torch_dtype
from sage.io.files import read_json, write_json
from sage.io.machine import available_cores
from sage.io.progress import progress_callback
from sage.io.target_paths import find_target
from sage.planning.tree import Drafted, RoundOutcome
from sage.runtime.modes import PassMode
from sage.targets.weights import dense_weight, is_quantized
from sage.trees.eagle2 import Eagle2
from sage.trees.sage import confidence_of

logger = logging.getLogger(__name__)
COUNTS = ("tokens_per_target_pass", "mean_accepted_draft", "nodes_per_round", "match", "total", "match_hf", "draft_context")
SPEEDS = ("tokens_per_s", "speedup", "speedup_ci", "speedup_end_to_end")
NUM_CANDIDATES = 10  # k of SAGE
SCHEMA, SIGNIFICANT_DIGITS = 2, 5  # of figures on disk
Series = list[list[float]]  # one list per answer


def round_floats(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
    if isinstance(value, Mapping):
        return {str(key): round_floats(item) for key, item in value.items()}
    return [round_floats(item) for item in value] if isinstance(value, (list, tuple)) else value


def read_measurements(folder: Path, study: str) -> dict[str, Json]:
    """Returns the measurements of a study by name, each with `figures`, inputs, machine and versions; empty if it has none."""
    path = folder / f"{study}.json"
    return dict(read_json(path)["measurements"]) if path.is_file() else {}


@cache
def load_target(path: str, passes: str, quantize: str | None = None, is_dense: bool = False) -> sage.Target:
    target = sage.load_target(path, dtype=torch.float32, passes=passes, quantize=quantize)
    return with_dense_layers(target, passes) if is_dense else target


def with_dense_layers(target: sage.Target, passes: str) -> sage.Target:
    """Replaces quantized layers by dense ones of the same weights: a pass over quantized ones dequantizes all of them."""
    for parent in [*target.model.modules()]:
        for name, layer in parent.named_children():
            if isinstance(layer, nn.Linear) and is_quantized(layer):
                dense = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
                dense.bias, layer.bias = layer.bias, None
                dense.weight = nn.Parameter(dense_weight(layer, target.dtype), requires_grad=False)
                setattr(parent, name, dense)
    target.quantization, target.passes = None, PassMode(passes)
    return target


@cache
def load_draft(folder: Path, target: sage.Target) -> Any:
    """Loads a draft for the target, or for another form of it."""
    draft: Any = open_draft(folder, target, target.dtype)
    draft.assign(target)
    return draft


class Lab:
    """Loads targets, drafts and prompts, and measures; `folder` has the figures."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings, self.folder = settings, folder

    def measure(self, study: str) -> None:
        """Measures what is missing or outdated of a study, and writes it to `STUDY.json`."""
        for name, given in self.settings.studies[study].items():
            spec = {**self.settings.defaults, **given}
            kept, inputs = read_measurements(self.folder, study), digest(self.inputs(spec))
            if kept.get(name, {}).get("inputs") == inputs:
                continue
            logger.info("measuring %s: %s", study, name)
            start = time.perf_counter()
            figures = round_floats(self._measure(spec))
            kept[name] = {
                "inputs": inputs,
                "seconds": round(time.perf_counter() - start, 1),
                "machine": round_floats(machine("cpu")),
                "versions": versions(),
                "figures": figures,
            }
            write_json(self.folder / f"{study}.json", {"schema": SCHEMA, "measurements": kept})

    def inputs(self, spec: Json) -> Json:
        """Returns all that figures depend on and a user can change: sizes, command lines, weights of targets."""
        runs = {run: self.settings.arguments(run) for run in sorted(set(runs_of(spec)))}
        return {"spec": spec, "runs": runs, "target": weights_digest(self.settings.targets[spec["target"]])}

    def _measure(self, spec: Json) -> Json:
        kinds = {"compare": self._compare, "vllm": self._vllm, "confidence": self._confidence}
        kinds |= {"epochs": self._epochs, "tokens": self._tokens}
        torch.set_num_threads(spec["threads"])
        return kinds[spec["kind"]](spec)

    def path(self, spec: Json) -> str:
        """Returns the folder of a measurement's target, widened if it says so."""
        path = self.settings.target_folder(spec["target"])
        if "megabytes" not in spec:
            return path
        wide = Path(self.settings.runs_dir) / f"{spec['target']}_{spec['megabytes']}_mb"
        if not wide.exists():
            widen_to(path, spec["megabytes"], wide)
        return str(wide)

    def target(self, spec: Json) -> sage.Target:
        return load_target(self.path(spec), spec["passes"], spec.get("quantize"), spec.get("is_dense", False))

    def draft(self, run: str, target: sage.Target) -> Any:
        """Returns the draft of a run; trains the run if it is missing."""
        return load_draft(ensure_trained(self.settings, run) / DRAFT, target)

    def prompts(self, spec: Json, split: str = "test", count: int = 0) -> list[BenchPrompt]:
        """Returns `count` questions of each task family or source, by default as many as the measurement says."""
        count, prepare = count or spec["prompts"], self.target(spec).prepare
        before = [world.sample(split, -1 - i).messages for i in range(spec.get("after", 0))]  # whole conversations
        talks = [question(split, i, family) for i in range(count) for family in spec["families"]]
        rows = [(talk.family, talk.id, [*chain.from_iterable(before), *talk.messages]) for talk in talks]
        if "prompts_file" in spec:  # beside the target; an id is a source and a number
            by_source: dict[str, list[tuple[str, str, Any]]] = defaultdict(list)
            path = Path(find_target(self.settings.targets[spec["target"]])).with_name(spec["prompts_file"])
            for name, _, messages in read_jsonl(path):
                source = name.rpartition("-")[0]
                by_source[source].append((source, name, messages))
            rows = [row for source in spec.get("sources", list(by_source)) for row in by_source[source][:count]]
        return [  # no two prompts share their noise
            BenchPrompt(name=name, family=family, inputs=prepare(messages), seed=seed)
            for seed, (family, name, messages) in enumerate(rows)
        ]

    def _compare(self, spec: Json) -> Json:
        """Times decoders side by side; policies that learn online decode prompts of the validation split first."""
        target = self.target(spec)
        runners = [self._runner(target, str(label), dict(how), spec) for label, how in spec["decoders"].items()]
        sampling = sage.Sampling(max_new_tokens=spec["max_new_tokens"], **spec.get("sampling", {}))
        warmup = self.prompts(spec, "validation", spec["warmup_prompts"])
        for runner in runners:
            for prompt in warmup if runner.policy.needs_costs else ():
                runner.run(prompt.inputs, sampling)
        baselines = [baseline_runner(target, name) for name in (AUTOREGRESSIVE, *spec.get("baselines", ()))]
        progress = progress_callback("measuring")
        together = spec.get("batch_size", 1)  # prompts
        found = measure([*runners, *baselines], self.prompts(spec), sampling, spec["repeats"], 1, progress, batch_size=together)
        summary = summarize(found, target, [runner.name for runner in runners])
        decoders = {
            label: {name: part[name] for name in (*COUNTS, *SPEEDS, *spec.get("figures", ())) if name in part}
            for label, part in (summary["baselines"] | summary["policies"]).items()
        }
        for label, part in summary["by_family"].get("caption", {}).items():
            decoders[label]["captions"] = part["speedup"]
        runs = {run: training_of(self.settings, run) for run in sorted(set(runs_of(spec)))}
        extra = {"sources": summary["by_family"]} if "prompts_file" in spec else {}
        extra |= {"same_tokens": self._same_tokens(spec, found)} if spec.get("is_dense") else {}
        return {"prompts": len(found.prompts), "decoders": decoders, "runs": runs, **extra}

    def _same_tokens(self, spec: Json, found: Measurement) -> float:
        """Returns the share of a quantized target's tokens that the original chooses after the same text."""
        model, same = load_target(self.path(spec), PassMode.eager).model, []
        for prompt, (run,) in zip(found.prompts, found.runs[AUTOREGRESSIVE], strict=True):
            answer = torch.tensor(run.tokens)
            with torch.inference_mode():
                logits = model(torch.cat((prompt.inputs["input_ids"], answer[None]), 1)).logits[0]
            same += (logits[-len(answer) - 1 : -1].argmax(-1) == answer).tolist()
        return statistics.mean(same)

    def _runner(self, target: sage.Target, label: str, how: Json, spec: Json) -> PolicyRunner:
        draft = self.draft(how.pop("run", spec.get("run")), target)
        pruning = Pruning(ratio=how.pop("pruning")) if "pruning" in how else KEEP_ALL
        couple = how.pop("couple", True)
        policy = sage.policy(how.pop("policy"), **how)
        return PolicyRunner(target, draft, label, policy, pruning=pruning, couple=couple)

    def _vllm(self, spec: Json) -> Json:
        """Times our decoders and those of engines in turns, with the first draft exported for them (`benchmarks.engines`)."""
        drafts = {label: ensure_trained(self.settings, run) / DRAFT for label, run in spec["drafts"].items()}
        comparison = Comparison(
            python=Path(spec["python"]),
            llama=Path(spec["llama"]) if "llama" in spec else None,
            dtypes=[torch_dtype(name) for name in spec.get("dtypes", ["fp32"])],
            cores=available_cores()[: spec.get("cores")],
            ngram=spec.get("ngram", False),
            target=self.path(spec),
            drafts=drafts,
            variants=variants(None, spec["policies"]),
            num_prompts=spec["prompts"],
            **{key: spec[key] for key in ("depths", "repeats", "passes", "max_new_tokens")},
        )
        return measure_beside_vllm(comparison)

    def _confidence(self, spec: Json) -> Json:
        """Returns correlations of alpha along answers. Ref: SAGE, arXiv 2602.00523, Eq. 9 and Figure 2."""
        target = self.target(spec)
        draft, limit = self.draft(spec["run"], target), spec["max_new_tokens"]
        answers = []  # of each, its rounds, and of each round the nodes on the path of the answer
        for prompt in self.prompts(spec):
            policy = _RecordingPolicy(total=64, depth=12, top_k=NUM_CANDIDATES)
            answer = sage.generate(target, draft, prompt.inputs, policy, max_new_tokens=limit)
            after = accumulate((accepted + 1 for accepted in answer.stats.accepted), initial=1)
            rounds = zip(policy.drafted, after, strict=False)
            answers.append([list(on_path(drafted, answer.tokens.tolist()[position:])) for drafted, position in rounds])
        tokens = [[confidence_of(probs) for nodes in answer for probs, _ in nodes] for answer in answers]
        starts = [[confidence_of(nodes[0][0]) for nodes in answer if nodes] for answer in answers]
        lengths = [[float(sum(is_candidate for _, is_candidate in nodes)) for nodes in answer if nodes] for answer in answers]
        return {
            "prompts": len(answers),
            "between_tokens": correlation(tokens, tokens, 1),
            "between_rounds": correlation(starts, starts, 1),
            "length_from_this_round": correlation(starts, lengths, 0),
            "length_from_last_round": correlation(starts, lengths, 1),
        }

    def _epochs(self, spec: Json) -> Json:
        """Returns tokens per target pass of a policy at each validation of a run, one per epoch."""
        reports = read_reports(ensure_trained(self.settings, spec["run"]))
        tokens = [report["policies"][spec["policy"]]["tokens_per_target_pass"] for _, report in reports]
        return {"prompts": reports[-1][1]["prompts"], "tokens_per_target_pass": tokens}

    def _tokens(self, spec: Json) -> Json:
        """Returns the estimated tokens per target pass in training by training tokens, at each doubling and at the end."""
        rows: list[Any] = [row for row in read_metrics(ensure_trained(self.settings, spec["run"]) / METRICS) if "tokens" in row]
        wanted = [rows[-1]["tokens"] // 2**power for power in reversed(range(8))]
        chosen = [min(rows, key=lambda row: abs(row["tokens"] - tokens)) for tokens in wanted]
        return {str(row["tokens"]): row["estimated_tokens_per_pass"] for row in chosen}


class _RecordingPolicy(Eagle2):
    """Wide trees in every round; keeps what was drafted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.drafted: list[Drafted] = []

    def observe(self, outcome: RoundOutcome) -> dict[str, float]:
        if outcome.tree.find_drafted is not None:  # None in a last round for a single token
            self.drafted.append(outcome.tree.find_drafted())
        return super().observe(outcome)


def on_path(drafted: Drafted, answer: Sequence[int]) -> Iterator[tuple[list[float], bool]]:
    """Yields, per expanded node on the path of the answer, the probabilities of its candidates and whether the answer's next
    token is among them; the path ends where it is not.

    Args:
        drafted: all nodes of a round.
        answer: the tokens below the root.
    """
    children = {pair: node for node, pair in enumerate(zip(drafted.parents, drafted.tokens, strict=True))}
    node = 0
    for token in answer:
        if (topk := drafted.topk[node]) is None:
            return
        probs, candidates = topk
        yield probs, token in candidates
        if (node, token) not in children:
            return
        node = children[node, token]


def correlation(first: Series, second: Series, lag: int) -> float | None:
    """Returns the Pearson correlation of values `lag` places apart within the same answer; None without variance."""
    pairs = [pair for a, b in zip(first, second, strict=True) for pair in zip(a, b[lag:], strict=False)]
    try:
        return statistics.correlation([x for x, _ in pairs], [y for _, y in pairs])
    except statistics.StatisticsError:
        return None


def runs_of(spec: Json) -> Iterator[str]:
    yield from spec.get("drafts", {}).values()
    yield from (how["run"] for how in spec.get("decoders", {}).values() if "run" in how)
    if "run" in spec:
        yield spec["run"]
