"""The passes of a target and a draft in the target's pass mode. What is compiled or captured once is kept by the target."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from sage.drafts.head import DraftHead
from sage.drafts.loading import Draft
from sage.drafts.model import ModelDraft, ModelSession
from sage.drafts.registry import draft_kind
from sage.drafts.session import DraftSession
from sage.passes.capture import CapturedHead, CapturedSession, CapturedTreePasses
from sage.passes.sessions import FunctionSession, HeadPasses
from sage.passes.target_passes import FunctionTreePasses
from sage.runtime.pass_modes import PassMode
from sage.targets import Target
from sage.targets.tree_passes import EagerTreePasses, TreePasses

Passes = TypeVar("Passes")


def new_tree_passes(target: Target, levels: Sequence[int], mode: PassMode | None = None) -> TreePasses:
    """Returns the tree passes of a target.

    Args:
        levels: indices k of `hidden_states` to return as well.
        mode: eager, compiled or captured; None for the target's own.
    """
    mode = mode or target.passes
    if mode is PassMode.eager:
        return EagerTreePasses(target, levels)
    kind = CapturedTreePasses if mode is PassMode.captured else FunctionTreePasses
    passes: Any = _kept(target, (tuple(levels), target.dtype, kind), lambda: kind(target, levels))
    passes.refresh()
    return passes


def new_session(draft: Draft, target: Target, capacity: int) -> DraftSession:
    """Starts a draft session for one request of at most `capacity` tokens. That of a draft in training runs eagerly."""
    module = draft if isinstance(draft, DraftHead) else draft.model.model
    if target.passes is PassMode.eager or module.training:
        session: DraftSession = draft_kind(draft.kind).session_class()(draft, target, capacity)
        return session
    if isinstance(draft, ModelDraft):
        return ModelSession(draft, target, capacity, new_tree_passes(draft.model, (), target.passes))
    head: Any = draft
    if target.passes is PassMode.captured:
        calls = _kept(target, (draft, draft.dtype, CapturedHead), lambda: CapturedHead(head, target))
        return CapturedSession(head, target, capacity, calls)
    return FunctionSession(head, target, capacity, _kept(target, (draft, draft.dtype), lambda: HeadPasses(draft, target)))


def _kept(target: Target, key: Hashable, make: Callable[[], Passes]) -> Passes:
    if key not in target.functions:
        target.functions[key] = make()
    passes: Passes = target.functions[key]
    return passes
