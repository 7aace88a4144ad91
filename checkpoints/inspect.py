"""What a folder is, for a person: run, saved state, draft, export, foreign draft or target, and whether it is whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from checkpoints.export.facts import read_json
from checkpoints.export.folder import CONFIG, Weights
from checkpoints.export.layout import Head
from checkpoints.export.source import BEST, KINDS, LAST, PROVENANCE, RUN_MARK, find_source
from checkpoints.export.validator import check_folder
from checkpoints.export.writing import ABOUT, find_damage, is_sealed, settle
from checkpoints.store import MANIFEST, STEP_NAME, BadState, StateStore, step_name, verify
from sage.targets import is_target_folder


@dataclass
class Description:
    """What a folder is.

    Attributes:
        kind: run, state, draft, export, foreign draft, target or unknown.
        facts: label -> value, in the order they are told; empty values are left out.
        problems: what is damaged or missing.
        table: the last validation, a row per policy.
    """

    folder: Path
    kind: str
    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    table: dict[str, Any] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is damaged or missing."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "folder": str(self.folder), "is_whole": self.is_whole}

    def text(self) -> str:
        """A few lines for a terminal."""
        state = "whole" if self.is_whole else "DAMAGED"
        lines = [f"{self.folder}: {self.kind}, {state}"]
        lines += [f"  {label}: {value}" for label, value in self.facts.items() if value not in (None, "", [], {})]
        lines += [f"  problem: {problem}" for problem in self.problems]
        for name, part in self.table.items():
            figures = ", ".join(f"{part[key]:.2f} {label}" for key, label in FIGURES.items() if key in part)
            lines.append(f"  {name}: {figures}, identical {part.get('match', '?')}/{part.get('total', '?')}")
        return "\n".join(lines)


FIGURES = {"tokens_per_target_pass": "tokens per target pass", "mean_accepted_draft": "accepted", "speedup": "x speed"}


def describe(folder: Path) -> Description:
    """Looks at a folder without changing it (a replacement that a crash interrupted is settled first).

    Raises:
        ValueError: no such folder.
    """
    settle(folder)
    if not folder.is_dir():
        raise ValueError(f"--inspect {folder}: no such folder")
    for is_kind, look in _KINDS:
        if is_kind(folder):
            return look(folder)
    return Description(folder, "unknown", problems=["neither a run, a state, a draft, an export nor a target"])


def _is_state(folder: Path) -> bool:
    return STEP_NAME.fullmatch(folder.name) is not None and folder.parent.name == "state"


def _is_ours(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and _peek(folder).get("model_type") in KINDS


def _is_foreign(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and Head(_peek(folder)).format is not None


def _is_export(folder: Path) -> bool:
    return is_sealed(folder) or (folder / ABOUT).is_file()


def _peek(folder: Path) -> dict[str, Any]:
    try:
        return read_json(folder / CONFIG)
    except ValueError:
        return {}


def _run(folder: Path) -> Description:
    found = Description(folder, "run")
    drafts = [name for name in (BEST, LAST) if (folder / name / CONFIG).is_file()]
    known = read_json(folder / PROVENANCE) if (folder / PROVENANCE).is_file() else {}
    if not known:
        found.problems.append(f"{PROVENANCE}: missing")
    steps = StateStore(folder / "state").steps()
    found.facts = {"started": known.get("started"), "target": _target_line(known.get("target") or {}), "drafts": drafts}
    found.facts |= {"saved at steps": steps, "data fingerprint": known.get("data_fingerprint")}
    for step in steps:
        try:
            verify(folder / "state" / step_name(step))
        except BadState as error:
            found.problems.append(str(error))
    for name in drafts:
        inner = _ours(folder / name)
        found.problems += inner.problems
        found.facts[name] = f"{inner.facts.get('architecture')}, {inner.facts.get('parameters')} parameters"
    if not drafts:
        found.facts["drafts"] = "none yet"
    else:
        source = find_source(folder, LAST if LAST in drafts else drafts[0])
        found.facts["steps trained"] = source.step
        found.table = (source.report or {}).get("policies", {})
    return found


def _state(folder: Path) -> Description:
    found = Description(folder, "saved state of a run")
    try:
        manifest = verify(folder)
        found.facts = {"steps trained": manifest["step"], "files": len(manifest["files"])}
    except BadState as error:
        found.problems.append(str(error))
    return found


def _ours(folder: Path) -> Description:
    found = Description(folder, "draft (ours, for sage.load_draft)")
    config = read_json(folder / CONFIG)
    target = config.get("target") or {}
    found.facts = {"target": _target_line(target), "loaded from": config.get("target_path")}
    found.facts |= {"architecture": config.get("model_type"), **_size(folder, found.problems)}
    if config.get("feature_levels"):
        whole = config.get("draft_vocab_size") == config.get("vocab_size")
        found.facts["feature levels"] = config["feature_levels"]
        found.facts["draft vocabulary"] = f"{config.get('draft_vocab_size')}{' (whole)' if whole else ''}"
    if (folder / ABOUT).is_file():
        _add_about(found, folder)
    elif (folder.parent / RUN_MARK).is_file():
        source = find_source(folder)
        found.facts |= {"steps trained": source.step, "data fingerprint": source.provenance.get("data_fingerprint")}
        found.table = (source.report or {}).get("policies", {})
    if is_sealed(folder):
        _find_damage(found)
    return found


def _export(folder: Path) -> Description:
    found = Description(folder, "export")
    _find_damage(found)
    if found.problems:
        return found
    if (folder / ABOUT).is_file():
        _add_about(found, folder)
    check = check_folder(folder)
    found.problems += [str(finding) for finding in check.errors]
    found.facts = {"format": f"{check.format}{f' for {check.flavour}' if check.flavour else ''}", **found.facts}
    found.facts |= _size(folder, found.problems)
    return found


def _foreign(folder: Path) -> Description:
    check = check_folder(folder)
    found = Description(folder, "foreign draft", problems=[str(finding) for finding in check.errors])
    config = read_json(folder / CONFIG)
    found.facts = {"format": str(check.format), "architecture": config.get("architectures"), **_size(folder, [])}
    found.facts["vocabulary"] = config.get("vocab_size")
    return found


def _target(folder: Path) -> Description:
    found = Description(folder, "target (a whole vision-language model)")
    config = read_json(folder / CONFIG)
    found.facts = {"architecture": config.get("architectures"), **_size(folder, found.problems)}
    return found


def _size(folder: Path, problems: list[str]) -> dict[str, Any]:
    """Parameters and dtype from the weights' headers; what cannot be read becomes a problem."""
    try:
        infos = Weights(folder).infos
    except ValueError as error:
        problems.append(str(error))
        return {}
    floats = {name: info for name, info in infos.items() if info.dtype is not None and info.dtype.is_floating_point}
    count = sum(_numel(info.shape) for info in floats.values())
    kinds = sorted({str(info.dtype).removeprefix("torch.") for info in floats.values()})
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
        "know": about.get("warnings"),
    }
    found.table = (about.get("validation") or {}).get("policies", {})


def _find_damage(found: Description) -> None:
    if not is_sealed(found.folder):
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


_KINDS: tuple[tuple[Callable[[Path], bool], Callable[[Path], Description]], ...] = (
    (lambda folder: (folder / RUN_MARK).is_file(), _run),
    (_is_state, _state),
    (_is_ours, _ours),
    (_is_export, _export),
    (_is_foreign, _foreign),
    (is_target_folder, _target),
)
