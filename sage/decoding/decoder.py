"""The decoding loop: plan a tree, verify it, commit the accepted path. Ref: SAGE, arXiv 2602.00523, Algorithm 1.

Shapes: N tree nodes, U draft vocabulary, V vocabulary, T prompt tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sage.decoding.answer import Stats, StopCriterion
from sage.decoding.verify import Logprobs, Verifier, log_probabilities
from sage.drafts.draft import DraftSession, check_probabilities
from sage.drafts.pruning import KEEP_ALL, Pruning
from sage.planning.base import Policy
from sage.planning.tree import Columns, NextLevel, RoundOutcome, Tree, TreeBuilder
from sage.runtime.cache import TreeCache
from sage.runtime.host_tensors import Tokens, cached_index, join_tokens
from sage.runtime.packing import Pass, run_passes
from sage.runtime.timing import Clock, shared_time
from sage.targets import Features, Prompt, Target
from sage.targets.family import Family
from sage.targets.tree_passes import TreeOutput, TreePasses, read_prompt

TURN_TOKENS = 16  # at the end of a chat's prompt, which a next turn may change: the delimiters of an answer, empty thoughts
NUM_LOGITS = 64  # of the prompt's tokens, whose logits are computed together
MAX_UNREAD = 256  # rounds whose features are kept while a policy does not draft


@dataclass
class Round:
    """Tokens emitted by one round, truncated at the answer's end; the draft had proposed the first `num_drafted` of them.

    Attributes:
        tree: the verified tree, the root first; None for the prefill.
        path: indices of the nodes that the target chose, the root first.
        logprobs: of each token, of the prompt as well if that is wanted, as of `log_probabilities`.
    """

    tokens: list[int]
    num_drafted: int
    tree: Columns | None = None
    path: Sequence[int] = ()
    logprobs: Sequence[Logprobs] = ()


@dataclass
class Request:
    """State of one request. Requests are independent of each other and can be interleaved.

    Attributes:
        session: the draft session; None for a policy that never drafts.
        verifier: samples and accepts tokens.
        stop: ends the answer; holds the emitted tokens.
        prompt: the embedded inputs, batch size 1; without embeddings after the prefill, unless `keep_features`.
        cache: the target's; may hold a prefix of the prompt.
        tree_passes: of the target.
        pruning: the visual tokens that the draft reads.
        features: of the cached prefix; emptied by the prefill, unless `keep_features`.
        keep_features: whether `features` collects those of all cached tokens, and `prompt` its embeddings, for a later turn.
        root: last emitted token, the root of the next tree.
        draft_logits: [1, U], the draft's logits below the root; None until it has read the root.
        unread: features and tokens of the rounds that the draft has not read yet.
        unread_prompt: the prompt as the draft reads it, its features and the first token, if the draft has not read it yet.
        num_logprobs: most likely tokens whose log-probabilities are returned besides that of each token; None: neither.
        prompt_logprobs: those of the tokens that have been read, without the first one; None if they are not wanted.
        error: what ended the request early.
    """

    target: Target
    session: DraftSession | None
    policy: Policy
    verifier: Verifier
    stop: StopCriterion
    prompt: Prompt
    cache: TreeCache
    clock: Clock
    tree_passes: TreePasses
    stats: Stats = field(default_factory=Stats)
    pruning: Pruning = KEEP_ALL
    features: list[Features] = field(default_factory=list)
    keep_features: bool = False
    root: int = -1
    draft_logits: Tensor | None = None
    unread: list[tuple[Features, Tokens]] = field(default_factory=list)
    unread_prompt: tuple[Prompt, Features, Tensor] | None = None
    num_logprobs: int | None = None
    prompt_logprobs: list[Logprobs] | None = None
    error: Exception | None = None

    @property
    def levels(self) -> tuple[int, ...]:
        """Indices of the target's hidden states that the draft reads."""
        return self.session.levels if self.session else ()


def decode(request: Request) -> Iterator[Round]:
    """Yields the answer round by round; the first round is the prefill's token.

    Inference mode is entered in every round instead of once, because it would stay active in the caller's code during a yield.
    """
    with _inference_mode():
        emitted = prefill(request)
    yield emitted
    while not request.stop.is_over:
        with _inference_mode():
            (emitted,) = run_round([request])
        yield emitted


