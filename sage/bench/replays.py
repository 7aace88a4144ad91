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
from sage.replay.recording import WIDE, Recording, record
from sage.replay.replay import ReplayResult, replay
from sage.sampling import Sampling
from sage.trees.base import Policy


def replays(
    target: Any, draft: Any, prompts: Sequence[BenchPrompt], sampling: Sampling, policies: Mapping[str, Policy]
) -> dict[str, Any]:
    """Returns the section `replay` of the report.

    Args:
        policies: new policies by label; those that do not draft are ignored.

    Returns:
        {"recorder": {...}, "rounds": int, "policies": {label: figures of `ReplayResult.summary`}}; {} if no policy
        drafts. `tokens_per_s` is predicted from timed passes, without the time of the policy itself.

    Raises:
        ValueError: no draft.
    """
    if draft is None:
        raise ValueError("replay: needs a draft; give one, or disable the replay")
    drafting = {label: policy for label, policy in policies.items() if policy.num_candidates}
    if not drafting:
        return {}
    count = max(policy.num_candidates for policy in drafting.values())
    recordings = [_record(target, draft, prompt, sampling, count) for prompt in prompts]
    costs = _costs(target, draft, recordings)
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


def _record(target: Any, draft: Any, prompt: BenchPrompt, sampling: Sampling, count: int) -> Recording:
    return record(target, draft, on_device(prompt.inputs, target.device), num_candidates=count, sampling=sampling)


def _costs(target: Any, draft: Any, recordings: Sequence[Recording]) -> Costs:
    context = round(sum(recording.prompt_tokens for recording in recordings) / len(recordings))
    return measure_costs(target, draft, context, context + max(recording.max_new_tokens for recording in recordings))
