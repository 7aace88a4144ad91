"""Your own tree policy: drafts while the draft is confident. Compares it with `chain` and checks that it is lossless.

python examples/custom_policy.py [DRAFT_FOLDER]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

import sage
from data_prep.pocket import world
from sage.io.ranges import PositiveInt, Range
from sage.planning.base import Policy
from sage.planning.tree import Frontier, NextLevel


@dataclass(eq=False, kw_only=True)
class Confident(Policy):
    """A chain that ends where the draft's probability falls below a threshold.

    Args:
        depth: maximum number of drafted tokens per round.
        threshold: minimum probability of a token for drafting below it.
    """

    name = "confident"
    num_candidates = 1

    depth: PositiveInt = 8
    threshold: Annotated[float, Range(ge=0, le=1)] = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tree_capacity = self.depth + 1

    def next_level(self, frontier: Frontier) -> NextLevel:
        is_last = frontier.level == self.depth or frontier.rows[0][0] < self.threshold
        return NextLevel([0], [] if is_last else [0])


def main(draft_folder: str | None = None) -> None:
    target = sage.load_target("pocket_qwen2_5_vl")
    draft = sage.load_draft(draft_folder, target) if draft_folder else sage.new_draft(target, "model", num_layers=4)
    inputs = target.prepare(world.sample("test", 0, ["caption"]).messages[:-1])
    expected = sage.generate(target, None, inputs, policy="autoregressive", max_new_tokens=64)
    for policy in (sage.policy("chain"), Confident(), Confident(threshold=0.8)):
        out = sage.generate(target, draft, inputs, policy=policy, max_new_tokens=64)
        assert out.tokens.tolist() == expected.tokens.tolist(), "the output is the target's for every policy"
        stats = out.stats
        print(f"{policy.name}: {stats.tokens_per_target_pass:.2f} tokens per target pass, {stats.draft_steps} draft levels")


if __name__ == "__main__":
    main(*sys.argv[1:2])
