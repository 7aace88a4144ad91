"""One request from model inputs to text, around the loop of `sage.decoding.decoder`, and conversations of several turns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sage.costs.measure import known_costs
from sage.decoding.answer import Detokenizer, Stats, StopCriterion
from sage.decoding.decoder import Request, Round, decode
from sage.decoding.settings import Sampling
from sage.decoding.verify import TargetSampler, Verifier
from sage.drafts.draft import Draft, check_draft, new_session
from sage.drafts.pruning import KEEP_ALL, Pruning
from sage.planning.base import Policy
from sage.runtime.cache import TreeCache
from sage.runtime.host_tensors import CPU, long_tensor
from sage.runtime.timing import Clock
from sage.targets import Features, Prompt, Target
from sage.targets.tree_passes import TreePasses
from sage.trees import DEFAULT_POLICY
from sage.trees import policy as new_policy


@dataclass(repr=False)
class Output:
    """A finished answer.

    Attributes:
        tokens: LongTensor [new tokens], without the prompt, up to and including EOS.
        drafted: BoolTensor [new tokens], True where the draft had proposed the token.
    """

    tokens: Tensor
    stats: Stats
    drafted: Tensor
    tokenizer: Any = field(default=None, repr=False)

    @cached_property
    def text(self) -> str:
        """Decoded without special tokens; empty if the target has no processor."""
        return self.tokenizer.decode(self.tokens.tolist(), skip_special_tokens=True) if self.tokenizer else ""

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Output({self.text!r}, {self.stats!r})"


@dataclass
class Piece:
    """Newly accepted text; `is_drafted`: whether the draft had proposed it."""

    text: str
    is_drafted: bool


@dataclass
class CachedPrefix:
    """Tokens of a conversation in the target's cache: `ids` LongTensor [S], the cache, their features, the turn's prompt."""

    ids: Tensor
    cache: TreeCache
    features: Features
    prompt: Prompt

    def reuse(self, prompt: Prompt, capacity: int) -> tuple[TreeCache, list[Features]]:
        """Crops the cache to the common prefix with `prompt` and grows it to `capacity` tokens; returns it with its features.

        The last token of `prompt` is never part of the prefix, so at least one token is prefilled. Images are shared only if no
        new one was added: their embeddings, and in LLaVA-OneVision their number of tokens, can depend on the other images.
        """
        length = min(len(self.ids), prompt.input_ids.shape[1] - 1)
        differs = (self.ids[:length] != prompt.input_ids[0, :length]).nonzero()
        shared = int(differs[0]) if len(differs) else length
        if prompt.visual is not self.prompt.visual:
            visual = prompt.visual_mask[0].nonzero()[:, 0]
            shared = min(shared, int(visual[0])) if len(visual) else shared
        self.cache.crop_to(shared)
        shared = self.cache.length
        self.cache.grow_to(capacity)
        kept = torch.arange(shared, device=self.ids.device)
        return self.cache, [self.features.at(kept)] if shared else []


@dataclass(eq=False)
class Generation:
    """A request in progress; iterate over `rounds()`, then call `output()`. A `BatchDecoder` runs several."""

    target: Target
    request: Request

    @property
    def tokens(self) -> list[int]:
        """Tokens emitted so far."""
        return self.request.stop.tokens

    @property
    def stats(self) -> Stats:
        """Counts so far; times once the answer is finished."""
        return self.request.stats

    @property
    def error(self) -> Exception | None:
        """What ended it early, of several requests; its other figures are those until then."""
        return self.request.error

    @property
    def is_over(self) -> bool:
        """Whether the answer is complete, or has failed."""
        return self.error is not None or self.request.stop.is_over

    def rounds(self) -> Iterator[Round]:
        """Runs the request; yields each round as it is accepted."""
        try:
            yield from decode(self.request)
        finally:  # also of an answer that was interrupted
            self.request.clock.lap("other")
            self.stats.time_s = self.request.clock.seconds()

    def prefix(self) -> CachedPrefix:
        """Returns what a next turn can reuse; for a request started with `keep_prefix`."""
        request = self.request
        assert request.keep_features, "start the request with keep_prefix=True"
        ids = torch.cat((request.prompt.input_ids[0], torch.tensor(self.tokens, device=self.target.device)))
        request.cache.crop_to(min(request.cache.length, len(ids)))
        features = Features.join(request.features)
        kept = torch.arange(request.cache.length, device=ids.device)
        return CachedPrefix(ids[: len(kept)], request.cache, features.at(kept), request.prompt)

    def output(self) -> Output:
        """Returns the answer so far; raises `error` if there is one."""
        if self.error is not None:
            raise self.error
        tokenizer = self.target.processor.tokenizer if self.target.processor else None
        flags = bytearray(1)  # of the prefill's token, then of the accepted tokens and the bonus token of every round
        for accepted in self.stats.accepted:
            flags += b"\1" * accepted + b"\0"
        drafted = torch.frombuffer(flags, dtype=torch.bool)[: self.stats.new_tokens]
        return Output(long_tensor(self.tokens, CPU), self.stats, drafted, tokenizer)


def start(
    target: Target,
    draft: Draft | None,
    inputs: Any,
    policy: str | Policy = DEFAULT_POLICY,
    *,
    sampling: Sampling | None = None,
    pruning: Pruning = KEEP_ALL,
    prefix: CachedPrefix | None = None,
    keep_prefix: bool = False,
    num_logprobs: int | None = None,
    with_prompt: bool = False,
    **options: Any,
) -> Generation:
    """Checks one request and embeds its inputs; arguments as for `generate`.

    Args:
        prefix: cached tokens of the conversation's last turn; tokens shared with the new prompt are not prefilled again. The
            request takes over its cache.
        keep_prefix: whether `Generation.prefix` will be called; takes memory for the features of every token.
        num_logprobs, with_prompt: which log-probabilities rounds have; with those of the prompt.
    """
    clock = Clock(target.device)
    sampling = _with_options(sampling or Sampling(), options)
    policy = new_policy(policy) if isinstance(policy, str) else policy
    if draft is not None:
        check_draft(draft, target, pruning)
    elif policy.num_candidates:
        raise ValueError(f"draft: the policy {policy.name!r} needs one; load it with sage.load_draft(path, target)")
    inputs = _unpadded(inputs, target.family.pixel_keys)
    prompt_ids = inputs["input_ids"]
    tokenizer = target.processor.tokenizer if target.processor else None
    sampler = TargetSampler(sampling, prompt_ids[0].to(target.device), target.eos_token_ids, tokenizer)
    capacity = _capacity(target, prompt_ids, sampling.max_new_tokens, policy)
    if draft is not None and policy.needs_costs and policy.costs is None:
        length = prompt_ids.shape[1]
        policy.costs = known_costs(target, draft, length, length + sampling.max_new_tokens, policy.fresh_costs)
        clock.skip()
    prompt = target.embed(inputs, prefix.prompt if prefix else None)
    clock.lap("vision")
    session = new_session(draft, target, capacity) if draft is not None and policy.num_candidates else None
    passes = TreePasses(target, session.levels if session else ())
    cache, features = prefix.reuse(prompt, passes.capacity(capacity)) if prefix else (passes.new_cache(capacity), [])
    request = Request(
        target=target,
        session=session,
        policy=policy,
        verifier=Verifier(sampler),
        stop=StopCriterion(sampling, target.eos_token_ids, tokenizer),
        prompt=prompt,
        cache=cache,
        clock=clock,
        tree_passes=passes,
        pruning=pruning,
        features=features,
        keep_features=keep_prefix,
        num_logprobs=num_logprobs,
        prompt_logprobs=[] if with_prompt else None,
    )
    return Generation(target, request)


def _with_options(sampling: Sampling, options: Mapping[str, Any]) -> Sampling:
    known = [field.name for field in fields(Sampling)]
    if unknown := [name for name in options if name not in known]:
        raise ValueError(f"{unknown[0]}: unknown option; choose from policy, sampling, pruning, {', '.join(known)}")
    return replace(sampling, **options)


def _unpadded(inputs: Mapping[str, Any], pixel_keys: Collection[str]) -> Mapping[str, Any]:
    """Removes the padding tokens of a single prompt; ValueError if the attention mask leaves nothing."""
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


def generate(
    target: Target,
    draft: Draft | None,
    inputs: Any,
    policy: str | Policy = DEFAULT_POLICY,
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
    target: Target, draft: Draft | None, inputs: Any, policy: str | Policy = DEFAULT_POLICY, **options: Any
) -> Iterator[str]:
    """Yields the text as it is accepted; arguments as for `generate`."""
    for piece in pieces(start(target, draft, inputs, policy, **options)):
        yield piece.text


def pieces(generation: Generation, on_round: Callable[[Round], object] | None = None) -> Iterator[Piece]:
    """Yields the text of each round, split after its drafted tokens; holds back the bytes of an incomplete character. Raises
    ValueError for a target without a processor to decode with.

    Args:
        on_round: called with every round before its text is yielded.
    """
    if generation.target.processor is None:
        raise ValueError("stream: the target has no processor to decode text with; use generate and read its tokens")
    detokenizer = Detokenizer(generation.target.processor.tokenizer)
    for round_ in generation.rounds():
        if on_round is not None:
            on_round(round_)
        before = len(generation.tokens) - len(round_.tokens)
        for end, is_drafted in ((before + round_.num_drafted, True), (len(generation.tokens), False)):
            is_last = generation.request.stop.is_over and end == len(generation.tokens)
            if piece := detokenizer.next_piece(generation.tokens, end, is_last):
                yield Piece(piece, is_drafted)


def _capacity(target: Target, input_ids: Tensor, max_new_tokens: int, policy: Policy) -> int:
    """Returns the number of cache rows for prompt, answer and one tree; checks batch size and the target's context length."""
    batch, length = input_ids.shape
    if batch != 1:
        raise ValueError(f"inputs: batch size {batch}; decode one prompt per call")
    limit = int(target.text_config.max_position_embeddings)
    if length >= limit:
        raise ValueError(
            f"prompt: {length} tokens, and the target's context length is {limit}; shorten the prompt or shrink its images"
        )
    if length + max_new_tokens > limit:
        raise ValueError(
            f"max_new_tokens: {max_new_tokens} and a prompt of {length} tokens exceed the target's context length of {limit}; "
            f"set at most {limit - length}, or shorten the prompt or shrink its images"
        )
    return length + max_new_tokens + policy.tree_capacity


