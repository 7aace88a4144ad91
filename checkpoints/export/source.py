"""What is being exported: a draft's folder, and what the run around it knows (training, validation, data)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from checkpoints.export.facts import read_json
from checkpoints.export.folder import CONFIG
from checkpoints.export.writing import refuse_damaged
from checkpoints.store import STEP_NAME, StateStore
from sage.drafts import DraftHead
from sage.drafts.registry import head_kind
from sage.model_files import load_weights
from sage.targets import is_target_folder

RUN_MARK, PROVENANCE, REPORT = "config.yaml", "provenance.json", "report.json"
BEST, LAST = "draft_best", "draft"


@dataclass(frozen=True, kw_only=True)
class Source:
    """A draft and its origin.

    Attributes:
        draft: folder of the trained draft.
        run: the run it lies in, if any.
        step: optimizer steps behind it; None where nobody knows.
        recipe: the run's config.yaml.
        provenance: the run's provenance.json.
        report: the validation report that belongs to this draft.
    """

    draft: Path
    run: Path | None = None
    step: int | None = None
    recipe: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    report: dict[str, Any] | None = None


def find_source(path: Path, name: str | None = None) -> Source:
    """A run or a draft's own folder.

    Args:
        path: what the user gave.
        name: which draft of a run; None = the best one if the run kept one.

    Raises:
        ValueError: no draft there; says what is.
    """
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder; give a run's folder or a draft's")
    if not (path / RUN_MARK).is_file():
        if not (path / CONFIG).is_file():
            raise ValueError(f"{path}: neither a run ({RUN_MARK}) nor a draft ({CONFIG})")
        if name:
            raise ValueError(f"--draft {name}: {path} belongs to no run to choose from: it is a draft's own folder")
        parent = path.parent if (path.parent / RUN_MARK).is_file() else None
        return _of_run(path, parent) if parent else Source(draft=path)
    names = [name] if name else [BEST, LAST]
    for candidate in names:
        if (path / candidate / CONFIG).is_file():
            return _of_run(path / candidate, path)
    raise ValueError(f"{path}: the run has no {' or '.join(names)} yet; train further, or give another --draft")


def _of_run(draft: Path, run: Path) -> Source:
    report = _report(run, draft.name)
    steps = StateStore(run / "state").steps()
    last = report["step"] if report and "step" in report else (steps[-1] if steps else None)
    return Source(
        draft=draft,
        run=run,
        step=last,
        recipe=_yaml(run / RUN_MARK),
        provenance=read_json(run / PROVENANCE) if (run / PROVENANCE).is_file() else {},
        report=report,
    )


def _report(run: Path, name: str) -> dict[str, Any] | None:
    """The newest validation; for the best draft the one that made it the best (the first with the highest score)."""
    folders = sorted(path for path in (run / "validation").glob("step_*") if STEP_NAME.fullmatch(path.name))
    reports = [{"step": _step(path), **read_json(path / REPORT)} for path in folders if (path / REPORT).is_file()]
    if not reports:
        return None
    return max(reports, key=score) if name == BEST else reports[-1]


def _step(folder: Path) -> int:
    match = STEP_NAME.fullmatch(folder.name)
    assert match is not None
    return int(match.group(1))


def score(report: dict[str, Any]) -> float:
    """tokens_per_target_pass of `sage`, else of the first policy that drafts; what a run keeps its best draft by."""
    drafting = {name: part for name, part in report.get("policies", {}).items() if name != "autoregressive"}
    chosen: dict[str, Any] = drafting.get("sage") or next(iter(drafting.values()), {})
    return float(chosen.get("tokens_per_target_pass", 0.0))


SETTINGS = ("step", "target", "device", "dtype", "prompts", "max_new_tokens", "temperature", "seed")


def headline(report: dict[str, Any] | None) -> dict[str, Any] | None:
    """The part of a report that travels with a draft: its settings and each policy's single figures."""
    if report is None:
        return None
    policies = {
        name: {key: value for key, value in part.items() if isinstance(value, (int, float))}
        for name, part in report.get("policies", {}).items()
    }
    return {**{key: report[key] for key in SETTINGS if key in report}, "policies": policies}


def _yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({' '.join(str(error).split())})") from error
    return content if isinstance(content, dict) else {}


def load_trained(folder: Path) -> DraftHead:
    """One of our drafts, whole, without its target; on the CPU, in the dtype it was saved in.

    Raises:
        ValueError: another kind of folder, a damaged one, or weights that do not fit its config.
    """
    refuse_damaged(folder)
    if is_target_folder(folder):
        raise ValueError(f"{folder}: a whole model, not a draft head; engines serve it as it is, as a draft model")
    stored = read_json(folder / CONFIG)
    kind = head_kind(stored.get("model_type"))
    if kind is None or not stored.get("target"):
        raise ValueError(
            f"{folder}: model_type {stored.get('model_type')!r} is not a draft of ours; --import reads foreign ones"
        )
    head: DraftHead = load_weights(kind.draft_class(), folder, "draft", dtype="auto")
    return head.eval()
