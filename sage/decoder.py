"""The loop: draft, verify, commit. Ref: SAGE, arXiv 2602.00523, Algorithm 1.

Shapes: N tree nodes, V vocabulary, T prompt tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sage.cache import TreeCache
from sage.drafts.pruning import KEEP_ALL, Pruning
from sage.drafts.session import DraftSession
from sage.host_tensors import Mailbox, few_longs
from sage.sampling import TargetSampler
from sage.stats import Clock, Stats
from sage.stopping_rules import StopCriterion
from sage.targets import Features, Prompt, Target
from sage.trees import Frontier, Policy, RoundOutcome, Tree, new_builder
from sage.verify import accept


@dataclass
class Round:
    """What one round emitted.

    Attributes:
        tokens: new token ids, cut at EOS and at the length limit.
        num_drafted: how many of them, from the first on, the draft had guessed.
    """

    tokens: list[int]
    num_drafted: int


@dataclass
class Request:
    """One request's state; several could be in flight beside each other.

    Attributes:
        target: the model that decides.
        session: the draft at work; None for a policy that never drafts.
        policy: shapes the trees.
        sampler: samples the target's tokens.
        stop: ends the answer; holds the emitted tokens.
        prompt: the embedded inputs, batch 1.
        cache: the target's, empty, large enough.
        pruning: which visual tokens the draft reads.
        read: features of everything the target has read, in order; those of an earlier turn to begin with.
        mailbox: takes tokens to the draft.
    """

    target: Target
    session: DraftSession | None
    policy: Policy
    sampler: TargetSampler
    stop: StopCriterion
    prompt: Prompt
    cache: TreeCache
    pruning: Pruning = KEEP_ALL
    read: list[Features] = field(default_factory=list)
    mailbox: Mailbox = field(default_factory=Mailbox)


def decode(request: Request, clock: Clock, stats: Stats) -> Iterator[Round]:
    """Yields the answer round by round; the prefill's token is the first round.

    Inference mode is entered for each round, never over a yield: it would last until somebody asks for more. A caller who has
    entered it spares every round the way in and out.
    """
    target, session, policy, cache = request.target, request.session, request.policy, request.cache
    sampler, stop = request.sampler, request.stop
    levels = session.levels if session else ()
    with _inference_mode():
        fresh = request.prompt.after(cache.length)
        wants_attention = session is not None and request.pruning.needs_attention and bool(fresh.visual_mask.any())
        features = target.prefill(fresh, cache, levels, wants_attention)
        request.read.append(features)
        first = sampler.first(target.lm_head(features.last[:, -1]))
        root = int(first)
        clock.lap("target_prefill")
        policy.reset()
        stats.prompt_tokens = request.prompt.input_ids.shape[1]
        logits = None
        if session:
            known = Features.join(request.read)
            logits = session.prefill(request.pruning(request.prompt, known), known, first)
            stats.draft_context = session.context
        clock.lap("draft_prefill")
    unread: list[tuple[Features, list[int]]] = []
    yield Round(_emit([root], request, stats), 0)

    while not stop.is_over:
        with _inference_mode():
            clock.start_round()
            policy.begin()
            clock.lap("policy")
            if session and unread and policy.should_draft():
                logits = catch_up(session, unread, request, stats)
            tree = draft_tree(root, None if unread else logits, request, clock, stats)
            start = cache.length
            position = request.prompt.next_position + (stats.new_tokens - 1)
            features = target.tree_pass(tree.tokens, position + tree.depths, tree.ancestors, cache, levels)
            target_logits = target.lm_head(features.last[0])
            clock.lap("verify", len(tree))

            choices = sampler(target_logits, tree).tolist()
            path, tokens = accept(tree, choices)
            emitted = _emit(tokens, request, stats)
            num_accepted = min(len(path) - 1, len(emitted))
            clock.lap("accept")

            cache.keep_path(start, path)
            if len(path) < len(tree):
                features = features.at(few_longs(tuple(path), tree.tokens.device))
            request.read.append(features)
            unread.append((features, tokens))
            root = tokens[-1]
            clock.lap("commit")
            figures = policy.observe(_outcome(tree, path, num_accepted, choices, start, request, clock))
            stats.note_round(tree.depth, len(tree) - 1, num_accepted, figures)
            clock.lap("policy")
        yield Round(emitted, num_accepted)


def _inference_mode() -> AbstractContextManager[Any]:
    return nullcontext() if torch.is_inference_mode_enabled() else torch.inference_mode()


def draft_tree(root: int, logits: Tensor | None, request: Request, clock: Clock, stats: Stats) -> Tree:
    """Grows one round's tree level by level as the policy asks, at most as deep as the answer may still get."""
    policy, session = request.policy, request.session
    last_level = request.stop.num_remaining - 1
    if logits is None or session is None or last_level == 0:
        return Tree.of_root(root, request.prompt.embeds.device)
    builder = new_builder(policy, root, logits.device, request.stop.eos, request.mailbox)
    for level in range(1, last_level + 1):
        probs, tokens = session.propose(logits, policy.num_candidates)
        clock.lap("draft_steps", len(probs))
        frontier = builder.open_level(probs, tokens)
        if policy.is_on_host:
            _refuse_nan(frontier, stats)
        next_level = policy.next_level(frontier)
        if next_level is None:
            break
        builder.add(next_level)
        if len(next_level.expand) == 0 or level == last_level:
            break
        rows, tokens = builder.advance(next_level)
        clock.lap("policy")
        logits = session.expand(rows, tokens)
        stats.draft_steps += 1
    if not policy.is_on_host:  # one wait: the last level inherits what an earlier one got wrong
        _refuse_nan(frontier, stats)
    tree = builder.tree(policy.select(builder))
    clock.lap("policy")
    return tree


def _refuse_nan(frontier: Frontier, stats: Stats) -> None:
    for row in frontier.rows:
        if row[0] != row[0]:  # NaN, and one makes the whole row so
            where = f"level {frontier.level} after {stats.new_tokens} new tokens"
            raise ValueError(f"draft: its pass over {where} gave NaN; check its weights and dtype")


def catch_up(session: DraftSession, unread: list[tuple[Features, list[int]]], request: Request, stats: Stats) -> Tensor:
    """Lets the draft read what was accepted since it was last asked; the distribution below the root, [1, V]."""
    features = Features.join([one for one, _ in unread])
    tokens = [token for _, several in unread for token in several]
    unread.clear()
    logits = session.commit(features, request.mailbox.put(tokens, features.last.device))
    stats.draft_steps += 1
    return logits


def _outcome(
    tree: Tree, path: list[int], accepted: int, choices: list[int], context: int, request: Request, clock: Clock
) -> RoundOutcome:
    if not request.policy.needs_feedback():
        return RoundOutcome(accepted, tree, path, context)
    return RoundOutcome(accepted, tree, path, context, request.sampler.labels(choices, tree), clock.round_times())


def _emit(tokens: list[int], request: Request, stats: Stats) -> list[int]:
    """The tokens that belong to the answer; counts them and makes them history."""
    emitted = request.stop.append(tokens)
    request.sampler.extend(emitted)
    stats.new_tokens += len(emitted)
    return emitted
