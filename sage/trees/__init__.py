"""Draft trees and the policies that shape them: one module per policy.

Names are loaded on first use, so that `sage.trees.names` comes without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sage.trees.names import POLICIES

if TYPE_CHECKING:
    from sage.trees import sage as sage
    from sage.trees.base import Policy, RoundPlan
    from sage.trees.level import TreeBuilder, new_builder
    from sage.trees.tree import Columns, DraftedTree, Frontier, NextLevel, RoundOutcome, Tree

_HOME = {
    "Columns": "tree",
    "DraftedTree": "tree",
    "Frontier": "tree",
    "NextLevel": "tree",
    "Policy": "base",
    "RoundOutcome": "tree",
    "RoundPlan": "base",
    "Tree": "tree",
    "TreeBuilder": "level",
    "new_builder": "level",
}


def __getattr__(name: str) -> Any:
    if name in POLICIES:
        return import_module(f"sage.trees.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'sage.trees' has no attribute {name!r}")
    return getattr(import_module(f"sage.trees.{_HOME[name]}"), name)


def policy_class(name: str) -> type[Policy]:
    """Returns the class of a policy, from the module of its name.

    Raises:
        ValueError: an unknown name; lists the known ones.
    """
    if name not in POLICIES:
        raise ValueError(f"policy: {name!r} is unknown; choose one of {', '.join(POLICIES)}")
    members = vars(import_module(f"sage.trees.{name}")).values()
    [kind] = [member for member in members if isinstance(member, type) and vars(member).get("name") == name]
    return kind


def policy(name: str, **options: Any) -> Policy:
    """Returns a configured policy.

    Args:
        name: one of `POLICIES`.
        options: fields of the policy's class.

    Raises:
        ValueError: an unknown name or option, or a value that is not allowed.
    """
    from sage.trees.options import check_names

    kind = policy_class(name)
    check_names(kind, list(options))
    return kind(**options)


__all__ = [
    "POLICIES",
    "Columns",
    "DraftedTree",
    "Frontier",
    "NextLevel",
    "Policy",
    "RoundOutcome",
    "RoundPlan",
    "Tree",
    "TreeBuilder",
    "new_builder",
    "policy",
    "policy_class",
]
