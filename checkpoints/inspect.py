"""What a folder is, for a person: run, saved state, draft, export, foreign draft or target, and whether it is whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoints.description import UNKNOWN, Description
from checkpoints.export.expressible import COMPRESSOR, told_compressor
from checkpoints.export.facts import read_json
from checkpoints.export.folder import CONFIG, Weights
from checkpoints.export.formats.layout import Head
from checkpoints.export.source import find_source
from checkpoints.export.validator.validator import check_folder
from checkpoints.export.writing import ABOUT, find_damage, settle
from checkpoints.run_folder import (
    BEST_DRAFT,
    DRAFT,
    PROVENANCE,
    STATE,
    STEP_NAME,
    is_run,
    list_steps,
    run_of,
    state_folder,
    step_name,
)
from checkpoints.store import verify_state
from sage.drafts.registry import head_kind
from sage.dtypes import dtype_name
from sage.manifest import MANIFEST, CorruptFolder, has_manifest
from sage.targets import is_target_folder


def describe(folder: Path) -> Description:
    """Looks at a folder without changing it (a replacement that a crash interrupted is settled first).

    Raises:
        ValueError: no such folder.
    """
    settle(folder)
    if not folder.is_dir():
        raise ValueError(f"--inspect {folder}: {'a file; give its folder' if folder.exists() else 'no such folder'}")
    kind, look = _kind(folder)
    found = Description(folder, kind)
    try:
        look(found)
    except ValueError as error:
        found.problems.append(str(error))
    return found


def _kind(folder: Path) -> tuple[str, Look]:
    return next(((kind, look) for kind, is_kind, look in KINDS_OF_FOLDERS if is_kind(folder)), (UNKNOWN, _unknown))


def _unknown(found: Description) -> None:
    """What is in it helps to see where to look instead."""
    inner = {path.name: _kind(path)[0] for path in sorted(found.folder.iterdir()) if path.is_dir()}
    found.problems.append("neither a run, a state, a draft, an export nor a target")
    found.facts = {name: kind for name, kind in inner.items() if kind != UNKNOWN}


def _is_state(folder: Path) -> bool:
    return STEP_NAME.fullmatch(folder.name) is not None and folder.parent.name == STATE


def _is_ours(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and head_kind(_peek(folder).get("model_type")) is not None


def _is_foreign(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and Head(_peek(folder)).format is not None


def _is_export(folder: Path) -> bool:
    return has_manifest(folder) or (folder / ABOUT).is_file()


def _peek(folder: Path) -> dict[str, Any]:
    try:
        return read_json(folder / CONFIG)
    except ValueError:
        return {}


def _run(found: Description) -> None:
    folder = found.folder
    drafts = [name for name in (BEST_DRAFT, DRAFT) if (folder / name / CONFIG).is_file()]
    known = _provenance(found, folder)
    steps = list_steps(state_folder(folder))
    found.facts = {"started": known.get("started"), "target": _target_line(known.get("target") or {})}
    found.facts |= {"drafts": drafts or "none yet", "saved at steps": steps, "data fingerprint": known.get("data_fingerprint")}
    for step in steps:
        try:
            verify_state(state_folder(folder) / step_name(step))
        except CorruptFolder as error:
            found.problems.append(str(error))
    for name in drafts:
        inner = Description(folder / name, "draft")
        _ours(inner)
        found.problems += inner.problems
        found.facts[name] = f"{inner.facts.get('architecture')}, {inner.facts.get('parameters')} parameters"
    if drafts:
        source = find_source(folder, DRAFT if DRAFT in drafts else drafts[0])
        found.facts["steps trained"] = source.step
        found.table = (source.report or {}).get("policies", {})


def _provenance(found: Description, run: Path) -> dict[str, Any]:
    """What a run's provenance.json says; nothing, and a problem, where it is missing or damaged."""
    try:
        return read_json(run / PROVENANCE)
    except ValueError as error:
        found.problems.append(str(error))
        return {}


def _state(found: Description) -> None:
    run = found.folder.parent.parent
    if is_run(run):
        known = _provenance(found, run)
        found.facts = {"target": _target_line(known.get("target") or {}), "data fingerprint": known.get("data_fingerprint")}
    manifest = verify_state(found.folder)
    sizes = [facts["bytes"] for facts in manifest["files"].values()]
    found.facts |= {"steps trained": manifest["step"], "files": f"{len(sizes)}, {sum(sizes) / 2**20:.1f} MiB"}


