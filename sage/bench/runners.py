"""Runners of the bench: policies of this project, and Hugging Face decoders as baselines.

Every runner takes the same model-ready inputs and returns a `TimedRun`, whose times are defined identically for all runners:

* `wall_s`, end to end: from model-ready tensors to the last token id, including vision tower and prefill, excluding the
  processor (image decoding, tokenization).
* `decode_s`: time after the target's prefill, and thus without its `prefill_tokens`. For a policy, `wall_s` minus the phases
  `vision` and `target_prefill` of its statistics; unattributed time and the draft's prefill count as decoding. For Hugging
  Face `generate`, a stopping criterion records the time of the first tokens; subtracting a separate `max_new_tokens=1` run
  would add the noise of that run.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import CompileConfig, GenerationConfig, StoppingCriteria, StoppingCriteriaList

import sage
from sage.bench.options import BASELINES, HF_ASSISTED, HF_COMPILED, HF_GENERATE, HF_STATIC, PROMPT_LOOKUP
from sage.bench.report_table import TARGET_PREFILL_PHASES
from sage.decoding.batch import BatchDecoder
from sage.decoding.generation import Output
from sage.decoding.settings import Sampling
from sage.drafts.model import check_pair
from sage.drafts.pruning import KEEP_ALL, Pruning
from sage.runtime.timing import PHASES, decoding_now_s, now_s, synchronize
from sage.trees import AUTOREGRESSIVE

PROMPT_LOOKUP_TOKENS = 10


@dataclass(kw_only=True)
class TimedRun:
    """One generation: `tokens` are the ids after the prompt, up to and including EOS; times in seconds."""

    tokens: list[int]
    wall_s: float
    decode_s: float
    prefill_tokens: int = 1
    stats: Any = None  # the decoder's own statistics; None for Hugging Face
    time_s: dict[str, float] = field(default_factory=dict)  # by phase, sums to wall_s; empty for Hugging Face

    @property
    def decode_tokens(self) -> int:
        return max(len(self.tokens) - self.prefill_tokens, 0)


class Runner(Protocol):
    """One decoder under measurement.

    One that `may_fail` is left out of the comparison after an exception, with the reason in the report: decoders of other
    libraries do not support every model and prompt.
    """

    name: str
    is_autoregressive: bool  # whether it can be the baseline of speedups
    may_fail: bool

    def run(self, inputs: Mapping[str, Tensor], sampling: Sampling) -> TimedRun:
        """Generates once from inputs of batch 1."""


class PolicyRunner:
    """A policy through `sage.generate`, by default the one named `name`; `autoregressive` needs no draft.

    One policy decodes all prompts and keeps what it learns. With `is_first_answer`, every run starts with a policy that has
    learned nothing, as in a new process; its time includes reading the measured costs from disk. Without `couple`, its draft
    never sees the noise of draws, whatever the sampling parameters say.
    """

    may_fail = False

    def __init__(
        self,
        target: Any,
        draft: Any,
        name: str,
        policy: Any = None,
        pruning: Pruning = KEEP_ALL,
        is_first_answer: bool = False,
        couple: bool = True,
    ) -> None:
        self.target, self.name, self.pruning, self.couple = target, name, pruning, couple
        self.policy = sage.policy(name) if policy is None else policy
        self._unused = copy.deepcopy(self.policy) if is_first_answer else None
        self.is_autoregressive = self.policy.name == AUTOREGRESSIVE
        self.draft = None if self.is_autoregressive else draft

    def run(self, inputs: Mapping[str, Tensor], sampling: Sampling) -> TimedRun:
        """Generates once; times the complete call, without what is prepared once per machine."""
        inputs = on_device(inputs, self.target.device)
        sampling = self._sampling(sampling)
        if self._unused is not None:
            self.policy = copy.deepcopy(self._unused)
        start = self._now_s()
        out = sage.generate(self.target, self.draft, inputs, policy=self.policy, pruning=self.pruning, sampling=sampling)
        return timed_run(out, self._now_s() - start)

    def run_batch(
        self, inputs: Sequence[Mapping[str, Tensor]], samplings: Sequence[Sampling], batch_size: int
    ) -> list[TimedRun]:
        """Generates from all inputs, up to `batch_size` together; the time of a pass is divided among its requests."""
        if self.pruning is not KEEP_ALL:
            raise ValueError("batch_size: a draft with pruned visual tokens is measured with 1")
        policies = [self.policy if self._unused is None else copy.deepcopy(self._unused) for _ in inputs]
        given = [on_device(fields, self.target.device) for fields in inputs]
        start = self._now_s()
        decoder = BatchDecoder(self.target, self.draft, batch_size)
        requests = []
        for fields, sampling, policy in zip(given, map(self._sampling, samplings), policies, strict=True):
            while not decoder.has_room:
                decoder.step()
            requests.append(decoder.add(fields, policy, sampling=sampling))
        while len(decoder):
            decoder.step()
        total_s = self._now_s() - start
        outs = [request.output() for request in requests]
        unaccounted_s = total_s - sum(sum(out.stats.time_s.values()) for out in outs)
        return [timed_run(out, sum(out.stats.time_s.values()) + max(unaccounted_s, 0.0) / len(outs)) for out in outs]

    def _now_s(self) -> float:
        synchronize(self.target.device)
        return decoding_now_s()

    def _sampling(self, sampling: Sampling) -> Sampling:
        return sampling if self.couple or sampling.is_greedy else replace(sampling, couple=False)


def timed_run(out: Output, wall_s: float) -> TimedRun:
    """Returns the run of an answer of `wall_s` seconds; unattributed time is added to the phase `other`."""
    time_s = {phase: out.stats.time_s.get(phase, 0.0) for phase in PHASES}
    time_s["other"] += max(wall_s - sum(time_s.values()), 0.0)
    decode_s = wall_s - sum(time_s[phase] for phase in TARGET_PREFILL_PHASES)
    return TimedRun(tokens=out.tokens.tolist(), wall_s=wall_s, decode_s=decode_s, stats=out.stats, time_s=time_s)


class HFRunner:
    """Hugging Face `generate` on the same model object; `generation`: more fields of `GenerationConfig`."""

    def __init__(
        self, target: Any, name: str = HF_GENERATE, is_autoregressive: bool = True, assistant: Any = None, **generation: Any
    ) -> None:
        self.target, self.name, self.is_autoregressive = target, name, is_autoregressive
        self.may_fail = name != HF_GENERATE
        self.generation = generation
        self.call_options = {} if assistant is None else {"assistant_model": assistant}

    def run(self, inputs: Mapping[str, Tensor], sampling: Sampling) -> TimedRun:
        """Generates once; a stopping criterion records the time of the first tokens."""
        device = self.target.device
        inputs, prompt_tokens = on_device(inputs, device), inputs["input_ids"].shape[1]
        stamp = FirstTokens(prompt_tokens, device)
        config = self._config(sampling)
        if sampling.temperature > 0:
            torch.manual_seed(sampling.seed)
        start = now_s(device)
        with torch.no_grad():
            ids = self.target.model.generate(
                **inputs,
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([stamp]),
                synced_gpus=False,  # the other ranks of a training run do not generate
                **self.call_options,
            )
        end = now_s(device)
        tokens = ids[0, prompt_tokens:].tolist()
        return TimedRun(tokens=tokens, wall_s=end - start, decode_s=end - stamp.time_s, prefill_tokens=stamp.tokens)

    def _config(self, sampling: Sampling) -> GenerationConfig:
        """Returns plain decoding, without the repetition penalty and sampling of the checkpoint's generation_config."""
        options: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:
            options = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
            options |= {"do_sample": True, "min_p": sampling.min_p or None}
        eos = list(self.target.eos_token_ids)
        return GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            min_new_tokens=sampling.min_new_tokens or None,
            num_beams=1,
            repetition_penalty=sampling.repetition_penalty,
            no_repeat_ngram_size=0,
            eos_token_id=eos or None,
            pad_token_id=eos[0] if eos else 0,
            use_cache=True,
            **options,
            **self.generation,
        )


