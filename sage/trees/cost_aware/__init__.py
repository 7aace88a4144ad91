"""The cost-aware policy: options and control flow in `policy`, one round in `planner`, statistics in `learner`, prices in
`pricing`."""

from sage.trees.cost_aware.policy import CostAware

__all__ = ["CostAware"]
