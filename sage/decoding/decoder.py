"""The decoding loop: plan a tree, verify it, commit the accepted path. Ref: SAGE, arXiv 2602.00523, Algorithm 1.

Shapes: N tree nodes, U draft vocabulary, V vocabulary, T prompt tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sage.decoding.answer import Stats, StopCriterion
from sage.decoding.verify import Verdict, Verifier
from sage.drafts.pruning import KEEP_ALL, Pruning
from sage.drafts.session import DraftSession, check_probabilities
from sage.planning.base import Policy
from sage.planning.tree import Columns, NextLevel, RoundOutcome, Tree, TreeBuilder
from sage.runtime.cache import TreeCache
from sage.runtime.host_tensors import Tokens, cached_index, join_tokens
from sage.runtime.joint import Steps, alone
from sage.runtime.timing import Clock
from sage.targets import Features, Prompt, Target
from sage.targets.family import Family
from sage.targets.prompt_pass import read_prompt
from sage.targets.tree_passes import TreePasses

MAX_UNREAD = 256  # rounds whose features are kept while a policy does not draft


@dataclass
class Round:
    """Tokens emitted by one round, truncated at the answer's end; the draft had proposed the first `num_drafted` of them.

    Attributes:
        tree: the verified tree, the root first; None for the prefill.
        path: indices of the nodes that the target chose, the root first.
    """

    tokens: list[int]
    num_drafted: int
    tree: Columns | None = None
    path: Sequence[int] = ()


@dataclass
class Request:
    """State of one request. Requests are independent of each other and can be interleaved.

    Attributes:
        session: the draft session; None for a policy that never drafts.
        verifier: samples and accepts tokens.
        stop: ends the answer; holds the emitted tokens.
        prompt: the embedded inputs, batch size 1; without embeddings after the prefill, unless `keep_features`.
        cache: the target's; may hold a prefix of the prompt.
        passes: the target's tree passes.
        pruning: the visual tokens that the draft reads.
        features: of the cached prefix; emptied by the prefill, unless `keep_features`.
        keep_features: whether `features` collects those of all cached tokens, and `prompt` its embeddings, for a later turn.
        root: last emitted token, the root of the next tree.
        draft_logits: [1, U], the draft's logits below the root; None until it has read the root.
        unread: features and tokens of the rounds that the draft has not read yet.
        unread_prompt: the prompt as the draft reads it, its features and the first token, if the draft has not read it yet.
    """

    target: Target
    session: DraftSession | None
    policy: Policy
    verifier: Verifier
    stop: StopCriterion
    prompt: Prompt
    cache: TreeCache
    clock: Clock
    passes: TreePasses
    stats: Stats = field(default_factory=Stats)
    pruning: Pruning = KEEP_ALL
    features: list[Features] = field(default_factory=list)
    keep_features: bool = False
    root: int = -1
    draft_logits: Tensor | None = None
    unread: list[tuple[Features, Tokens]] = field(default_factory=list)
    unread_prompt: tuple[Prompt, Features, Tensor] | None = None

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
            emitted = alone(round_steps(request))
        yield emitted


def round_steps(request: Request) -> Steps[Round]:
    """Runs one round; asks for its passes, which several requests can share (`sage.runtime.joint`)."""
    builder = yield from draft_steps(request)
    done = yield from verify_steps(request, builder, None if builder is None else request.policy.select())
    return done


def draft_steps(request: Request) -> Steps[TreeBuilder | None]:
    """Runs the part of a round before the policy selects the nodes to verify; returns the tree that was drafted, if any."""
    request.clock.start_round()
    builder = yield from plan(request)
    return builder


def verify_steps(request: Request, builder: TreeBuilder | None, keep: Sequence[int] | None) -> Steps[Round]:
    """Runs the rest of a round; `keep` as returned by `Policy.select`."""
    tree = selected_tree(request, builder, keep)
    verdict, features = yield from verify(request, tree)
    return commit(request, tree, verdict, features)


def read_chunk(request: Request, num_tokens: int) -> bool:
    """Runs the target over the next `num_tokens` tokens of the prompt, if more than these are left; returns whether it has.

    A prompt is read at once if the draft's pruning needs the attention of all its tokens, or if tokens attend to later ones.
    """
    family = request.target.family
    left = request.prompt.input_ids.shape[1] - request.cache.length
    if left <= num_tokens or request.pruning.needs_attention or type(family).visible is not Family.visible:
        return False
    part = torch.arange(request.cache.length, request.cache.length + num_tokens, device=request.prompt.input_ids.device)
    request.features.append(read_prompt(request.target, request.prompt.at(part), request.cache, request.levels))
    request.clock.lap("target_prefill")
    return True


def prefill(request: Request) -> Round:
    """Runs target and draft over the part of the prompt that is not cached."""
    target, session, clock = request.target, request.session, request.clock
    suffix = request.prompt.after(request.cache.length)
    needs_attention = session is not None and request.pruning.needs_attention and bool(suffix.visual_mask.any())
    features = read_prompt(target, suffix, request.cache, request.levels, needs_attention)
    request.features.append(features)
    first = request.verifier.sampler.first(target.lm_head(features.last[:, -1]))
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
    return Round(_emit(request, [request.root]), 0)


def _prefill_draft(request: Request, session: DraftSession, prompt: Prompt, features: Features, first: Tensor) -> None:
    """Runs the draft over the prompt and the first token of the answer."""
    request.draft_logits = session.prefill(prompt, features, first)
    request.stats.draft_context = session.context
    request.unread_prompt = None


def plan(request: Request) -> Steps[TreeBuilder | None]:
    """Synchronizes the draft with the accepted tokens and drafts one tree, as far as the policy asks for it."""
    request.policy.begin()
    request.clock.lap("policy")
    session, drafts = request.session, request.policy.should_draft()
    if session is None or not (drafts or len(request.unread) >= MAX_UNREAD):
        return None
    if request.unread_prompt is not None:
        _prefill_draft(request, session, *request.unread_prompt)
        request.clock.lap("draft_prefill")
    if request.unread:
        features = Features.join([features for features, _ in request.unread])
        tokens = join_tokens([tokens for _, tokens in request.unread])
        request.unread.clear()
        request.draft_logits = yield from session.commit_steps(features, tokens)
        request.stats.draft_steps += 1
    if not drafts:
        return None
    builder = yield from grow(request)
    return builder


def selected_tree(request: Request, builder: TreeBuilder | None, keep: Sequence[int] | None) -> Tree:
    """Returns the tree to verify: the nodes `keep` of the drafted one, or the root alone."""
    if builder is None:
        return Tree.of_root(request.root, request.prompt.embeds.device)
    tree = builder.tree(keep)
    request.clock.lap("policy")
    return tree


def grow(request: Request) -> Steps[TreeBuilder | None]:
    """Grows one round's tree level by level, at most to the depth that the answer can still use and the draft can reach; None
    if nothing is drafted.
    """
    session, clock, logits = request.session, request.clock, request.draft_logits
    last_level = request.stop.num_remaining - 1
    if session is not None and session.max_depth is not None:
        last_level = min(last_level, session.max_depth)
    if logits is None or session is None or last_level == 0:
        return None
    builder = TreeBuilder(request.root, logits.device, request.stop.eos)
    chosen = _add_level(request, session, builder, logits)
    while chosen is not None and len(chosen.expand) and builder.depth < last_level:
        rows, tokens = builder.advance(chosen)
        clock.lap("policy")
        logits = yield from session.expand_steps(rows, tokens)
        request.stats.draft_steps += 1
        chosen = _add_level(request, session, builder, logits)
    return builder


def _add_level(request: Request, session: DraftSession, builder: TreeBuilder, logits: Tensor) -> NextLevel | None:
    """Adds the policy's choice below the frontier, for which the draft gave `logits` [F, U], and returns it; None for none."""
    policy, level, sampler = request.policy, builder.depth + 1, request.verifier.sampler
    candidates = session.propose(sampler.coupled(logits, level, session.token_map), policy.num_candidates_at(level))
    request.clock.lap("draft_steps", len(logits) if level > 1 else 0)
    frontier = builder.open_level(*candidates)
    check_probabilities(frontier.rows, level, request.stats.new_tokens)
    chosen = policy.next_level(frontier)
    if chosen is not None:
        builder.add(chosen)
    return chosen


