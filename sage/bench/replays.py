"""What each policy would have achieved on the same drafts: the prompts of a measurement recorded once, then replayed.

Recording decodes every prompt once more, untimed; replaying runs no model. See sage.replay.recording and sage.replay.replay.
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
from sage.trees import Policy


def replays(
    target: Any, draft: Any, prompts: Sequence[BenchPrompt], sampling: Sampling, policies: Mapping[str, Policy]
) -> dict[str, Any]:
    """The section `replay` of the report.

    Args:
        policies: fresh ones by label; those that do not draft are left out.

    Returns:
        {"recorder": {...}, "rounds": int, "policies": {label: figures of `ReplayResult.summary`}}; {} where nothing is
        left to replay. `tokens_per_s` is predicted from passes timed here, which leave out a policy's own time.

    Raises:
        ValueError: no draft.
    """
    if draft is None:
        raise ValueError("replay: without a draft there is nothing to replay; give one, or leave the replay out")
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
    """A policy that learns sees the drafts once before it counts, as the measurement's warm-up and repeats allow it to."""
    if policy.needs_costs:
        replay(recordings, policy, costs)
    return replay(recordings, policy, costs)


def all_policies(options: Mapping[str, Mapping[str, Any]], leave_out: Sequence[str] = ()) -> dict[str, Policy]:
    """Every policy that drafts, with the options given for it, else its defaults."""
    names = [name for name in sage.POLICIES if name != AUTOREGRESSIVE and name not in leave_out]
    return {name: sage.policy(name, **options.get(name, {})) for name in names}


def _record(target: Any, draft: Any, prompt: BenchPrompt, sampling: Sampling, count: int) -> Recording:
    return record(target, draft, on_device(prompt.inputs, target.device), candidates=count, sampling=sampling)


def _costs(target: Any, draft: Any, recordings: Sequence[Recording]) -> Costs:
    context = round(sum(recording.prompt_tokens for recording in recordings) / len(recordings))
    return measure_costs(target, draft, context, context + max(recording.max_new_tokens for recording in recordings))
