"""Draft heads and smaller draft models: creation, loading, and sessions that draft for one request.

Names are loaded on first use, so that `sage.drafts.registry` can be read without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sage.drafts.eagle import EagleConfig, EagleDraft
    from sage.drafts.eagle3 import Eagle3Config, Eagle3Draft
    from sage.drafts.head import DraftHead
    from sage.drafts.loading import Draft, check_draft, load_draft, new_draft, new_session, open_draft
    from sage.drafts.model import ModelDraft, ModelSession, shallow_model
    from sage.drafts.pruning import KEEP_ALL, PruneMethod, Pruning
    from sage.drafts.session import DraftSession, EagleSession

_HOME = {
    "KEEP_ALL": "pruning",
    "Draft": "loading",
    "DraftHead": "head",
    "DraftSession": "session",
    "Eagle3Config": "eagle3",
    "Eagle3Draft": "eagle3",
    "EagleConfig": "eagle",
    "EagleDraft": "eagle",
    "EagleSession": "session",
    "ModelDraft": "model",
    "ModelSession": "model",
    "PruneMethod": "pruning",
    "Pruning": "pruning",
    "check_draft": "loading",
    "load_draft": "loading",
    "new_draft": "loading",
    "new_session": "loading",
    "open_draft": "loading",
    "shallow_model": "model",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'sage.drafts' has no attribute {name!r}")
    return getattr(import_module(f"sage.drafts.{_HOME[name]}"), name)


__all__ = [
    "KEEP_ALL",
    "Draft",
    "DraftHead",
    "DraftSession",
    "Eagle3Config",
    "Eagle3Draft",
    "EagleConfig",
    "EagleDraft",
    "EagleSession",
    "ModelDraft",
    "ModelSession",
    "PruneMethod",
    "Pruning",
    "check_draft",
    "load_draft",
    "new_draft",
    "new_session",
    "open_draft",
    "shallow_model",
]
