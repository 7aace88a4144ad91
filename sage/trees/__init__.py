"""Draft trees and the policies that shape them: one module per policy."""

from __future__ import annotations

import inspect
from typing import Any

from sage.trees import sage as sage
from sage.trees.autoregressive import Autoregressive
from sage.trees.base import Policy
from sage.trees.builder import TreeBuilder, new_builder
from sage.trees.chain import Chain
from sage.trees.cost_aware.policy import CostAware
from sage.trees.ddd import Ddd
from sage.trees.eagle2 import Eagle2
from sage.trees.sage import Sage
from sage.trees.spec_llava import SpecLlava
from sage.trees.static import Static
from sage.trees.talon import Talon
from sage.trees.tree import Columns, Drafted, Frontier, Growth, HostGrowth, Outcome, Tree

_KINDS: tuple[type[Policy], ...] = (Autoregressive, Chain, Static, Eagle2, SpecLlava, Talon, Ddd, Sage, CostAware)
_POLICIES: dict[str, type[Policy]] = {kind.name: kind for kind in _KINDS}
POLICIES: tuple[str, ...] = tuple(_POLICIES)


def policy(name: str, **options: Any) -> Policy:
    """A configured policy, by its public name.

    Raises:
        ValueError: an unknown name or option; says which there are.
    """
    if name not in _POLICIES:
        raise ValueError(f"policy: {name!r} is unknown; choose one of {', '.join(POLICIES)}")
    kind = _POLICIES[name]
    known = () if kind.__init__ is object.__init__ else tuple(inspect.signature(kind).parameters)
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ValueError(f"policy.{name}: unknown option {unknown[0]!r}; choose from {', '.join(known) or 'none'}")
    return kind(**options)


__all__ = [
    "POLICIES",
    "Columns",
    "Drafted",
    "Frontier",
    "Growth",
    "HostGrowth",
    "Outcome",
    "Policy",
    "Tree",
    "TreeBuilder",
    "new_builder",
    "policy",
]