def _ours(found: Description) -> None:
    folder = found.folder
    config = read_json(folder / CONFIG)
    target = config.get("target") or {}
    found.facts = {"target": _target_line(target), "loaded from": config.get("target_path")}
    found.facts |= {"architecture": config.get("model_type"), **_size(folder, found.problems)}
    if config.get("feature_levels"):
        whole = config.get("draft_vocab_size") == config.get("vocab_size")
        found.facts["feature levels"] = config["feature_levels"]
        found.facts["draft vocabulary"] = f"{config.get('draft_vocab_size')}{' (whole)' if whole else ''}"
    if config.get(COMPRESSOR):
        found.facts["compressor"] = told_compressor(config[COMPRESSOR])
    if (folder / ABOUT).is_file():
        _add_about(found, folder)
    elif run_of(folder):
        source = find_source(folder)
        found.facts |= {"steps trained": source.step, "data fingerprint": source.provenance.get("data_fingerprint")}
        found.table = (source.report or {}).get("policies", {})
    if has_manifest(folder):
        _find_damage(found)


def _export(found: Description) -> None:
    folder = found.folder
    _find_damage(found)
    if found.problems:
        return
    if (folder / ABOUT).is_file():
        _add_about(found, folder)
    check = check_folder(folder)
    found.problems += [str(finding) for finding in check.errors]
    found.facts = {"format": f"{check.format}{f' for {check.flavour}' if check.flavour else ''}", **found.facts}
    found.facts |= _size(folder, found.problems)


def _foreign(found: Description) -> None:
    check = check_folder(found.folder)
    found.problems += [str(finding) for finding in check.errors]
    config = read_json(found.folder / CONFIG)
    found.facts = {"format": str(check.format), "architecture": config.get("architectures"), **_size(found.folder, [])}
    found.facts["vocabulary"] = config.get("vocab_size")


def _target(found: Description) -> None:
    config = read_json(found.folder / CONFIG)
    found.facts = {"architecture": config.get("architectures"), **_size(found.folder, found.problems)}


def _size(folder: Path, problems: list[str]) -> dict[str, Any]:
    """Parameters and dtype from the weights' headers; what cannot be read becomes a problem."""
    try:
        infos = Weights(folder).infos
    except ValueError as error:
        problems.append(str(error))
        return {}
    floats = {name: info for name, info in infos.items() if info.dtype is not None and info.dtype.is_floating_point}
    count = sum(_numel(info.shape) for info in floats.values())
    kinds = sorted({dtype_name(info.dtype) for info in floats.values()})
    return {"parameters": f"{count:,}", "dtype": ", ".join(kinds)}


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _add_about(found: Description, folder: Path) -> None:
    about = read_json(folder / ABOUT)
    found.facts |= {
        "target": _target_line(about.get("target") or {}),
        "architecture": about.get("draft"),
        "imported from": about.get("imported_from"),
        "steps trained": about.get("steps_trained"),
        "data fingerprint": about.get("data_fingerprint"),
        "warnings": about.get("warnings"),
    }
    found.table = (about.get("validation") or {}).get("policies", {})


def _find_damage(found: Description) -> None:
    if not has_manifest(found.folder):
        found.problems.append(f"{MANIFEST}: missing, nothing vouches for the files")
        return
    try:
        find_damage(found.folder)
    except ValueError as error:
        found.problems.append(str(error))


def _target_line(target: dict[str, Any]) -> str:
    if not target:
        return "unknown"
    name = f"{target['name']}: " if target.get("name") else ""
    sizes = {"num_layers": "layers", "hidden_size": "wide", "vocab_size": "tokens"}
    return f"{name}{target.get('model_type')}, " + ", ".join(
        f"{target[key]} {what}" for key, what in sizes.items() if key in target
    )


Look = Callable[[Description], None]
KINDS_OF_FOLDERS: tuple[tuple[str, Callable[[Path], bool], Look], ...] = (
    ("run", is_run, _run),
    ("saved state of a run", _is_state, _state),
    ("draft (ours, for sage.load_draft)", _is_ours, _ours),
    ("export", _is_export, _export),
    ("foreign draft", _is_foreign, _foreign),
    ("target (a whole vision-language model)", is_target_folder, _target),
)
