"""Costs of target passes and draft levels on this machine: measured in a few seconds, and kept on disk.

A file of costs is named by a digest of what they depend on, and lists it: machine, versions, source, pass mode, dtypes,
configurations of target and draft, and range of contexts. Contexts are rounded up to the buckets of captured passes, for every
pass mode, so that prompts of similar length share a measurement.

Shapes: N verified nodes (the root included), W nodes of one draft level, S context tokens, V vocabulary, U draft vocabulary.
"""

from __future__ import annotations

import json
import statistics
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage.costs.tables import Costs, Curve
from sage.drafts.draft import Draft, DraftSession, new_session
from sage.io.files import json_digest, read_json, user_cache_dir, write_json
from sage.io.machine import environment, processor_name
from sage.runtime.cache import TreeCache
from sage.runtime.executors import describe_passes
from sage.runtime.host_tensors import Tokens
from sage.runtime.pass_function import key_bucket, node_bucket
from sage.runtime.timing import TimedCall, interleaved_s, now_s, preparation
from sage.targets import Features, Target
from sage.targets.tree_passes import TreePasses, describe_target

VERIFY_NODES = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64)  # numbers of rows at which kernels change, and some between
ROOM = max(VERIFY_NODES)
DRAFT_WIDTHS = (1, 2, 4, 8, 16)
LONGER_NODES = 16
NUM_CANDIDATES = 10
COMMITTED = 3  # accepted tokens of a usual round
DRAFTED_LEVELS = 4  # of a usual round
REPEATS = 16
MIN_REPEATS = 4
BUDGET_S = 4.0  # of timing, beyond which there are fewer than `REPEATS` runs
MIN_CONTEXT_SPAN = 1024  # tokens between the two contexts
MIN_SHARE = 0.75  # of a timing in which this thread runs; below it, other programs took part of the time


@torch.inference_mode()
def measure_costs(target: Target, draft: Draft, context: int, longer: int) -> tuple[Costs, bool]:
    """Times target passes and draft levels on a synthetic context, in the order of a round; takes medians. Also returns whether
    other programs took part of the time.

    Args:
        context: S of the cost tables.
        longer: a second S, for the slope over the context. If it is less than `MIN_CONTEXT_SPAN` tokens above `context`, that
            distance is used, as far as the target's limit allows: over fewer tokens the difference is noise.
    """
    limit = int(target.text_config.max_position_embeddings) - ROOM
    longer = max(longer, min(context + MIN_CONTEXT_SPAN, limit))
    session = new_session(draft, target, context + ROOM)
    passes = TreePasses(target, session.levels)
    cache = empty_cache(passes, longer + ROOM)
    commit, level = draft_commit(session, target, context), draft_level(session, target, 1, context)
    drafting = [_after(verify_pass(passes, target, cache, LONGER_NODES, context), then=commit)]
    drafting += [_after(level, then=draft_level(session, target, width, context)) for width in DRAFT_WIDTHS]
    (commit_s, *levels), drafting_share = _median_s(drafting, target.device)
    is_stepped = passes.executor.has_buckets
    counts = list(dict.fromkeys(map(node_bucket, VERIFY_NODES))) if is_stepped else list(VERIFY_NODES)
    sizes = [*((nodes, context) for nodes in counts), (1, longer), (LONGER_NODES, longer)]
    calls = [verify_pass(passes, target, cache, nodes, tokens) for nodes, tokens in sizes]
    rounds = [_after(call, commit, *[level] * DRAFTED_LEVELS, then=call) for call in calls]
    (*at_context, one_s, several_s), share = _median_s(rounds, target.device)
    tokens = max(longer - context, 1)
    per_token = max(one_s - at_context[0], 0.0) / tokens
    growth = max(several_s - at_context[counts.index(LONGER_NODES)], 0.0) / tokens
    costs = Costs(
        verify=Curve(counts, at_context, is_stepped=is_stepped),
        draft=Curve(list(DRAFT_WIDTHS), levels, is_stepped=is_stepped),
        context=context,
        verify_per_token=min(per_token, growth),
        verify_per_pair=max(growth - per_token, 0.0) / (LONGER_NODES - 1),
        commit_s=commit_s,
        has_key_buckets=is_stepped and not passes.is_split,
    )
    return costs, target.device.type == "cpu" and min(drafting_share, share) < MIN_SHARE


def empty_cache(passes: TreePasses, capacity: int) -> TreeCache:
    """A cache of zeros: uninitialized memory may hold denormal numbers, which are slow on a CPU."""
    cache = passes.new_cache(capacity)
    cache.zero_to(capacity)
    return cache


def verify_pass(passes: TreePasses, target: Target, cache: TreeCache, num_nodes: int, context: int) -> TimedCall:
    """Returns a call that verifies a chain of N distinct tokens on top of S tokens and returns the logits [N, V].

    The tree's shape is irrelevant: masks and rows cost the same for every tree of N nodes.
    """
    depths = torch.arange(num_nodes, device=target.device)
    tokens, positions = depths % target.vocab_size, depths + context
    ancestors = torch.ones(num_nodes, num_nodes, dtype=torch.bool, device=target.device).tril()

    def run() -> Tensor:
        return passes(tokens, positions, ancestors, cache).logits

    return TimedCall(run, reset=partial(cache.assume, context))


