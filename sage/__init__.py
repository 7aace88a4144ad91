"""sage: lossless, entropy-adaptive tree speculation for vision-language models.

Names are imported on first access, so that `import sage` and `--help` are fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sage import trees
    from sage.chat import Chat
    from sage.drafts import Pruning, load_draft, new_draft
    from sage.generation import Output, generate, stream
    from sage.sampling import Sampling
    from sage.targets import Target, load_target
    from sage.trees import POLICIES, policy

_HOME = {
    "POLICIES": "sage.trees",
    "Chat": "sage.chat",
    "Output": "sage.generation",
    "Pruning": "sage.drafts",
    "Sampling": "sage.sampling",
    "Target": "sage.targets",
    "generate": "sage.generation",
    "load_draft": "sage.drafts",
    "load_target": "sage.targets",
    "new_draft": "sage.drafts",
    "policy": "sage.trees",
    "stream": "sage.generation",
}


def __getattr__(name: str) -> Any:
    if name == "trees":
        return import_module("sage.trees")
    if name not in _HOME:
        raise AttributeError(f"module 'sage' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


__all__ = [
    "POLICIES",
    "Chat",
    "Output",
    "Pruning",
    "Sampling",
    "Target",
    "generate",
    "load_draft",
    "load_target",
    "new_draft",
    "policy",
    "stream",
    "trees",
]