def prefill(request: Request) -> Round:
    """Runs target and draft over the part of the prompt that is not cached."""
    target, session, clock = request.target, request.session, request.clock
    if request.keep_features and target.linear is not None:
        read_chunk(request, max(request.prompt.input_ids.shape[1] - request.cache.length - TURN_TOKENS, 0))
        request.cache.mark()
    suffix = request.prompt.after(request.cache.length)
    needs_attention = session is not None and request.pruning.needs_attention and bool(suffix.visual_mask.any())
    features = read_prompt(target, suffix, request.cache, request.levels, needs_attention)
    request.features.append(features)
    _note_prompt(request)
    logits = target.prompt_logits(features.last[:, -1])
    first = request.verifier.sampler.first(logits)
    request.root = int(first)
    request.verifier.sampler.refuse_nan([request.root])
    clock.lap("target_prefill")
    request.policy.reset(request.verifier.sampler.is_coupled)
    request.stats.prompt_tokens = request.prompt.input_ids.shape[1]
    if session:
        known = Features.join(request.features)
        request.unread_prompt = request.pruning(request.prompt, known), known, first
        if request.policy.should_draft():
            _prefill_draft(request, session, *request.unread_prompt)
    if not request.keep_features:
        request.features.clear()
        request.prompt = request.prompt.without_embeddings()
    clock.lap("draft_prefill")
    logprobs = [*(request.prompt_logprobs or ()), *log_probabilities(logits, [0], [request.root], request.num_logprobs)]
    return Round(_emit(request, [request.root]), 0, logprobs=logprobs)


def read_chunk(request: Request, num_tokens: int) -> bool:
    """Runs the target over the next `num_tokens` tokens of the prompt, if more than these are left; returns whether it has.

    A prompt is read at once if the draft's pruning needs the attention of all its tokens, or if tokens attend to later ones.
    """
    family = request.target.family
    left = request.prompt.input_ids.shape[1] - request.cache.length
    if left <= num_tokens or request.pruning.needs_attention or type(family).visible is not Family.visible:
        return False
    chunk = torch.arange(request.cache.length, request.cache.length + num_tokens, device=request.prompt.input_ids.device)
    request.features.append(read_prompt(request.target, request.prompt.at(chunk), request.cache, request.levels))
    _note_prompt(request)
    request.clock.lap("target_prefill")
    return True


def _note_prompt(request: Request) -> None:
    """Keeps the log-probabilities of the tokens that follow those read last, if they are wanted; few logits at a time."""
    if request.prompt_logprobs is not None:
        read, end = request.features[-1].last[0], request.cache.length + 1
        after = request.prompt.input_ids[0, end - len(read) : end].tolist()
        for start in range(0, len(after), NUM_LOGITS):
            logits, tokens = request.target.prompt_logits(read[start : start + NUM_LOGITS]), after[start : start + NUM_LOGITS]
            request.prompt_logprobs += log_probabilities(logits, range(len(tokens)), tokens, request.num_logprobs)


def _prefill_draft(request: Request, session: DraftSession, prompt: Prompt, features: Features, first: Tensor) -> None:
    """Runs the draft over the prompt and the first token of the answer."""
    request.draft_logits = session.prefill(prompt, features, first)
    request.stats.draft_context = session.context
    request.unread_prompt = None


def run_round(requests: Sequence[Request]) -> list[Round]:
    """Runs one round of every request: plan, verify, commit. All share one pass of the target, one pass of the draft over
    accepted tokens, and one per level.

    A request that fails keeps its `error`, and its round has no tokens; the others go on. One that decodes alone raises it.
    """
    drafts = _each(requests, _begin)
    synchronize_drafts(requests, drafts)
    builders = grow(requests, drafts)
    trees = _each(requests, selected_tree, builders)
    outputs = _run_passes(requests, _each(requests, _verify_pass, trees))
    rounds = _each(requests, _accept, trees, outputs)
    return [Round([], 0) if round_ is None else round_ for round_ in rounds]


