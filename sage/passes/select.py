"""The passes of a target and a draft in the target's pass mode. What is compiled or captured once is kept by the target."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from sage.drafts.head import DraftHead
from sage.drafts.loading import Draft
from sage.drafts.registry import draft_kind
from sage.drafts.session import DraftSession
from sage.pass_modes import PassMode
from sage.passes.capture import CapturedLevels, CapturedSession, CapturedTreePasses
from sage.passes.sessions import FunctionSession, HeadPasses
from sage.passes.target_passes import EagerTreePasses, FunctionTreePasses, TreePasses
from sage.targets import Target

Passes = TypeVar("Passes")


def new_tree_passes(target: Target, levels: Sequence[int]) -> TreePasses:
    """Returns the tree passes of a target.

    Args:
        levels: indices k of `hidden_states` to return as well.
    """
    if target.passes is PassMode.eager:
        return EagerTreePasses(target, levels)
    kind = CapturedTreePasses if target.passes is PassMode.captured else FunctionTreePasses
    passes: Any = _kept(target, (tuple(levels), target.dtype, kind), lambda: kind(target, levels))
    passes.refresh()
    return passes


def new_session(draft: Draft, target: Target, capacity: int) -> DraftSession:
    """Starts a draft session for one request of at most `capacity` tokens. Those of a smaller target and of a head in training
    run eagerly.
    """
    if target.passes is PassMode.eager or not isinstance(draft, DraftHead) or draft.training:
        session: DraftSession = draft_kind(draft.kind).session_class()(draft, target, capacity)
        return session
    head: Any = draft
    if target.passes is PassMode.captured:
        calls = _kept(target, (draft, draft.dtype, CapturedLevels), lambda: CapturedLevels(head, target))
        return CapturedSession(head, target, capacity, calls)
    return FunctionSession(head, target, capacity, _kept(target, (draft, draft.dtype), lambda: HeadPasses(draft, target)))


def _kept(target: Target, key: Hashable, make: Callable[[], Passes]) -> Passes:
    if key not in target.functions:
        target.functions[key] = make()
    passes: Passes = target.functions[key]
    return passes
