"""generate and stream: one request from inputs to text, around the loop of sage.decoder."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sage.cache import TreeCache
from sage.costs.measure import measure_costs
from sage.decoder import Request, Round, decode
from sage.drafts import KEEP_ALL, Draft, Pruning, check_draft, new_session
from sage.host_tensors import CPU, longs
from sage.sampling import Sampling, TargetSampler
from sage.stats import Clock, Stats
from sage.stopping_rules import StopCriterion
from sage.targets import Features, Prompt, Target
from sage.trees import Policy
from sage.trees import policy as new_policy

UNFINISHED = "\ufffd"  # what tokenizers write for the bytes of a character that is not all there


@dataclass
class Output:
    """A finished answer.

    Attributes:
        tokens: LongTensor [new tokens], after the prompt, up to and including EOS.
        stats: counts and times.
        drafted: BoolTensor [new tokens], True where the draft had guessed the token.
        tokenizer: makes `text` of the tokens when somebody asks for it.
    """

    tokens: Tensor
    stats: Stats
    drafted: Tensor
    tokenizer: Any = field(default=None, repr=False)

    @cached_property
    def text(self) -> str:
        """Decoded without special tokens; empty when the target has no processor."""
        return self.tokenizer.decode(self.tokens.tolist(), skip_special_tokens=True) if self.tokenizer else ""


@dataclass
class Piece:
    """A stretch of text as it is accepted; `is_drafted` says whether the draft had guessed it."""

    text: str
    is_drafted: bool


@dataclass
class Past:
    """What the target has read and answered so far in a conversation.

    Attributes:
        ids: LongTensor [S], the tokens in the cache.
        cache: the target's, S tokens long.
        features: of those tokens.
        prompt: the turn's prompt.
    """

    ids: Tensor
    cache: TreeCache
    features: Features
    prompt: Prompt

    def reuse(self, prompt: Prompt, capacity: int) -> tuple[TreeCache, list[Features]]:
        """The cache cut to what the new prompt begins with, with room for `capacity` tokens, and the features of that part.

        At least the last token is left to be read. Pictures are shared only as long as none has come since: their
        embeddings, and in LLaVA-OneVision their very number of tokens, may change with the others.
        """
        shared = _common_prefix(self.ids, prompt.input_ids[0, :-1])
        if prompt.visual is not self.prompt.visual:
            pictures = prompt.visual_mask[0].nonzero()[:, 0]
            shared = min(shared, int(pictures[0])) if len(pictures) else shared
        self.cache.crop_to(shared)
        self.cache.grow_to(capacity)
        kept = torch.arange(shared, device=self.ids.device)
        return self.cache, [self.features.at(kept)] if shared else []


def _common_prefix(first: Tensor, second: Tensor) -> int:
    length = min(len(first), len(second))
    differs = (first[:length] != second[:length]).nonzero()
    return int(differs[0]) if len(differs) else length


@dataclass
class Generation:
    """One request in progress; iterate over its rounds, then read `output`."""

    target: Target
    request: Request
    clock: Clock
    stats: Stats

    @property
    def tokens(self) -> list[int]:
        """The answer so far."""
        return self.request.stop.tokens

    def rounds(self) -> Iterator[Round]:
        """Runs the request; yields each round as it is accepted."""
        yield from decode(self.request, self.clock, self.stats)
        self.clock.lap("other")
        self.stats.time_s = self.clock.seconds()

    def past(self) -> Past:
        """What a next turn can build on."""
        request = self.request
        ids = torch.cat((request.prompt.input_ids[0], torch.tensor(self.tokens, device=self.target.device)))
        request.cache.crop_to(min(request.cache.length, len(ids)))
        features = Features.join(request.read)
        kept = torch.arange(request.cache.length, device=ids.device)
        return Past(ids[: len(kept)], request.cache, features.at(kept), request.prompt)

    def output(self) -> Output:
        """The answer so far."""
        tokenizer = self.target.processor.tokenizer if self.target.processor else None
        return Output(longs(self.tokens, CPU), self.stats, self._drafted(), tokenizer)

    def _drafted(self) -> Tensor:
        """`Output.drafted`: one token of the prefill's, then each round's accepted ones and, unless it was cut, its bonus."""
        flags = bytearray(1)
        for accepted in self.stats.accepted:
            flags += b"\1" * accepted + b"\0"
        return torch.frombuffer(flags, dtype=torch.bool)[: self.stats.new_tokens]


def start(
    target: Target,
    draft: Draft | None,
    inputs: Any,
    policy: str | Policy = "sage",
    *,
    sampling: Sampling | None = None,
    pruning: Pruning = KEEP_ALL,
    past: Past | None = None,
    **options: Any,
) -> Generation:
    """Checks one request and embeds its inputs; arguments as for `generate`.

    Args:
        past: an earlier turn of the same conversation; its common prefix with the new prompt is not prefilled again. This call
            takes over its cache.
    """
    clock = Clock(target.device)
    sampling = _sampling(sampling, options)
    policy = new_policy(policy) if isinstance(policy, str) else policy
    if policy.num_candidates and draft is None:
        raise ValueError(f"draft: the policy {policy.name!r} needs one; load it with sage.load_draft(path, target)")
    if draft is not None:
        check_draft(draft, target, pruning)
    inputs = _unpadded(inputs, target.family.pixel_keys)
    prompt_ids = inputs["input_ids"]
    tokenizer = target.processor.tokenizer if target.processor else None
    stop = StopCriterion(sampling, target.eos_token_ids, tokenizer)
    sampler = TargetSampler(sampling, prompt_ids[0].to(target.device), target.eos_token_ids, tokenizer)
    capacity = _capacity(target, prompt_ids, sampling.max_new_tokens, policy)
    if draft is not None and policy.needs_costs and policy.costs is None:
        length = prompt_ids.shape[1]
        policy.costs = measure_costs(target, draft, length, length + sampling.max_new_tokens)
        clock.skip()
    prompt = target.embed(inputs, past.prompt if past else None)
    clock.lap("vision")
    cache, read = past.reuse(prompt, capacity) if past else (target.new_cache(capacity), [])
    session = new_session(draft, target, capacity) if draft is not None and policy.num_candidates else None
    request = Request(
        target=target,
        session=session,
        policy=policy,
        sampler=sampler,
        stop=stop,
        prompt=prompt,
        cache=cache,
        pruning=pruning,
        read=read,
    )
    return Generation(target, request, clock, Stats())


def _unpadded(inputs: Mapping[str, Any], pixel_keys: Collection[str]) -> Mapping[str, Any]:
    """Inputs of one prompt without padding tokens, which only a batch needs.

    Raises:
        ValueError: the attention mask leaves nothing.
    """
    mask = inputs.get("attention_mask")
    if mask is None or len(mask) != 1 or bool(mask.all()):
        return inputs
    is_kept, shape = mask[0].bool(), inputs["input_ids"].shape
    if not is_kept.any():
        raise ValueError("inputs: the attention mask hides every token; give a prompt")
    return {
        key: value[:, is_kept] if isinstance(value, Tensor) and value.shape == shape and key not in pixel_keys else value
        for key, value in inputs.items()
    }


def _sampling(sampling: Sampling | None, options: dict[str, Any]) -> Sampling:
    known = [field.name for field in fields(Sampling)]
    if unknown := [name for name in options if name not in known]:
        raise ValueError(f"{unknown[0]}: unknown option; choose from policy, sampling, pruning, {', '.join(known)}")
    return replace(sampling or Sampling(), **options)


def generate(
    target: Target,
    draft: Draft | None,
    inputs: Any,
    policy: str | Policy = "sage",
    *,
    sampling: Sampling | None = None,
    pruning: Pruning = KEEP_ALL,
    **options: Any,
) -> Output:
    """Decodes one prompt. The output distribution is the target's own for every draft and policy.

    Args:
        target: the vision-language model.
        draft: the draft for `target`; None for the policy `autoregressive`.
        inputs: output of the target's processor, batch size 1.
        policy: a name of `sage.POLICIES` or a policy built with `sage.policy(...)`.
        sampling: sampling parameters; default `sage.Sampling()`.
        pruning: the visual tokens that the draft reads; the target reads all of them.
        options: fields of `sage.Sampling` that override those of `sampling`. The same seed gives the same text under every
            policy.

    Raises:
        ValueError: an option out of range, a batch size other than 1, a prompt longer than the target's context, or a draft
            of another target.
    """
    generation = start(target, draft, inputs, policy, sampling=sampling, pruning=pruning, **options)
    with torch.inference_mode():
        for _ in generation.rounds():
            pass
    return generation.output()


def stream(
    target: Target,
    draft: Draft | None,
    inputs: Any,
    policy: str | Policy = "sage",
    *,
    sampling: Sampling | None = None,
    pruning: Pruning = KEEP_ALL,
    **options: Any,
) -> Iterator[str]:
    """Yields the text as it is accepted; arguments as for `generate`."""
    generation = start(target, draft, inputs, policy, sampling=sampling, pruning=pruning, **options)
    for piece in pieces(generation):
        yield piece.text


def pieces(generation: Generation) -> Iterator[Piece]:
    """Text of each round, split where the draft's guesses end; holds back bytes of an unfinished character.

    Raises:
        ValueError: the target has no processor to decode with.
    """
    if generation.target.processor is None:
        raise ValueError("stream: the target has no processor to decode text with; use generate and read its tokens")
    tokenizer = generation.target.processor.tokenizer
    shown = ""
    for round_ in generation.rounds():
        before = len(generation.tokens) - len(round_.tokens)
        for end, is_drafted in ((before + round_.num_drafted, True), (len(generation.tokens), False)):
            text = tokenizer.decode(generation.tokens[:end], skip_special_tokens=True)
            is_last = generation.request.stop.is_over and end == len(generation.tokens)
            whole = text if is_last else text.rstrip(UNFINISHED)
            if len(whole) > len(shown):
                yield Piece(whole[len(shown) :], is_drafted)
                shown = whole


def _capacity(target: Target, input_ids: Tensor, max_new_tokens: int, policy: Policy) -> int:
    """Cache rows for prompt, answer and one tree.

    Raises:
        ValueError: a batch, or more tokens than the target's context holds.
    """
    batch, length = input_ids.shape
    if batch != 1:
        raise ValueError(f"inputs: batch of {batch}; decode one request at a time")
    limit = int(target.text_config.max_position_embeddings)
    if length + max_new_tokens > limit:
        raise ValueError(
            f"max_new_tokens: a prompt of {length} tokens and {max_new_tokens} new ones exceed the target's context of "
            f"{limit}; ask for at most {max(limit - length, 0)}, or shorten the prompt or its pictures"
        )
    return length + max_new_tokens + policy.tree_capacity
