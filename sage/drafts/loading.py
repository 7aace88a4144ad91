"""Creates and loads drafts of every kind, and checks that a draft fits its target."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage.drafts.draft import Draft
from sage.drafts.location import find_draft
from sage.drafts.pruning import KEEP_ALL, Pruning
from sage.drafts.registry import KINDS, DraftKind, draft_kind, head_kind, importer
from sage.io.manifest import refuse_corrupt_draft
from sage.io.model_files import read_config
from sage.targets import Target, is_target_folder


def new_draft(
    target: Target, kind: str = "eagle", *, seed: int | None = None, vocabulary: Tensor | None = None, **config: Any
) -> Draft:
    """Creates a draft with fresh weights and the target's sizes.

    Args:
        kind: a name of `sage.drafts.registry.KINDS`.
        seed: seed of the weights; None draws from torch's global generator. With a target on the meta device the draft has no
            weights either.
        vocabulary: LongTensor [U], increasing target ids of the draft vocabulary, for kinds that have one; None = all.
        config: the kind's options (`DraftKind.keys`); for a head also any size of its configuration class.

    Returns:
        the draft, in the target's dtype and on its device.

    Raises:
        ValueError: unknown kind or config key, or sizes that do not fit the target.
    """
    row = draft_kind(kind)
    if vocabulary is not None and not row.has_vocabulary:
        raise ValueError(f"draft: {kind} has no vocabulary of its own; drop vocabulary, or choose a kind that has one")
    with torch.random.fork_rng(devices=[], enabled=seed is not None):  # weights are drawn on the CPU
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        with torch.device("meta") if target.is_meta else nullcontext():
            draft: Draft = row.draft_class().new(target, row, vocabulary, **config)
    return draft


def load_draft(path: str | Path, target: Target, dtype: torch.dtype | None = None) -> Draft:
    """Loads a draft for a target: a trained head, an export of one, or a smaller target of the same family.

    Args:
        path: a run (its best draft), a draft of a run, or the folder of any draft; see `find_draft`.
        dtype: dtype of a smaller target; None = the target's, the only one for a head, which reads the target's features.

    Raises:
        ValueError: no draft there, a corrupt one, a head in another dtype, or one for another target (names both).
    """
    draft = open_draft(path, target, dtype or target.dtype)
    if draft.reads_features and draft.dtype != target.dtype:
        raise ValueError(
            f"draft: {path}: in {draft.dtype}, but it reads the features of a target in {target.dtype}; leave dtype out"
        )
    return draft


def open_draft(path: str | Path, target: Target, dtype: torch.dtype) -> Draft:
    """`load_draft` in any dtype, with its other errors: training keeps a head in float32 beside a target in bfloat16."""
    folder = find_draft(path)
    if not target.is_meta:
        refuse_corrupt_draft(folder)
    kind = kind_of_folder(folder)
    if kind is None:
        exported: Draft = importer().load_export(folder, target)
        exported.network.to(dtype=dtype)
        return exported
    with torch.device("meta") if target.is_meta else nullcontext():
        draft: Draft = kind.draft_class().load(folder, target, dtype)
    return draft


def kind_of_folder(folder: Path) -> DraftKind | None:
    """Returns the kind of the draft in a folder, `model` for that of a target; None for an export or a third-party draft.

    Raises:
        ValueError: it is none of these.
    """
    stored = read_config(folder)
    if is_target_folder(folder):
        return next(kind for kind in KINDS.values() if kind.is_target)
    kind = head_kind(stored.get("model_type"))
    if kind is not None and stored.get("target"):
        return kind
    if not importer().is_export(folder):
        raise ValueError(
            f"draft: {folder}: model_type {stored.get('model_type')!r} is neither a draft of this package nor an EAGLE-3 draft"
        )
    return None


def check_draft(draft: Draft, target: Target, pruning: Pruning = KEEP_ALL) -> None:
    """Raises ValueError if the draft was made for another target, naming both, or cannot read a pruned prompt."""
    draft.check(target)
    if pruning.ratio and draft.compressor_kind is not None:
        raise ValueError(
            f"pruning.ratio: {pruning.ratio}; allowed: 0 for a draft with a compressor ({draft.compressor_kind}), which was "
            f"trained on unpruned images; drop it"
        )
