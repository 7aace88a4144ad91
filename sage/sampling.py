"""Sampling of the target's tokens: Hugging Face's logits processors on the prefix of each node, then argmax or a seeded draw.

A draw is argmax(log p + g) with Gumbel noise g that is a function of the seed and the position in the answer. One seed
therefore gives the same text under every policy and without speculation.

Shapes: N tree nodes, V vocabulary, T prompt tokens, K candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sage.trees.tree import Tree


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters of a request.

    Attributes:
        min_new_tokens: minimum number of tokens to generate before EOS is allowed.
        temperature: 0 = greedy.
        top_k: number of most probable tokens to keep; 0 = all.
        top_p: cumulative probability of the most probable tokens to keep; 1 = all.
        min_p: minimum probability of a token, relative to that of the most probable token; 0 = off.
        repetition_penalty: above 1 makes tokens of the prompt and the answer less probable; 1 = off.
        stop: strings that end the answer; a single string or None is allowed.
        bad_words: strings that are never generated; a single string or None is allowed.
        logits_processor: Hugging Face logits processors, applied to each tree node with the prefix of that node; a single
            processor or None is allowed.

    Raises:
        ValueError: a value out of range, an empty string, or a logits processor that is not callable.
    """

    max_new_tokens: int = 256
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: Sequence[str] | str | None = ()
    bad_words: Sequence[str] | str | None = ()
    logits_processor: Any = ()

    def __post_init__(self) -> None:
        for name, is_valid, allowed in (
            ("max_new_tokens", self.max_new_tokens >= 1, ">= 1"),
            ("min_new_tokens", self.min_new_tokens >= 0, ">= 0"),
            ("temperature", self.temperature >= 0, ">= 0 (0 = greedy)"),
            ("top_k", self.top_k >= 0, ">= 0 (0 = all)"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("repetition_penalty", self.repetition_penalty > 0, "> 0 (1 = off)"),
        ):
            if not is_valid:
                raise ValueError(f"{name}: {getattr(self, name)} is not allowed; it must be {allowed}")
        object.__setattr__(self, "stop", _strings("stop", self.stop, "end every answer"))
        object.__setattr__(self, "bad_words", _strings("bad_words", self.bad_words, "forbid every answer"))
        object.__setattr__(self, "logits_processor", _processors(self.logits_processor))

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @classmethod
    def from_attributes(cls, source: object) -> Sampling:
        """Builds from the attributes of `source` that have a field's name, for example of parsed arguments."""
        return cls(**{field.name: getattr(source, field.name) for field in fields(cls) if hasattr(source, field.name)})


class TargetSampler:
    """Samples the target's next tokens within one request, with its prompt, LongTensor [T], and the token ids that end the
    answer. Raises ValueError for bad words without a tokenizer.
    """

    def __init__(self, sampling: Sampling, prompt_ids: Tensor, eos: Sequence[int] = (), tokenizer: Any = None) -> None:
        self.is_greedy, self.seed = sampling.is_greedy, sampling.seed
        self.num_prompt = len(prompt_ids)
        self.history: list[int] = prompt_ids.tolist()
        self.context = _context_processors(sampling, self.num_prompt, eos, tokenizer, prompt_ids.device)
        self.warpers = LogitsProcessorList() if self.is_greedy else _warpers(sampling)
        self._log_p = torch.empty(0)

    def first(self, logits: Tensor) -> Tensor:
        """Samples the token after the prompt, LongTensor [1], from logits [1, V]."""
        return self(logits, Tree.of_root(self.history[-1], logits.device))

    def __call__(self, logits: Tensor, tree: Tree) -> Tensor:
        """Samples the target's next token at every node; returns LongTensor [N].

        Args:
            logits: [N, V]; ValueError if NaN.
            tree: N nodes; its root is the last token of the history.
        """
        self._refuse_nan(logits.amax(-1))  # `max` also returns the index and is slower than `amax` and `argmax` together
        scores = self._in_context(logits, tree) if self.context else logits
        if self.is_greedy:
            return scores.argmax(-1)
        self._log_p = self.warpers(None, scores.double()).log_softmax(-1)
        positions = len(self.history) - self.num_prompt + tree.depths
        return (self._log_p + self._noise(positions, logits.shape[-1])).argmax(-1)

    def candidate_probs(self, tree: Tree) -> Callable[[int], list[list[float]]]:
        """Target probabilities of the draft candidates in the tree last sampled for; not for greedy decoding.

        Returns a function that maps k to the probabilities of the first k candidates of every expanded node. It holds these
        probabilities only, not those of the whole vocabulary, and can be called in a later round.
        """
        expanded = {node: topk[1] for node, topk in enumerate(tree.draft_topk) if topk is not None}
        if not expanded:
            return lambda k: []
        tokens = torch.tensor(list(expanded.values()), device=self._log_p.device)
        probs = self._log_p[list(expanded)].gather(1, tokens).exp().float()
        return lambda k: probs[:, :k].tolist()

    def extend(self, tokens: list[int]) -> None:
        """Appends accepted tokens to the history."""
        self.history += tokens

    def _refuse_nan(self, best: Tensor) -> None:
        """`best`: [N], the largest logit of every node; NaN if any of its logits is."""
        if any(map(math.isnan, best.tolist())):
            num_new = len(self.history) - self.num_prompt
            after = f"pass over {len(best)} node(s) after {num_new} new tokens"
            which = after if num_new else f"prefill of {self.num_prompt} tokens"
            raise ValueError(
                f"logits: the target's {which} gave NaN; check its weights and dtype (float16 overflows: use bfloat16)"
            )

    def _in_context(self, logits: Tensor, tree: Tree) -> Tensor:
        """Applies processors to each node with its prefix; batches the nodes of one depth, whose prefixes are equally long."""
        scores = torch.empty_like(logits)
        past = torch.tensor(self.history[:-1], dtype=torch.long, device=logits.device)
        for depth in range(tree.depth + 1):
            nodes = (tree.depths == depth).nonzero()[:, 0]
            paths = tree.tokens.expand(len(nodes), -1)[tree.ancestors[nodes]].view(len(nodes), depth + 1)
            prefixes = torch.cat((past.expand(len(nodes), -1), paths), 1)
            scores[nodes] = self.context(prefixes, logits[nodes].clone())
        return scores

    def _noise(self, positions: Tensor, vocabulary: int) -> Tensor:
        """Gumbel noise [N, V], float64; equal for equal positions."""
        keys, row = positions.unique(return_inverse=True)
        noise = torch.stack([gumbel(self.seed, key, vocabulary) for key in keys.tolist()])
        return noise.to(positions.device)[row]


def gumbel(seed: int, position: int, vocabulary: int) -> Tensor:
    """Gumbel(0, 1) noise [V], float64, a function of seed and position; drawn on the CPU, so equal for all devices."""
    generator = torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03) % 2**63)
    uniform = torch.rand(vocabulary, generator=generator, dtype=torch.float64)
    return -torch.log(-torch.log(uniform.clamp(min=torch.finfo(torch.float64).tiny)))


