"""Measured costs kept on disk, so that a second request or process of a cost-aware policy starts at once.

A file is named by a digest of what the costs depend on, and lists it: machine, versions, source, pass mode, dtypes,
configurations of target and draft, and range of contexts. Contexts are rounded up to the buckets of captured passes, for every
pass mode, so that prompts of similar length share a measurement.

Shapes: S context tokens.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from sage.costs.measure import MIN_CONTEXT_SPAN, VERIFY_NODES, measure_costs
from sage.costs.tables import Costs
from sage.drafts.draft import Draft
from sage.drafts.registry import draft_kind
from sage.io.files import json_digest, read_json, user_cache_dir, write_json
from sage.io.machine import environment, processor_name
from sage.runtime.buckets import key_bucket
from sage.runtime.executor_choice import describe_passes
from sage.runtime.timing import preparation
from sage.targets import Target
from sage.targets.tree_passes import describe_target, family_modules

ROOM = max(VERIFY_NODES)


def costs_folder() -> Path:
    """Returns the folder of measured costs."""
    return user_cache_dir() / "costs"


def known_costs(target: Target, draft: Draft, context: int, longer: int, is_fresh: bool = False) -> Costs:
    """Returns the costs of passes on this machine: those on disk, or measured now and kept there.

    A file that is damaged is replaced. If the folder is not writable, a warning says so.

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
        costs = measure_costs(target, draft, *contexts)
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
        **environment(target.device, "sage.costs", *draft_kind(draft.kind).modules, *family_modules(target)),
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
