"""Describes a folder: run, training state, draft, export, third-party draft or target; verifies what it can verify."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from checkpoints import run_folder
from checkpoints.export.configs import EngineConfig
from checkpoints.export.exporter import find_source
from checkpoints.export.folder import CONFIG, Weights, export_info, verify_export
from checkpoints.export.formats import recognize
from checkpoints.export.importer import check_folder
from checkpoints.export.serving import COMPRESSOR, format_compressor
from checkpoints.run_folder import BEST_DRAFT, DRAFT, is_run, list_checks, list_steps, run_of, state_folder, step_name
from checkpoints.store import verify_state
from sage.bench.report_table import measured_with
from sage.drafts.location import EXPORT_INFO
from sage.drafts.registry import head_kind
from sage.io.dtypes import dtype_name
from sage.io.files import read_json
from sage.io.folders import restore_interrupted
from sage.io.manifest import MANIFEST, has_manifest
from sage.io.tables import text_table
from sage.targets import is_target_folder

UNKNOWN = "unknown"
FIGURES = {"tokens_per_target_pass": "tokens/pass", "mean_accepted_draft": "accepted", "speedup": "speedup"}


@dataclass
class Description:
    """The description of a folder."""

    folder: Path
    kind: str  # a name in `KINDS`, or `UNKNOWN`
    facts: dict[str, Any] = field(default_factory=dict)  # label -> value, in printing order; empty values are not printed
    problems: list[str] = field(default_factory=list)  # what is corrupt or missing
    table: dict[str, Any] = field(default_factory=dict)  # figures of the validation, by policy
    measured_with: str = ""  # settings of that validation

    @contextmanager
    def noting_problems(self) -> Iterator[None]:
        """Adds a ValueError of the block to the problems."""
        try:
            yield
        except ValueError as error:
            self.problems.append(str(error))

    @property
    def is_intact(self) -> bool:
        """Whether no problem was found."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        return {**asdict(self), "folder": str(self.folder), "is_intact": self.is_intact}

    def text(self) -> str:
        """Returns a few lines for a terminal."""
        state = "" if self.kind == UNKNOWN else ", intact" if self.is_intact else ", CORRUPT"
        facts = {label: value for label, value in self.facts.items() if value not in (None, "", [], {})}
        rows = [(label, ", ".join(map(str, v)) if isinstance(v, (list, tuple)) else str(v)) for label, v in facts.items()]
        parts = [f"{self.folder}: {self.kind}{state}", text_table(None, rows, "<", indent=2)]
        parts += [f"  problem: {problem}" for problem in self.problems]
        if self.table:
            columns = ["validation", *FIGURES.values(), "identical"]
            policies = [
                [name, *(f"{figures[key]:.2f}" if key in figures else "-" for key in FIGURES)]
                + [f"{figures.get('match', '?')}/{figures.get('total', '?')}"]
                for name, figures in self.table.items()
            ]
            parts.append(text_table(columns, policies, indent=2, ruled=False))
            parts += [f"  {self.measured_with}"] if self.measured_with else []
        return "\n".join(part for part in parts if part)

    def add_report(self, report: dict[str, Any] | None) -> None:
        """Adds the figures and settings of a report, if there is one."""
        self.table = (report or {}).get("policies", {})
        self.measured_with = measured_with(report or {})


def inspect_folder(folder: Path) -> Description:
    """Describes a folder, without changing it once an interrupted replacement is restored; ValueError if there is none."""
    restore_interrupted(folder)
    if not folder.is_dir():
        raise ValueError(f"--inspect {folder}: {'a file; give its folder' if folder.exists() else 'no such folder'}")
    kind, describe = _find_kind(folder)
    found = Description(folder, kind)
    with found.noting_problems():
        describe(found)
    return found


def _find_kind(folder: Path) -> tuple[str, Describe]:
    return next((kind, describe) for kind, is_kind, describe in KINDS if is_kind(folder))


def _describe_unknown(found: Description) -> None:
    """Lists the subfolders of known kinds."""
    inner = {path.name: _find_kind(path)[0] for path in sorted(found.folder.iterdir()) if path.is_dir()}
    found.problems.append("neither a run, a training state, a draft, an export nor a target")
    found.facts = {name: kind for name, kind in inner.items() if kind != UNKNOWN}


def _config_or_empty(folder: Path) -> dict[str, Any]:
    with suppress(ValueError):
        return read_json(folder / CONFIG)
    return {}


def _describe_run(found: Description) -> None:
    folder = found.folder
    drafts = [name for name in (BEST_DRAFT, DRAFT) if (folder / name / CONFIG).is_file()]
    known = _read_provenance(found, folder)
    steps = list_steps(state_folder(folder))
    found.facts = {"started": known.get("started"), "target": _describe_target_facts(known)}
    found.facts["recipe changed"] = run_folder.recipe_changes(folder)
    found.facts |= {"drafts": drafts or "none yet", "saved at steps": steps, "data fingerprint": known.get("data_fingerprint")}
    for step in steps:
        with found.noting_problems():
            verify_state(state_folder(folder) / step_name(step))
    for name in drafts:
        inner = Description(folder / name, "draft")
        _describe_draft(inner)
        found.problems += inner.problems
        found.facts[name] = f"{inner.facts.get('architecture')}, {inner.facts.get('parameters')} parameters"
    if drafts:
        source = find_source(folder / (DRAFT if DRAFT in drafts else drafts[0]))
        found.facts["steps trained"] = source.step
        found.add_report(source.report)
    found.facts["later checks"] = [f"{path.parent.name}/{path.name}" for path in list_checks(folder)]


