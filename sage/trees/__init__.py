"""The policies that shape draft trees: one module per policy, loaded on first use, so that names need no torch.

Every module of this folder is the policy of its name and holds the policy's class (`name`, options and their defaults); nothing
else has to be registered.
"""

from __future__ import annotations

import json
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from sage.io.ranges import did_you_mean

if TYPE_CHECKING:
    from sage.planning.base import Policy
    from sage.trees import sage as sage

AUTOREGRESSIVE, CHAIN, COST_AWARE, SAGE = "autoregressive", "chain", "cost_aware", "sage"
DEFAULT_POLICY = COST_AWARE  # of Python, regeneration and sage-serve: of a process that may give many answers
FIRST_ANSWER_POLICY = CHAIN  # of sage-generate, which gives one answer per process (docs/decoder.md, Which policy)
POLICIES: tuple[str, ...] = tuple(module.name for module in iter_modules(__path__))


def __getattr__(name: str) -> Any:
    if name not in POLICIES:
        raise AttributeError(f"module 'sage.trees' has no attribute {name!r}")
    return import_module(f"sage.trees.{name}")


def check_name(name: str) -> None:
    """Raises ValueError for an unknown policy, with the known ones; imports none of them."""
    if name not in POLICIES:
        raise ValueError(f"policy: {name!r} is unknown{did_you_mean(name, POLICIES)}; choose one of {', '.join(POLICIES)}")


def with_options(spec: str) -> tuple[str, dict[str, Any]]:
    """Parses `POLICY[:option=value,...]`, with values as in JSON or as text; imports no policy.

    Raises:
        ValueError: an unknown policy, or an option without a value.
    """
    name, _, tail = spec.partition(":")
    check_name(name)
    options = {}
    for word in filter(None, map(str.strip, tail.split(","))):
        key, sign, value = word.partition("=")
        if not sign:
            raise ValueError(f"{word!r} has no value; write POLICY:option=value,option=value")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    return name, options


def policy_class(name: str) -> type[Policy]:
    """Returns the class of a policy, from the module of its name; ValueError for an unknown name lists the known ones."""
    check_name(name)
    members = vars(import_module(f"sage.trees.{name}")).values()
    [kind] = [member for member in members if isinstance(member, type) and vars(member).get("name") == name]
    return kind


def policy(name: str, **options: Any) -> Policy:
    """Returns a configured policy, given one of `POLICIES` and fields of its class. Raises ValueError for an unknown name or
    option, or a value that is not allowed.
    """
    from sage.planning.base import check_names

    kind = policy_class(name)
    check_names(kind, list(options))
    return kind(**options)


__all__ = ["POLICIES", "policy", "policy_class"]
