"""sage: lossless, entropy-adaptive tree speculation for vision-language models.

Names are imported on first access, so that `import sage` and `--help` are fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sage import trees
    from sage.decoding.batch import BatchDecoder, generate_batch
    from sage.decoding.generation import Chat, Output, generate, stream
    from sage.decoding.settings import Sampling
    from sage.drafts.draft import load_draft, new_draft
    from sage.drafts.pruning import Pruning
    from sage.targets import Target, load_target
    from sage.tracing.trace import trace
    from sage.trees import POLICIES, policy

_NAMES = {
    "sage.decoding.batch": ["BatchDecoder", "generate_batch"],
    "sage.drafts.draft": ["load_draft", "new_draft"],
    "sage.drafts.pruning": ["Pruning"],
    "sage.decoding.generation": ["Chat", "Output", "generate", "stream"],
    "sage.decoding.settings": ["Sampling"],
    "sage.tracing.trace": ["trace"],
    "sage.targets": ["Target", "load_target"],
    "sage.trees": ["POLICIES", "policy"],
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [*_HOME, "trees"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'sage' has no attribute {name!r}")
    value = import_module("sage.trees") if name == "trees" else getattr(import_module(_HOME[name]), name)
    globals()[name] = value  # the next access does not come here
    return value
