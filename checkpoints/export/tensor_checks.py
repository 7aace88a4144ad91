"""Checks of a draft's tensors: names, shapes, dtypes, values, and the maps between draft and target vocabulary.

Shapes: U draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from checkpoints.export.folder import PICKLED
from checkpoints.export.formats.base import CheckInput, Finding
from sage.io.dtypes import dtype_name

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
MAX_LISTED = 4  # tensors listed by name before "and N more"


def check_tensors(given: CheckInput) -> Iterator[Finding]:
    """Yields all findings about a draft's tensors; none if the config lacks the sizes to compare with."""
    if not given.specs:
        return
    yield from _missing(given)
    yield from _unexpected(given)
    yield from _shapes_and_dtypes(given)
    yield from _values(given)
    if given.weights.is_pickled:
        effect = "engines open it, but a pickle can run code: convert it to safetensors"
        yield Finding(PICKLED, "weights in a pickle", effect, is_warning=True)


def _missing(given: CheckInput) -> Iterator[Finding]:
    for name, spec in given.specs.items():
        if not spec.is_optional and name not in given.weights.infos:
            yield Finding(name, "missing", spec.effect_if_missing)


def _unexpected(given: CheckInput) -> Iterator[Finding]:
    extra = sorted(set(given.weights.infos) - set(given.specs))
    effect = given.format.effect_of_unexpected
    prefixed = [name for name in extra if name.removeprefix("model.") in given.specs]
    if prefixed:
        yield Finding(prefixed[0], f"{len(prefixed)} tensors have the prefix 'model.'", effect)
    others = [name for name in extra if name not in prefixed]
    for name in others[:MAX_LISTED]:
        yield Finding(name, "unexpected tensor", effect)
    if len(others) > MAX_LISTED:
        yield Finding(given.format.name, f"{len(others) - MAX_LISTED} more unexpected tensors", effect)


def _shapes_and_dtypes(given: CheckInput) -> Iterator[Finding]:
    kinds = {"int64": (torch.int64,), "bool": (torch.bool,), "float": FLOATS}
    for name, spec in given.specs.items():
        info = given.weights.infos.get(name)
        if info is None:
            continue
        if info.shape != spec.shape:
            found = f"shape {list(info.shape)}, expected {list(spec.shape)}"
            yield Finding(name, found, "the engine stops, or loads a slice of it")
        if info.dtype not in kinds[spec.kind]:
            yield Finding(name, f"dtype {dtype_name(info.dtype)}, expected {spec.kind}", "the engine casts it or stops")
    floats = {dtype_name(info.dtype) for info in given.weights.infos.values() if info.dtype in FLOATS}
    if len(floats) > 1:
        yield Finding("dtype", f"mixed: {', '.join(sorted(floats))}", "engines cast all tensors to one", is_warning=True)
    written = given.config.raw.get("dtype", given.config.raw.get("torch_dtype"))
    if len(floats) == 1 and written not in (None, *floats):
        yield Finding("dtype", f"{written!r} in config.json, {floats.pop()} in the file", "engines cast it", is_warning=True)


def _values(given: CheckInput) -> Iterator[Finding]:
    """Non-finite and all-zero tensors; a ZeRO-3 save without gathering, or weights that were never loaded, are all zero."""
    for name, spec in given.specs.items():
        info = given.weights.infos.get(name)
        if spec.kind != "float" or info is None or info.dtype not in FLOATS:
            continue
        tensor = given.weights[name]
        num_bad = int((~torch.isfinite(tensor)).sum())
        if num_bad:
            yield Finding(name, f"{num_bad} values are not finite", "all logits become NaN: acceptance 1.00 or an error")
        elif spec.is_zero and bool(tensor.any()):
            yield Finding(name, "not zero", "drafts trained here have no bias", is_warning=True)
        elif tensor.numel() and not spec.is_zero and not bool(tensor.any()):
            yield Finding(name, "all zero", "the weight was not saved (ZeRO-3 without gathering?): acceptance 1.00")


def vocabulary_maps(given: CheckInput) -> Iterator[Finding]:
    """Yields the findings about the values of d2t and t2d, if both have the expected shape."""
    if not given.specs:
        return
    infos = given.weights.infos
    has_shape = [name for name in ("d2t", "t2d") if name in infos and infos[name].shape == given.specs[name].shape]
    usable = {name: given.weights[name] for name in has_shape if infos[name].dtype}
    is_readable = "d2t" in usable and usable["d2t"].dtype == torch.int64
    if is_readable and (problem := check_vocabulary_maps(usable["d2t"], usable.get("t2d"), given.specs["t2d"].shape[0])):
        yield problem


def check_vocabulary_maps(d2t: Tensor, t2d: Tensor | None, vocab: int) -> Finding | None:
    """Checks that d2t holds unique offsets into the target vocabulary, and that t2d marks exactly the ids in d2t's range.

    Args:
        d2t: LongTensor [U], target id = draft id + d2t[draft id].
        t2d: BoolTensor [V].
    """
    ids = torch.arange(len(d2t)) + d2t
    is_mask = t2d is not None and t2d.dtype == torch.bool
    if problem := _check_d2t(d2t, ids, vocab, t2d if is_mask else None):
        return Finding("d2t", *problem)
    if t2d is not None and is_mask and not _agree(ids, t2d):
        found = f"marks {int(t2d.sum())} ids, d2t maps to {len(ids)}, {int(t2d[ids].sum())} of them marked"
        return Finding("t2d", found, "training and verification use other tokens than the draft vocabulary")
    return None


def with_vocabulary_maps(tensors: dict[str, Tensor], draft_vocab: int, vocab: int, folder: Path) -> dict[str, Tensor]:
    """Returns the tensors of a draft with d2t [U] and t2d [V]; where d2t is missing, draft ids are target ids.

    Raises:
        ValueError: the maps in `folder` are wrong.
    """
    d2t = tensors.get("d2t", torch.zeros(draft_vocab, dtype=torch.int64)).to(torch.int64)
    if problem := check_vocabulary_maps(d2t, tensors.get("t2d"), vocab):
        raise ValueError(f"{folder}: {problem.where}: {problem.found}; {problem.effect}")
    t2d = torch.zeros(vocab, dtype=torch.bool)
    t2d[torch.arange(len(d2t)) + d2t] = True
    return {**tensors, "d2t": d2t, "t2d": t2d}


def _check_d2t(d2t: Tensor, ids: Tensor, vocab: int, t2d: Tensor | None) -> tuple[str, str] | None:
    effect = "draft tokens are mapped to the wrong target tokens: acceptance 1.00, no error"
    is_absolute = len(d2t) > 1 and bool((d2t[1:] > d2t[:-1]).all()) and int(d2t[0]) >= 0 and int(d2t[-1]) < vocab
    if is_absolute and (int(ids[-1]) >= vocab or (t2d is not None and _agree(d2t, t2d))):
        return "holds absolute target ids, not offsets (target id = draft id + d2t[draft id])", effect
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        return f"maps to ids {int(ids.min())} to {int(ids.max())}, the vocabulary is 0 to {vocab - 1}", effect
    num_duplicates = len(ids) - len(ids.unique())
    if num_duplicates:
        return f"maps {num_duplicates} draft ids to target ids that are already taken", effect
    return None


def _agree(ids: Tensor, t2d: Tensor) -> bool:
    return int(t2d.sum()) == len(ids) and bool(t2d[ids].all())