def draft_level(session: DraftSession, target: Target, width: int, context: int) -> TimedCall:
    """Returns a call that drafts a level of W distinct tokens below as many parents, on top of S tokens, and returns the
    probabilities [W, K] of the best candidates.
    """
    rows = torch.arange(width, device=target.device)
    nodes = rows % target.vocab_size
    tokens: Tokens = nodes.tolist() if nodes.is_cpu else nodes  # as in the decoder

    def run() -> Tensor:
        return session.propose(session.expand(rows, tokens), NUM_CANDIDATES)[0]

    return TimedCall(run, reset=partial(session.set_synthetic_state, context, width))


def draft_commit(session: DraftSession, target: Target, context: int) -> TimedCall:
    """Returns a call that reads `COMMITTED` accepted tokens on top of S tokens and returns the probabilities [1, K] of the best
    candidates below them.
    """
    tokens = (torch.arange(COMMITTED) % target.vocab_size).tolist()
    zeros = torch.zeros(1, COMMITTED, target.hidden_size, dtype=target.dtype, device=target.device)
    features = Features(zeros, (zeros,) * len(session.levels))

    def run() -> Tensor:
        return session.propose(session.commit(features, tokens), NUM_CANDIDATES)[0]

    return TimedCall(run, reset=partial(session.set_synthetic_state, context, 1))


def _after(*calls: TimedCall, then: TimedCall) -> TimedCall:
    """Returns a call that runs after others, outside the clock, as in a round: its time depends on what they leave in the
    processor's caches. Where weights fit into them, target passes take up to a tenth longer after the draft's.
    """

    def reset() -> None:
        for call in calls:
            call.reset()
            call.run()
        then.reset()

    return TimedCall(then.run, reset)


def _median_s(calls: Sequence[TimedCall], device: torch.device) -> tuple[list[float], float]:
    """Returns the median of each call's seconds over `REPEATS` runs, or over as many as fit into `BUDGET_S`, and the share of
    the time in which this thread ran.
    """
    interleaved_s(calls, 0, device)  # compiles and captures
    start, running_s = now_s(device), time.thread_time()
    times = interleaved_s(calls, 1, device)
    repeats = int(BUDGET_S / (now_s(device) - start) * 2)
    more = interleaved_s(calls, min(max(repeats, MIN_REPEATS), REPEATS) - 1, device)
    share = (time.thread_time() - running_s) / (now_s(device) - start)
    return [statistics.median(first + others) for first, others in zip(times, more, strict=True)], share


def costs_folder() -> Path:
    """Returns the folder of measured costs."""
    return user_cache_dir() / "costs"


def known_costs(target: Target, draft: Draft, context: int, longer: int, is_fresh: bool = False) -> Costs:
    """Returns the costs of passes on this machine: those on disk, or measured now and kept there.

    A file that is damaged is replaced. Costs that other programs disturbed are not kept, as they would mislead every later
    process. If the folder is not writable, a warning says so.

    Args:
        context, longer: the least and the most S of the request.
        is_fresh: measure in any case.
    """
    contexts = rounded_contexts(context, longer, int(target.text_config.max_position_embeddings) - ROOM)
    facts = json.loads(json.dumps(_facts(target, draft, contexts), default=str))
    path = costs_folder() / f"{json_digest(facts)}.json"
    if not is_fresh and (known := _read(path)):
        return known
    with preparation():
        costs, is_disturbed = measure_costs(target, draft, *contexts)
    if is_disturbed:
        return costs
    try:
        write_json(path, {"costs": costs.state(), "depends_on": facts})
    except OSError as error:
        warnings.warn(f"costs: {path.parent}: {error.strerror}; measured costs of passes are not kept", stacklevel=4)
    return costs


def rounded_contexts(context: int, longer: int, limit: int) -> tuple[int, int]:
    """Returns the two contexts to measure at: S such that S and the largest tree fill a bucket of keys, at most `limit`."""
    first = min(_fill(context), limit)
    return first, min(_fill(max(longer, first + MIN_CONTEXT_SPAN)), limit)


def _fill(context: int) -> int:
    return key_bucket(context + ROOM + 1) - ROOM - 1  # one row is for padding


def _facts(target: Target, draft: Draft, contexts: tuple[int, int]) -> dict[str, Any]:
    return {
        "machine": processor_name(target.device),
        **environment(target.device, "sage.costs"),
        "layers_per_device": [target.layer_devices.count(device) for device in dict.fromkeys(target.layer_devices)],
        "passes": describe_passes(target),
        "contexts": contexts,
        "target": {**describe_target(target), "dtype": target.dtype},
        "draft": draft.describe(),
    }


def _read(path: Path) -> Costs | None:
    """Returns the costs in a file; None if there are none or it is damaged."""
    try:
        return Costs.from_state(read_json(path)["costs"])
    except (ValueError, TypeError, KeyError):
        return None
