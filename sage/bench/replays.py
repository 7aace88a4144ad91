"""Replays of a measurement's prompts under every policy, on the same drafts.

Every prompt is decoded and recorded once more, untimed; replaying runs no model (see sage.replay).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sage
from sage.bench.measurement import BenchPrompt
from sage.bench.runners import AUTOREGRESSIVE, on_device
from sage.costs.measure import measure_costs
from sage.costs.tables import Costs
from sage.decoding.settings import Sampling
from sage.planning.base import Policy
from sage.replay.recording import WIDE, Recording, record
from sage.replay.replay import ReplayResult, replay


def replays(
    target: Any, draft: Any, prompts: Sequence[BenchPrompt], sampling: Sampling, policies: Mapping[str, Policy]
) -> dict[str, Any]:
    """Returns the section `replay` of the report; {} if no policy drafts.

    Args:
        policies: new policies by label; those that do not draft are ignored. Without `draft`, ValueError.

    Returns:
        {"recorder": {...}, "rounds": int, "policies": {label: figures of `ReplayResult.summary`}}; `tokens_per_s` is
        predicted from timed passes, without the time of the policy itself.
    """
    if draft is None:
        raise ValueError("replay: needs a draft; give one, or disable the replay")
    drafting = {label: policy for label, policy in policies.items() if policy.num_candidates}
    if not drafting:
        return {}
    count = max(policy.num_candidates for policy in drafting.values())
    moved = (on_device(prompt.inputs, target.device) for prompt in prompts)
    recordings = [record(target, draft, inputs, num_candidates=count, sampling=sampling) for inputs in moved]
    context = round(sum(recording.prompt_tokens for recording in recordings) / len(recordings))
    costs = measure_costs(target, draft, context, context + sampling.max_new_tokens)
    return {
        "recorder": {"policy": "eagle2", **WIDE},
        "rounds": sum(len(recording.rounds) for recording in recordings),
        "policies": {label: _replayed(recordings, policy, costs).summary() for label, policy in drafting.items()},
    }


def _replayed(recordings: Sequence[Recording], policy: Policy, costs: Costs) -> ReplayResult:
    """Replays a policy; one that learns sees the recordings once before, as in a measurement with warm-up and repeats."""
    if policy.needs_costs:
        replay(recordings, policy, costs)
    return replay(recordings, policy, costs)


def all_policies(options: Mapping[str, Mapping[str, Any]], leave_out: Sequence[str] = ()) -> dict[str, Policy]:
    """Returns every policy that drafts, with the given options or its defaults."""
    names = [name for name in sage.POLICIES if name != AUTOREGRESSIVE and name not in leave_out]
    return {name: sage.policy(name, **options.get(name, {})) for name in names}
