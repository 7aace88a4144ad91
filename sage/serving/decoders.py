"""What the server decodes with: a `BatchDecoder`, and a policy that keeps what it has learned from one request to the next.

Before the first request, the memory of the caches is checked and a few tokens are decoded.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers.utils import logging

import sage
from sage.commands.cli import load_options
from sage.costs.store import known_costs
from sage.decoding.batch import BatchDecoder
from sage.decoding.settings import Sampling
from sage.drafts.draft import Draft, new_session
from sage.io.machine import free_bytes
from sage.planning.base import Policy
from sage.runtime.pass_modes import MANY_ANSWERS, resolve_pass_mode
from sage.serving.settings import DEFAULT_CONTEXT, ServerLimits
from sage.targets import Target
from sage.targets.tree_passes import TreePasses
from sage.trees import AUTOREGRESSIVE
from sage.trees import policy as new_policy

SHORTEST = 64  # tokens; costs of passes are measured from here on
WARM_UP_TOKENS = 8
GB = 1e9


@dataclass(frozen=True)
class Plan:
    """What is to be decoded, once it has been loaded and tried.

    Attributes:
        new_decoder: creates the decoder, at the start and after a fault of the decoder itself.
        policy: its copies decode all requests, and share what they learn.
        max_context: tokens of a prompt and its answer.
        end_token_ids: ids that end an answer.
    """

    new_decoder: Callable[[], BatchDecoder]
    policy: Policy
    max_context: int
    end_token_ids: tuple[int, ...]


def load_plan(args: argparse.Namespace, path: str, folder: Path | None, limits: ServerLimits) -> Plan:
    """Loads target and draft as the options say; raises ValueError as `plan_decoding` does, or if they cannot be loaded."""
    logging.disable_progress_bar()
    target = sage.load_target(path, passes=args.passes, **load_options(args, cpu_dtype="float32"))
    target.passes = resolve_pass_mode(args.passes, target.device.type, MANY_ANSWERS, target.is_whole)
    draft = sage.load_draft(folder, target) if folder is not None else None
    return plan_decoding(target, draft, args.policy, limits)


def plan_decoding(target: Target, draft: Draft | None, policy: str, limits: ServerLimits) -> Plan:
    """Checks the memory and decodes a few tokens, so that no request waits for what is done once.

    Raises:
        ValueError: the caches do not fit, the context is longer than the target's, or the target cannot chat.
    """
    longest = int(target.text_config.max_position_embeddings)
    max_context = limits.max_context or min(DEFAULT_CONTEXT, longest)
    if max_context > longest:
        raise ValueError(f"--max-context: {max_context}, and the target's context length is {longest}; give at most that")
    drafting = draft if policy != AUTOREGRESSIVE else None
    shared = new_policy(policy)
    if drafting is not None and shared.needs_costs:
        shared.costs = known_costs(target, drafting, min(SHORTEST, max_context), max_context)
    needed = cache_bytes(target, drafting, max_context, shared.tree_capacity)
    check_caches(needed, free_bytes(target.device), limits.max_requests, max_context)
    new_decoder = partial(BatchDecoder, target, drafting, limits.max_requests, limits.prefill_tokens)
    plan = Plan(new_decoder, shared, max_context, tuple(target.eos_token_ids))
    _warm_up(plan, target, min(limits.max_requests, 2))
    return plan


@torch.inference_mode()
def cache_bytes(target: Target, draft: Draft | None, max_context: int, tree_capacity: int) -> int:
    """Returns the memory of the caches of a request of `max_context` tokens, given the nodes of the largest tree."""
    session = None if draft is None else new_session(draft, target, 1)
    rows = TreePasses(target, session.levels if session else ()).capacity(max_context + tree_capacity)
    needed = rows * sum(buffer.nbytes for buffer in target.new_cache(1).buffers)
    if session is not None:
        cache = session.cache  # type: ignore[attr-defined]
        needed += rows * sum(buffer.nbytes for buffer in cache.buffers) // cache.capacity
    return needed


def check_caches(per_request: int, free: int | None, max_requests: int, max_context: int) -> None:
    """Raises ValueError if the caches of all requests do not fit into the free bytes; None: unknown."""
    needed = per_request * max_requests
    if free is None or needed <= free:
        return
    fits = free // per_request
    remedy = f"give at most --max-requests {fits}, or" if fits else "give"
    raise ValueError(
        f"--max-requests {max_requests}: caches for {max_context} tokens each take {needed / GB:.2f} GB, and "
        f"{free / GB:.2f} GB are free; {remedy} a lower --max-context"
    )


def _warm_up(plan: Plan, target: Target, count: int) -> None:
    """Decodes `count` requests: passes of one request and of several."""
    inputs, decoder = target.prepare([{"role": "user", "content": "Hello"}]), plan.new_decoder()
    sampling = Sampling(max_new_tokens=min(WARM_UP_TOKENS, plan.max_context - inputs["input_ids"].shape[1]))
    requests = [decoder.add(inputs, plan.policy, sampling=sampling) for _ in range(count)]
    while not all(request.is_over for request in requests):
        decoder.step()
    for request in requests:
        decoder.remove(request)
        if request.error is not None:
            raise request.error