def verify(request: Request, tree: Tree) -> Steps[tuple[Verdict, Features]]:
    """Runs the target over the tree; returns the accepted path and the features of all nodes [1, N, D]."""
    position = request.prompt.next_position + (request.stats.new_tokens - 1)
    output = yield from request.passes.steps(tree.tokens, position + tree.depths, tree.ancestors, request.cache)
    request.clock.lap("verify", len(tree))
    needs_labels = request.policy.needs_feedback()
    return request.verifier.verify(output.logits, tree, needs_labels, output.greedy), output.features


def commit(request: Request, tree: Tree, verdict: Verdict, features: Features) -> Round:
    """Emits the accepted tokens, keeps their cache rows and features, and reports the round to the policy."""
    path, tokens = verdict.path, verdict.tokens
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
    return Round(emitted, num_accepted, tree.columns, path)


def _emit(request: Request, tokens: list[int]) -> list[int]:
    """Appends tokens to the answer and to the sampler's history; returns those before the end of the answer."""
    emitted = request.stop.append(tokens)
    request.verifier.sampler.extend(emitted)
    request.stats.new_tokens += len(emitted)
    return emitted


def _inference_mode() -> AbstractContextManager[Any]:
    return nullcontext() if torch.is_inference_mode_enabled() else torch.inference_mode()
