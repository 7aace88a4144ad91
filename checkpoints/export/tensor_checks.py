"""Checks of a draft's tensors: names, shapes, dtypes, values, and the maps between draft and target vocabulary.

Shapes: U draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from checkpoints.export.folder import PICKLED
from checkpoints.export.formats.base import MAPS, CheckInput
from checkpoints.export.formats.records import Finding
from sage.io.dtypes import dtype_name

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INTEGERS = (torch.int64, torch.int32, torch.int16)
CANNOT_IMPORT = "cannot import this draft"
MAX_LISTED = 4  # tensors listed by name before "and N more"


def check_tensors(given: CheckInput) -> Iterator[Finding]:
    """Yields all findings about a draft's tensors and maps; none if the config lacks the sizes to compare with."""
    if not given.specs:
        return
    yield from _missing(given)
    yield from _unexpected(given)
    yield from _shapes_and_dtypes(given)
    yield from _values(given)
    if given.weights.is_pickled:
        effect = "engines open it, but a pickle can run code: convert it to safetensors"
        yield Finding(PICKLED, "weights in a pickle", effect, is_warning=True)
    if "d2t" in given.specs:
        yield from _vocabulary_maps(given)


def _missing(given: CheckInput) -> Iterator[Finding]:
    for name, spec in given.specs.items():
        if not spec.is_optional and name not in given.weights.infos:
            refusal = "" if name in given.format.borrowed else "the draft is incomplete"
            yield Finding(name, "missing", spec.effect_if_missing, refusal=refusal)


def _unexpected(given: CheckInput) -> Iterator[Finding]:
    extra = sorted(set(given.weights.infos) - set(given.specs) - set(given.format.borrowed))
    effect = given.format.effect_of_unexpected
    refusal = f"not part of our {given.format.row.imports or given.format.name} head, cannot import this draft"
    prefixed = [name for name in extra if name.removeprefix("model.") in given.specs]
    if prefixed:
        yield Finding(prefixed[0], f"{len(prefixed)} tensors have the prefix 'model.'", effect)
    others = [name for name in extra if name not in prefixed]
    for name in others[:MAX_LISTED]:
        yield Finding(name, "unexpected tensor", effect, refusal=refusal)
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
            refusal = "config.json gives other sizes, cannot import this draft"
            yield Finding(name, found, "the engine stops, or loads a slice of it", refusal=refusal)
        if info.dtype not in kinds[spec.kind]:
            is_number = spec.kind != "float" or (info.dtype is not None and info.dtype.is_floating_point)
            found = f"dtype {dtype_name(info.dtype)}, expected {spec.kind}"
            yield Finding(name, found, "the engine casts it or stops", refusal="" if is_number else CANNOT_IMPORT)
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
            effect = "all logits become NaN: acceptance 1.00 or an error"
            yield Finding(name, f"{num_bad} values are not finite", effect, refusal=CANNOT_IMPORT)
        elif spec.is_zero and bool(tensor.any()):
            yield Finding(name, "not zero", "drafts trained here have no bias", is_warning=True)
        elif tensor.numel() and not spec.is_zero and not bool(tensor.any()):
            yield Finding(name, "all zero", "the weight was not saved (ZeRO-3 without gathering?): acceptance 1.00")


def _vocabulary_maps(given: CheckInput) -> Iterator[Finding]:
    """Yields a finding unless d2t holds unique offsets into the target vocabulary and t2d marks exactly the ids in its range.

    Tensors of another shape or kind are findings of their own.
    """
    infos = given.weights.infos
    maps = {name: given.weights[name] for name in MAPS if name in infos and infos[name].shape == given.specs[name].shape}
    d2t, t2d = maps.get("d2t"), maps.get("t2d")
    if d2t is None or d2t.dtype not in INTEGERS:
        return
    is_mask = t2d is not None and t2d.dtype == torch.bool
    if problem := _check_maps(d2t.long(), t2d if is_mask else None, given.specs["t2d"].shape[0]):
        yield problem


def _check_maps(d2t: Tensor, t2d: Tensor | None, vocab: int) -> Finding | None:
    """Checks d2t, LongTensor [U], target id = draft id + d2t[draft id], and t2d, BoolTensor [V]."""
    ids = torch.arange(len(d2t)) + d2t
    if problem := _check_d2t(d2t, ids, vocab, t2d):
        return Finding("d2t", *problem, refusal=CANNOT_IMPORT)
    if t2d is not None and not _agree(ids, t2d):
        found = f"marks {int(t2d.sum())} ids, d2t maps to {len(ids)}, {int(t2d[ids].sum())} of them marked"
        effect = "training and verification use other tokens than the draft vocabulary"
        return Finding("t2d", found, effect, refusal=CANNOT_IMPORT)
    return None


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
