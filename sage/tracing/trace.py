"""The trace of one generation: every round's tree with the probabilities of draft and target, the policy's figures, and times.

A recorder keeps references while the request runs, and computes the target's probabilities between two rounds, outside the
clock; everything else follows after the answer. A generation without a recorder is not changed in any way.

Shapes: N verified nodes, M drafted nodes (M >= N), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage.decoding.decoder import Round
from sage.decoding.generation import Generation, Output, generate, start
from sage.decoding.settings import Sampling
from sage.decoding.verify import Verdict, Verifier
from sage.drafts.draft import Draft
from sage.inputs.messages import text_of
from sage.inputs.thumbnails import media_thumbnails
from sage.io.dtypes import dtype_name
from sage.planning.base import Policy
from sage.planning.tree import Drafted, Tree
from sage.runtime.executors import describe_passes
from sage.targets import Target
from sage.tracing.trace_page import Choice, Trace, TracedRound
from sage.trees import AUTOREGRESSIVE, DEFAULT_POLICY

Calibration = Callable[[list[float], int], list[float]]  # as `Policy.calibration`


class _Tap(Verifier):
    """A verifier that keeps what it last saw."""

    def __init__(self, verifier: Verifier, policy: Policy) -> None:
        super().__init__(verifier.sampler)
        self.policy = policy
        self.seen: tuple[Tensor, Tree, Verdict, Calibration | None] | None = None

    def verify(self, logits: Tensor, tree: Tree, needs_labels: bool = False, greedy_N: Tensor | None = None) -> Verdict:
        verdict = super().verify(logits, tree, needs_labels, greedy_N)
        self.seen = logits, tree, verdict, self.policy.calibration()
        return verdict


@dataclass
class _Seen:
    """References to one round; `log_probs`: [N], the target's, of the tokens of all nodes but the root, then the bonus."""

    emitted: Round
    tree: Tree
    verdict: Verdict
    calibration: Calibration | None
    log_probs: Tensor
    phases: Callable[[], dict[str, float]]