def _begin(request: Request) -> bool:
    """Starts a round; returns whether the policy asks for a tree."""
    request.clock.start_round()
    request.policy.begin()
    request.clock.lap("policy")
    return request.session is not None and request.policy.should_draft()


def synchronize_drafts(requests: Sequence[Request], drafts: Sequence[bool]) -> None:
    """Lets the drafts of requests read the accepted tokens, where the policy drafts or they have become many."""
    for request, logits in zip(requests, _run_passes(requests, _each(requests, _unread_pass, drafts)), strict=True):
        if logits is not None:
            request.draft_logits = logits
            request.stats.draft_steps += 1


def _unread_pass(request: Request, drafts: bool) -> Pass | Tensor | None:
    """Returns the pass by which the draft reads the accepted tokens."""
    session = request.session
    if session is None or not (drafts or len(request.unread) >= MAX_UNREAD):
        return None
    if request.unread_prompt is not None:
        _prefill_draft(request, session, *request.unread_prompt)
        request.clock.lap("draft_prefill")
    if not request.unread:
        return None
    features = Features.join([features for features, _ in request.unread])
    tokens = join_tokens([tokens for _, tokens in request.unread])
    request.unread.clear()
    return session.commit_pass(features, tokens)


@dataclass
class Growth:
    """The tree of a request while it grows, at most to the depth that the answer can still use and the draft can reach.

    Attributes:
        chosen: the policy's choice of the last level; None for none.
    """

    request: Request
    session: DraftSession
    builder: TreeBuilder
    last_level: int
    chosen: NextLevel | None = None

    def next_pass(self) -> Pass | None:
        """Adds levels as long as the draft knows their logits, and returns the pass by which it expands the next one."""
        while self.chosen is not None and self.chosen.expand and self.builder.depth < self.last_level:
            rows, tokens = self.builder.advance(self.chosen)
            self.request.clock.lap("policy")
            self.request.stats.draft_steps += 1
            needed = self.session.expand_pass(rows, tokens)
            if isinstance(needed, Pass):
                return needed
            self.add_level(needed)
        return None

    def add_level(self, logits: Tensor) -> None:
        """Adds the policy's choice below the frontier, for which the draft gave `logits` [F, U]."""
        request, builder, session = self.request, self.builder, self.session
        policy, level, sampler = request.policy, builder.depth + 1, request.verifier.sampler
        candidates = session.propose(sampler.coupled(logits, level, session.token_map), policy.num_candidates_at(level))
        request.clock.lap("draft_steps", len(logits) if level > 1 else 0)
        frontier = builder.open_level(*candidates)
        check_probabilities(frontier.rows, level, request.stats.new_tokens)
        self.chosen = policy.next_level(frontier)
        if self.chosen is not None:
            builder.add(self.chosen)


def grow(requests: Sequence[Request], drafts: Sequence[bool]) -> list[TreeBuilder | None]:
    """Grows the trees of one round, with the passes of all requests together; returns them, None where nothing is drafted."""
    growths = _each(requests, _first_level, drafts)
    growing = [growth for growth in growths if growth is not None]
    if growing and _is_alone(requests):
        while (needed := growing[0].next_pass()) is not None:
            growing[0].add_level(*run_passes([needed]))
        return [growing[0].builder]
    while growing:
        passes = _each([growth.request for growth in growing], lambda _, growth: growth.next_pass(), growing)
        growing = [growth for growth, needed in zip(growing, passes, strict=True) if needed is not None]
        still_growing = [growth.request for growth in growing]
        logits = _run_passes(still_growing, [needed for needed in passes if needed is not None])
        _each(still_growing, lambda _, growth, scores: growth.add_level(scores), growing, logits)
    return [growth and growth.builder for growth in growths]


def _first_level(request: Request, drafts: bool) -> Growth | None:
    """Starts a tree with the level below the root, for which the draft has given the logits already."""
    session, logits, last_level = request.session, request.draft_logits, request.stop.num_remaining - 1
    if session is not None and session.max_depth is not None:
        last_level = min(last_level, session.max_depth)
    if not drafts or logits is None or session is None or last_level == 0:
        return None
    growth = Growth(request, session, TreeBuilder(request.root, logits.device, request.stop.eos), last_level)
    growth.add_level(logits)
    return growth