def _context_processors(
    sampling: Sampling, num_prompt: int, eos: Sequence[int], tokenizer: Any, device: torch.device
) -> LogitsProcessorList:
    """Processors that depend on the prefix, in the order of Hugging Face's `generate`."""
    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.bad_words:
        if tokenizer is None:
            raise ValueError("bad_words: the target has no tokenizer to encode them with; use sage.load_target(path)")
        spellings = [prefix + word for word in sampling.bad_words for prefix in ("", " ")]
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in spellings]
        processors.append(NoBadWordsLogitsProcessor(ids, eos_token_id=list(eos)))
    if sampling.min_new_tokens and eos:
        processors.append(MinNewTokensLengthLogitsProcessor(num_prompt, sampling.min_new_tokens, list(eos), device=device))
    processors.extend(sampling.logits_processor)
    return processors


def _processors(value: Any) -> tuple[Any, ...]:
    found = () if value is None else value if isinstance(value, (list, tuple)) else (value,)
    if wrong := [processor for processor in found if not callable(processor)]:
        raise ValueError(f"logits_processor: {wrong[0]!r} is not callable; give one or more Hugging Face logits processors")
    return tuple(found)


def _strings(key: str, value: Sequence[str] | str | None, effect: str) -> tuple[str, ...]:
    """Normalizes an option of several strings; `effect` says what an empty string, which is refused, would do."""
    found = (value,) if isinstance(value, str) else () if value is None else value
    if not isinstance(found, Collection) or not all(isinstance(text, str) for text in found):
        raise ValueError(f"{key}: {value!r} is not allowed; give a string or a list of strings")
    if not all(found):
        raise ValueError(f"{key}: an empty string would {effect}; remove it")
    return tuple(found)


def _warpers(sampling: Sampling) -> LogitsProcessorList:
    """Processors that reshape the distribution, in the order of Hugging Face's `generate`."""
    warpers = LogitsProcessorList()
    if sampling.temperature != 1:
        warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return warpers