class TraceRecorder:
    """Records a request that has not started yet; `add` takes every round of it as soon as it is yielded."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        request = generation.request
        self._tap = request.verifier = _Tap(request.verifier, request.policy)
        self._seen: list[_Seen] = []

    def add(self, emitted: Round) -> None:
        """Records a round; its time counts for no phase."""
        if emitted.tree is None:  # the prefill
            return
        assert self._tap.seen is not None
        logits, tree, verdict, calibration = self._tap.seen
        places = [[*emitted.tree.parents[1:], verdict.path[-1]], [*emitted.tree.tokens[1:], verdict.tokens[-1]]]
        parents, tokens = torch.tensor(places, device=logits.device)
        log_probs = logits.log_softmax(-1, dtype=torch.float32)[parents, tokens]  # one fused kernel
        phases = self.generation.request.clock.round_phases()
        self._seen.append(_Seen(emitted, tree, verdict, calibration, log_probs, phases))
        self._tap.seen = None

    def trace(
        self, settings: Mapping[str, str], messages: Sequence[Mapping[str, Any]] | None = None, race: Output | None = None
    ) -> Trace:
        """Returns the trace of the finished request.

        Args:
            settings: shown at the top of the page.
            messages: those of the prompt, for its text and images; None: the prompt's tokens are decoded.
        """
        request, target, output = self.generation.request, self.generation.target, self.generation.output()
        tokenizer = target.processor.tokenizer if target.processor else None
        described = {
            "target": Path(target.name).name if Path(target.name).is_dir() else target.name,
            "policy": request.policy.name,
            "device": str(target.device),
            "dtype": dtype_name(target.dtype),
            "passes": describe_passes(target),
        }
        rounds, start_ = [], 1
        for seen, figures in zip(self._seen, output.stats.rounds_log, strict=False):
            rounds.append(_traced(seen, start_, figures, request.policy))
            start_ += len(seen.emitted.tokens)
        return Trace(
            output=output,
            rounds=rounds,
            settings={**described, **settings},
            tokenizer=tokenizer,
            prompt=_prompt_text(messages, self.generation, tokenizer),
            media=list(media_thumbnails(messages or ())),
            race=race,
            is_coupled=request.verifier.sampler.is_coupled,
        )


def trace(
    target: Target,
    draft: Draft | None,
    inputs: Any,
    policy: str | Policy = DEFAULT_POLICY,
    *,
    race: bool = True,
    sampling: Sampling | None = None,
    **options: Any,
) -> Trace:
    """Decodes one prompt and returns its trace, which shows itself in a notebook; `save(path)` writes its page. Other arguments
    and errors are those of `sage.generate`.

    Args:
        inputs: chat messages, which also give the page its images, or the output of the target's processor.
        race: also decode the request without a draft, to compare the times.
    """
    messages = inputs if isinstance(inputs, (list, tuple)) else None
    ready = inputs if messages is None else target.prepare(list(messages))
    pruning = {"pruning": options.pop("pruning")} if "pruning" in options else {}
    recorder = record_rounds(start(target, draft, ready, policy, sampling=sampling, **pruning, **options))
    without = decode_race(target, ready, sampling, **options) if race else None
    return recorder.trace({"draft": draft_name(draft)}, messages, without)


def record_rounds(generation: Generation) -> TraceRecorder:
    """Decodes a request that has not started yet, and returns its recorder."""
    recorder = TraceRecorder(generation)
    with torch.inference_mode():
        for emitted in generation.rounds():
            recorder.add(emitted)
    return recorder


def decode_race(target: Target, inputs: Any, sampling: Sampling | None = None, **options: Any) -> Output:
    """Decodes a request without a draft; options as for `sage.generate`."""
    return generate(target, None, inputs, AUTOREGRESSIVE, sampling=sampling, **options)


def draft_name(draft: Draft | None) -> str:
    """Returns the folder of a draft; "none" without one."""
    return "none" if draft is None else str(getattr(getattr(draft, "config", None), "name_or_path", "") or type(draft).__name__)


def _prompt_text(messages: Sequence[Mapping[str, Any]] | None, generation: Generation, tokenizer: Any) -> list[tuple[str, str]]:
    """Returns role and text of every message, or the decoded prompt, with runs of visual tokens as one."""
    if messages is not None:
        return [(str(message.get("role", "")), text_of(message)) for message in messages]
    if tokenizer is None:
        return []
    ids: list[int] = generation.request.prompt.input_ids[0].tolist()
    slots = set(generation.target.family.slots.values())
    kept = [token for place, token in enumerate(ids) if not (place and token in slots and ids[place - 1] == token)]
    return [("prompt", tokenizer.decode(kept))]


def _traced(seen: _Seen, start_: int, figures: dict[str, float], policy: Policy) -> TracedRound:
    tree, verdict, emitted = seen.tree, seen.verdict, seen.emitted
    columns = tree.columns
    find = tree.find_drafted
    drafted = Drafted(columns.tokens, columns.parents, columns.depths, [None] * len(tree)) if find is None else find()
    *target, bonus_prob = seen.log_probs.exp().tolist()
    bonus, topk = None, drafted.topk[verdict.path[-1]]
    if len(emitted.tokens) > emitted.num_drafted:
        token = verdict.tokens[-1]
        rank = topk[1].index(token) if topk is not None and token in topk[1] else None
        bonus = Choice(token, bonus_prob, None if topk is None or rank is None else topk[0][rank], rank)
    return TracedRound(
        start=start_,
        tokens=list(emitted.tokens),
        num_accepted=emitted.num_drafted,
        num_verified=len(tree),
        nodes=drafted.tokens,
        parents=drafted.parents,
        depths=drafted.depths,
        draft=_below(drafted, lambda probs, depth: probs),
        calibrated=_below(drafted, seen.calibration) if seen.calibration is not None else None,
        target=[1.0, *target],
        path=list(verdict.path),
        bonus=bonus,
        figures=figures,
        reason=policy.explain(figures),
        time_s=seen.phases(),
    )


def _below(drafted: Drafted, value: Calibration) -> list[float]:
    """Returns, per node, its entry among `value` of its parent's candidates; 1 for the root, 0 where that ends earlier."""
    known: dict[int, dict[int, float]] = {}
    for node, topk in enumerate(drafted.topk):
        if topk is not None:
            known[node] = dict(zip(topk[1], value(topk[0], drafted.depths[node] + 1), strict=False))
    pairs = zip(drafted.parents[1:], drafted.tokens[1:], strict=True)
    return [1.0, *(known[parent].get(token, 0.0) for parent, token in pairs)]