def _read_provenance(found: Description, run: Path) -> dict[str, Any]:
    """Reads provenance.json; if it is missing or corrupt, adds a problem and returns an empty dictionary."""
    with found.noting_problems():
        return read_json(run / run_folder.PROVENANCE)
    return {}


def _describe_state(found: Description) -> None:
    if is_run(run := found.folder.parent.parent):
        known = _read_provenance(found, run)
        found.facts = {"target": _describe_target_facts(known), "data fingerprint": known.get("data_fingerprint")}
    manifest = verify_state(found.folder)
    sizes = [listed["bytes"] for listed in manifest["files"].values()]
    found.facts |= {"steps trained": manifest["step"], "files": f"{len(sizes)}, {sum(sizes) / 2**20:.1f} MiB"}


def _describe_draft(found: Description) -> None:
    folder = found.folder
    config = read_json(folder / CONFIG)
    found.facts = {"target": _describe_target_facts(config), "loaded from": config.get("target_path")}
    found.facts["architecture"] = config.get("model_type")
    _add_weights(found)
    if config.get("feature_levels"):
        is_full = config.get("draft_vocab_size") == config.get("vocab_size")
        found.facts["feature levels"] = config["feature_levels"]
        found.facts["draft vocabulary"] = f"{config.get('draft_vocab_size')}{' (full)' if is_full else ''}"
    if config.get(COMPRESSOR):
        found.facts["compressor"] = format_compressor(config[COMPRESSOR])
    if info := export_info(folder):
        _add_export_info(found, info)
    elif run_of(folder):
        source = find_source(folder)
        found.facts |= {"steps trained": source.step, "data fingerprint": source.provenance.get("data_fingerprint")}
        found.add_report(source.report)
    if has_manifest(folder):
        with found.noting_problems():
            verify_export(folder)


def _describe_export(found: Description) -> None:
    if not has_manifest(found.folder):
        raise ValueError(f"{found.folder / MANIFEST}: missing; the files cannot be verified")
    verify_export(found.folder)
    check = check_folder(found.folder)
    found.problems += map(str, check.errors)
    found.facts["format"] = check.format and check.format.label
    if info := export_info(found.folder):
        _add_export_info(found, info)
    _add_weights(found)


def _describe_third_party(found: Description) -> None:
    check = check_folder(found.folder)
    found.facts = {"format": check.format and check.format.name}
    _describe_target(found)
    found.facts["vocabulary"] = read_json(found.folder / CONFIG).get("vocab_size")
    found.problems = [str(finding) for finding in check.errors]  # also about the weights


def _describe_target(found: Description) -> None:
    found.facts["architecture"] = read_json(found.folder / CONFIG).get("architectures")
    _add_weights(found)


def _add_weights(found: Description) -> None:
    """Adds number of parameters and dtypes, from the headers of the weights; a problem if they cannot be read."""
    with found.noting_problems():
        infos = Weights(found.folder).infos.values()
        floats = [info for info in infos if info.dtype is not None and info.dtype.is_floating_point]
        found.facts["parameters"] = f"{sum(math.prod(info.shape) for info in floats):,}"
        found.facts["dtype"] = ", ".join(sorted({dtype_name(info.dtype) for info in floats}))


def _add_export_info(found: Description, info: dict[str, Any]) -> None:
    found.facts |= {
        "target": _describe_target_facts(info),
        "architecture": info.get("draft"),
        "imported from": info.get("imported_from"),
        "steps trained": info.get("steps_trained"),
        "data fingerprint": info.get("data_fingerprint"),
        "warnings": info.get("warnings"),
    }
    found.add_report(info.get("validation"))


def _describe_target_facts(stored: dict[str, Any]) -> str:
    """Describes the target of a draft's config, a provenance or an export."""
    if not (target := stored.get("target")):
        return "unknown"
    name = f"{target['name']}: " if target.get("name") else ""
    sizes = {"num_layers": "{} layers", "hidden_size": "hidden size {}", "vocab_size": "vocabulary {}"}
    sizes |= {"adapter": "adapter {}", "quantize": "quantized to {} at load"}
    shown = [text.format(target[key]) for key, text in sizes.items() if target.get(key)]
    return ", ".join([f"{name}{target.get('model_type')}", *shown])


Describe = Callable[[Description], None]
KINDS: tuple[tuple[str, Callable[[Path], bool], Describe], ...] = (
    ("run", is_run, _describe_run),
    (
        "training state of a run",
        lambda folder: folder.parent.name == run_folder.STATE and run_folder.STEP_NAME.fullmatch(folder.name) is not None,
        _describe_state,
    ),
    ("draft", lambda folder: head_kind(_config_or_empty(folder).get("model_type")) is not None, _describe_draft),
    ("export", lambda folder: has_manifest(folder) or (folder / EXPORT_INFO).is_file(), _describe_export),
    ("third-party draft", lambda folder: recognize(EngineConfig(_config_or_empty(folder))) is not None, _describe_third_party),
    ("target", is_target_folder, _describe_target),
    (UNKNOWN, lambda folder: True, _describe_unknown),
)
