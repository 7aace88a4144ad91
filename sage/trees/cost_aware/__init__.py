"""The cost-aware policy: options and planning of a round in `policy`, what it learns in `learner`."""

from sage.trees.cost_aware.policy import CostAware

__all__ = ["CostAware"]