class FirstTokens(StoppingCriteria):
    """Records the time and number of the first new tokens; never stops."""

    def __init__(self, prompt_tokens: int, device: torch.device) -> None:
        self.prompt_tokens, self.device = prompt_tokens, device
        self.time_s, self.tokens = 0.0, 0
        self.never = torch.zeros(1, dtype=torch.bool, device=device)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if not self.tokens:
            self.time_s, self.tokens = now_s(self.device), input_ids.shape[1] - self.prompt_tokens
        return self.never


def on_device(inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Returns the inputs on the model's device; the copy is not timed."""
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in inputs.items()}


def baseline_runner(target: Any, name: str, assistant: Any = None) -> Runner:
    """Returns the baseline of that name; `hf_assisted` needs a smaller Hugging Face model of the same vocabulary. Raises
    ValueError for an unknown name, or `hf_assisted` without an assistant.
    """
    if name == AUTOREGRESSIVE:
        return PolicyRunner(target, None, AUTOREGRESSIVE)
    if name not in BASELINES:
        raise ValueError(f"baselines: {name!r} is not a baseline; choose from {', '.join(BASELINES)}")
    if name == HF_ASSISTED and assistant is None:
        raise ValueError(
            f"baselines: {HF_ASSISTED} needs a smaller model with the target's vocabulary; give its folder "
            f"(decode.assistant=DIR, --assistant DIR) or remove {HF_ASSISTED}"
        )
    generation: dict[str, Any] = {"cache_implementation": "static"} if name in (HF_STATIC, HF_COMPILED) else {}
    if name == HF_COMPILED:  # passes are compiled once for all lengths of the cache, on a CPU as well
        generation["compile_config"] = CompileConfig(mode="default", dynamic=True)
        generation["compile_config"]._compile_all_devices = True
    if name == PROMPT_LOOKUP:
        # Prompt lookup would copy visual placeholders from the prompt, for which the model has no images. Suppressed tokens are
        # not proposed; no trained target emits placeholders, so the text is the same.
        slots = list(target.family.slots.values())
        generation = {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS, "suppress_tokens": slots or None}
    is_speculative = name in (PROMPT_LOOKUP, HF_ASSISTED)
    return HFRunner(target, name, not is_speculative, assistant if name == HF_ASSISTED else None, **generation)


def baseline_runners(target: Any, names: Iterable[str], path: str | None, draft: Any, leave_out: Sequence[str]) -> list[Runner]:
    """Returns autoregressive decoding and the named baselines, without those in `leave_out`. The model for assisted generation
    is the one at `path`, or the draft if it is a smaller model. Raises ValueError for another family or vocabulary.
    """
    wanted = dict.fromkeys([AUTOREGRESSIVE, *names])
    assistant = None
    if HF_ASSISTED in wanted and path is not None:
        smaller = sage.load_target(path, dtype=target.dtype, device=target.device)
        check_pair(smaller, target)
        assistant = smaller.model
    elif HF_ASSISTED in wanted and draft is not None:
        assistant = draft.assistant
    return [baseline_runner(target, name, assistant) for name in wanted if name not in leave_out]
