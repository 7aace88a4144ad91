"""What is asked of a draft's tensors: the right names, shapes and dtypes, finite values, and maps that are maps."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from checkpoints.export.folder import PICKLED
from checkpoints.export.formats.layout import Flavour, Format
from checkpoints.export.validator.findings import Case, Finding
from sage.dtypes import dtype_name

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
NAMED = 4  # tensors listed by name before "and N more"


def check_tensors(case: Case) -> Iterator[Finding]:
    """All findings about a draft's tensors. Without sizes in the config there is no table to hold them against."""
    if case.table is None:
        return
    yield from _missing(case)
    yield from _unexpected(case)
    yield from _headers(case)
    yield from _values(case)
    if case.head.format != Format.eagle:
        yield from _maps(case)
    if case.weights.is_pickled:
        yield Finding(
            PICKLED,
            "weights in a pickle",
            "engines open it, and a pickle can run code: convert to safetensors",
            True,
        )


def _missing(case: Case) -> Iterator[Finding]:
    assert case.table is not None
    for name, expected in case.table.items():
        if not expected.is_optional and name not in case.infos:
            yield Finding(name, "missing", expected.missing)


def _unexpected(case: Case) -> Iterator[Finding]:
    assert case.table is not None
    extra = sorted(set(case.infos) - set(case.table))
    effect = "vLLM stops at an unknown name, SGLang skips it silently"
    if case.head.format == Format.eagle:
        effect = "the engine skips it silently: what was trained is not what is served"
    prefixed = [name for name in extra if name.removeprefix("model.") in case.table]
    if prefixed:
        yield Finding(prefixed[0], f"{len(prefixed)} tensors have the prefix 'model.'", effect)
    for name in [name for name in extra if name not in prefixed][:NAMED]:
        yield Finding(name, "unexpected tensor", effect)
    if len(extra) - len(prefixed) > NAMED:
        yield Finding(case.head.format or "", f"{len(extra) - len(prefixed) - NAMED} more unexpected tensors", effect)


def _headers(case: Case) -> Iterator[Finding]:
    assert case.table is not None
    kinds = {"int64": (torch.int64,), "bool": (torch.bool,), "float": FLOATS}
    for name, expected in case.table.items():
        info = case.infos.get(name)
        if info is None:
            continue
        if info.shape != expected.shape:
            found = f"shape {list(info.shape)}, expected {list(expected.shape)}"
            yield Finding(name, found, "the engine stops, or loads a slice of it")
        if info.dtype not in kinds[expected.kind]:
            yield Finding(name, f"dtype {_named(info.dtype)}, expected {expected.kind}", "the engine casts it or stops")
    floats = {_named(info.dtype) for info in case.infos.values() if info.dtype in FLOATS}
    if len(floats) > 1:
        yield Finding("dtype", f"mixed: {', '.join(sorted(floats))}", "engines cast all of it to one", is_warning=True)
    written = case.head.config.get("dtype", case.head.config.get("torch_dtype"))
    if len(floats) == 1 and written not in (None, *floats):
        yield Finding("dtype", f"{written!r} in config.json, {floats.pop()} in the file", "engines cast it", is_warning=True)


def _named(dtype: torch.dtype | None) -> str:
    return dtype_name(dtype)


def _values(case: Case) -> Iterator[Finding]:
    """Finite, and not all zero: a ZeRO-3 save without gathering, or weights that were never loaded, look like that."""
    assert case.table is not None
    for name, expected in case.table.items():
        info = case.infos.get(name)
        if expected.kind != "float" or info is None or info.dtype not in FLOATS:
            continue
        tensor = case.weights[name]
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            yield Finding(name, f"{bad} values are not finite", "every logit becomes NaN: acceptance 1.00 or an error")
        elif tensor.numel() and not bool(tensor.any()) and name != "fc.bias":
            yield Finding(name, "all zero", "nothing was saved here (ZeRO-3 without gathering?): acceptance 1.00")
        elif name == "fc.bias" and case.head.flavour == Flavour.sglang and bool(tensor.any()):
            yield Finding(name, "not zero", "drafts trained here have no bias", is_warning=True)


def _maps(case: Case) -> Iterator[Finding]:
    """d2t is an offset map, increasing and inside the vocabulary; t2d marks exactly the ids it reaches."""
    assert case.table is not None
    usable = {
        name: case.weights[name]
        for name in ("d2t", "t2d")
        if name in case.infos and case.infos[name].shape == case.table[name].shape and case.infos[name].dtype
    }
    if "d2t" not in usable or usable["d2t"].dtype != torch.int64:
        return
    if problem := find_bad_maps(usable["d2t"], usable.get("t2d"), case.table["t2d"].shape[0]):
        yield problem


def find_bad_maps(d2t: Tensor, t2d: Tensor | None, vocab: int) -> Finding | None:
    """What is wrong with a draft's vocabulary maps, if anything.

    Args:
        d2t: LongTensor [U], offsets.
        t2d: BoolTensor [V], or None where it was left out.
        vocab: V.
    """
    ids = torch.arange(len(d2t)) + d2t
    is_mask = t2d is not None and t2d.dtype == torch.bool
    if problem := _bad_map(d2t, ids, vocab, t2d if is_mask else None):
        return Finding("d2t", *problem)
    if t2d is not None and is_mask and not _agree(ids, t2d):
        found = f"marks {int(t2d.sum())} ids, d2t reaches {len(ids)}, {int(t2d[ids].sum())} of them marked"
        return Finding("t2d", found, "training and checking look at other words than the draft says")
    return None


def _bad_map(d2t: Tensor, ids: Tensor, vocab: int, t2d: Tensor | None) -> tuple[str, str] | None:
    wrong = "the draft's words turn into others: acceptance 1.00, no error"
    is_absolute = len(d2t) > 1 and bool((d2t[1:] > d2t[:-1]).all()) and int(d2t[0]) >= 0 and int(d2t[-1]) < vocab
    if is_absolute and (int(ids[-1]) >= vocab or (t2d is not None and _agree(d2t, t2d))):
        return "holds absolute target ids, not offsets (target id = draft id + d2t[draft id])", wrong
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        return f"reaches ids {int(ids.min())} to {int(ids.max())}, the vocabulary is 0 to {vocab - 1}", wrong
    if len(ids.unique()) < len(ids):
        return f"sends {len(ids) - len(ids.unique())} draft ids to words that others already mean", wrong
    return None


def _agree(ids: Tensor, t2d: Tensor) -> bool:
    return int(t2d.sum()) == len(ids) and bool(t2d[ids].all())