def selected_tree(request: Request, builder: TreeBuilder | None) -> Tree:
    """Returns the tree to verify: the nodes of the drafted one that the policy selects, or the root alone."""
    if builder is None:
        return Tree.of_root(request.root, request.prompt.embeds.device)
    tree = builder.tree(request.policy.select())
    request.clock.lap("policy")
    return tree


def _verify_pass(request: Request, tree: Tree) -> Pass:
    """Returns the target's pass over the tree."""
    position = request.prompt.next_position + (request.stats.new_tokens - 1)
    return request.tree_passes.over(tree.tokens, position + tree.depths, tree.ancestors, request.cache)


def _accept(request: Request, tree: Tree, output: TreeOutput) -> Round:
    """Follows the target's choices through the tree, emits them, keeps their cache rows and features, and reports the round to
    the policy.
    """
    request.clock.lap("verify", len(tree))
    verdict = request.verifier.verify(output.logits, tree, request.policy.needs_feedback(), output.greedy)
    path, tokens, features = verdict.path, verdict.tokens, output.features
    emitted = _emit(request, tokens)
    num_accepted = min(len(path) - 1, len(emitted))
    request.clock.lap("accept")
    context = request.cache.length - len(tree)
    request.cache.keep_path(context, path)
    if len(path) < len(tree):
        features = features.at(cached_index(tuple(path), tree.tokens.device))
    if request.keep_features:
        request.features.append(features)
    if request.session:
        request.unread.append((features, verdict.draft_tokens))
    request.root, request.draft_logits = tokens[-1], None
    request.clock.lap("commit")
    outcome = RoundOutcome(num_accepted, tree, path, context)
    if request.policy.needs_feedback():
        outcome.labels, outcome.times = verdict.labels, request.clock.round_times()
    figures = request.policy.observe(outcome)
    request.stats.add_round(tree.depth, len(tree) - 1, num_accepted, figures)
    request.clock.lap("policy")
    logprobs = log_probabilities(output.logits, path, emitted, request.num_logprobs)
    return Round(emitted, num_accepted, tree.columns, path, logprobs)


def _emit(request: Request, tokens: list[int]) -> list[int]:
    """Appends tokens to the answer and to the sampler's history; returns those before the end of the answer."""
    emitted = request.stop.append(tokens)
    request.verifier.sampler.extend(emitted)
    request.stats.new_tokens += len(emitted)
    return emitted


def _each(requests: Sequence[Request], step: Callable[..., Any], *columns: Sequence[Any]) -> list[Any]:
    """Runs a step of every request, with its entry of each column."""
    if _is_alone(requests):
        return [step(requests[0], *[column[0] for column in columns])]
    return [attempt(request, step, *values) for request, *values in zip(requests, *columns, strict=True)]


def attempt(request: Request, step: Callable[..., Any], *values: Any) -> Any:
    """Runs a step of one request on its clock; returns None if it fails, and keeps the error."""
    if request.error is not None:
        return None
    try:
        with request.clock.running():
            return step(request, *values)
    except Exception as error:
        request.error = error
        return None


def _run_passes(requests: Sequence[Request], passes: Sequence[Any]) -> list[Any]:
    """Runs the passes that requests need, None for none; their clocks share the time."""
    if _is_alone(requests):
        return run_passes(passes)
    indices = [i for i, each in enumerate(passes) if each is not None]
    results: list[Any] = [None] * len(passes)
    if not indices:
        return results
    with shared_time([requests[i].clock for i in indices]):
        for i, result in zip(indices, run_passes([passes[i] for i in indices]), strict=True):
            results[i] = result
    return results


def _is_alone(requests: Sequence[Request]) -> bool:
    """Whether a request decodes alone: it needs no time of its own, and its error ends no other. A round then leaves out what
    several need, which is a tenth of a small target's round.
    """
    return len(requests) == 1 and not requests[0].clock.is_shared


def _inference_mode() -> AbstractContextManager[Any]:
    return nullcontext() if torch.is_inference_mode_enabled() else torch.inference_mode()