class Chat:
    """A conversation with a target; tokens of earlier turns are not prefilled again. Target, draft and options are those of
    `sage.generate`; the policy keeps its learned state over all turns.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        policy: str | Policy = DEFAULT_POLICY,
        system: str | None = None,
        **options: Any,
    ) -> None:
        self.target, self.draft, self.options = target, draft, options
        self.policy = new_policy(policy) if isinstance(policy, str) else policy
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self._prefix: CachedPrefix | None = None
        self._current: tuple[Generation, dict[str, Any]] | None = None  # the turn in progress and its message

    def ask(self, text: str, images: Sequence[Any] = (), videos: Sequence[Any] = ()) -> Output:
        """Answers a message; images and videos, as for `Target.prepare`, are placed before the text. Raises ValueError as
        `sage.generate` does, and TypeError for a text that is none or media that are not a list; the conversation is unchanged.
        """
        generation = self.start(text, images, videos)
        for _ in generation.rounds():
            pass
        return self.finish(generation)

    def start(self, text: str, images: Sequence[Any] = (), videos: Sequence[Any] = ()) -> Generation:
        """Starts a turn, for streaming; `finish` ends it. A turn without `finish` leaves the conversation unchanged."""
        if not isinstance(text, str):
            raise TypeError(f"text: {type(text).__name__}; give the question as a string")
        for name, items in (("images", images), ("videos", videos)):
            if not isinstance(items, (list, tuple)):
                raise TypeError(f"{name}: {type(items).__name__}; give a list, such as {name}=[...], also for a single one")
        media = [{"type": kind, kind: item} for kind, items in (("image", images), ("video", videos)) for item in items]
        message = {"role": "user", "content": [*media, {"type": "text", "text": text}]}
        inputs = self.target.prepare([*self.messages, message])
        prefix, self._prefix = self._prefix, None
        generation = start(self.target, self.draft, inputs, self.policy, prefix=prefix, keep_prefix=True, **self.options)
        self._current = generation, message
        return generation

    def finish(self, generation: Generation) -> Output:
        """Ends a turn: appends message and answer. Raises ValueError unless `generation` is the turn started last."""
        if self._current is None or self._current[0] is not generation:
            raise ValueError("chat: this is not the turn started last; call finish before the next start")
        output = generation.output()
        self._prefix = generation.prefix()
        self.messages += [self._current[1], {"role": "assistant", "content": [{"type": "text", "text": output.text}]}]
        self._current = None
        return output
