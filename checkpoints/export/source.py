"""The draft to export: its folder, and the recipe, provenance and validation of the run that contains it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from checkpoints.export.formats.registry import imported_drafts
from checkpoints.run_folder import (
    PROVENANCE,
    REPORT,
    describe_recipe_changes,
    draft_report,
    draft_step,
    read_report,
    read_run_config,
    run_of,
)
from sage.drafts.head import DraftHead
from sage.drafts.location import find_draft
from sage.drafts.registry import head_kind
from sage.io.files import read_json
from sage.io.manifest import refuse_corrupt_draft
from sage.io.model_files import load_weights, read_config
from sage.targets import is_target_folder

REPORT_SETTINGS = ("step", "target", "device", "dtype", "prompts", "repeats", "max_new_tokens", "temperature", "seed")


@dataclass(frozen=True, kw_only=True)
class DraftSource:
    """A draft and its origin.

    Attributes:
        draft: folder of the trained draft.
        run: the run that contains it, if any.
        step: optimizer steps it was trained for; None if unknown.
        recipe: the run's configuration when the draft was saved.
        recipe_changes: earlier changes of the recipe, one line each.
        provenance: the run's provenance.json.
        report: the validation report of this draft: the run's own, unless `with_report` chose another.
    """

    draft: Path
    run: Path | None = None
    step: int | None = None
    recipe: dict[str, Any] = field(default_factory=dict)
    recipe_changes: list[str] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)
    report: dict[str, Any] | None = None


def find_source(path: Path) -> DraftSource:
    """Finds the draft that `path` names (see `find_draft`), and the run that contains it.

    Raises:
        ValueError: there is no draft.
    """
    draft = find_draft(path)
    run = run_of(draft)
    if run is None:
        return DraftSource(draft=draft)
    step = draft_step(draft)
    return DraftSource(
        draft=draft,
        run=run,
        step=step,
        recipe=read_run_config(run, step),
        recipe_changes=describe_recipe_changes(run, step),
        provenance=read_json(run / PROVENANCE) if (run / PROVENANCE).is_file() else {},
        report=draft_report(draft),
    )


def with_report(source: DraftSource, path: Path) -> DraftSource:
    """Replaces the run's own measurement by another report.json (or the folder that contains it), e.g. of a later check.

    Raises:
        ValueError: there is no report, or it measured the draft after another number of steps.
    """
    report = read_report(path / REPORT if path.is_dir() else path)
    if report.get("step") not in (None, source.step or 0):
        raise ValueError(
            f"--report {path}: measured a draft after {report['step']} steps, {source.draft} has {source.step or 0}; "
            "give a report of this draft"
        )
    return replace(source, report=report)


def summarize_report(report: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns the settings of a validation report and the scalar figures of each policy."""
    if report is None:
        return None
    policies = {
        name: {key: value for key, value in figures.items() if isinstance(value, (int, float))}
        for name, figures in report.get("policies", {}).items()
    }
    return {**{key: report[key] for key in REPORT_SETTINGS if key in report}, "policies": policies}


def load_trained(folder: Path) -> DraftHead:
    """Loads a draft of this package without its target, on the CPU and in the dtype it was saved in.

    Raises:
        ValueError: not a draft head of this package, corrupt, or weights that do not fit its config.
    """
    refuse_corrupt_draft(folder)
    if is_target_folder(folder):
        raise ValueError(f"{folder}: a complete model, not a draft head; engines load it directly as a draft model")
    stored = read_config(folder)
    kind = head_kind(stored.get("model_type"))
    if kind is None or not stored.get("target"):
        raise ValueError(
            f"{folder}: model_type {stored.get('model_type')!r} is not a draft of this package; --import reads "
            f"{imported_drafts()} drafts"
        )
    head: DraftHead = load_weights(kind.draft_class(), folder, "draft", dtype="auto")
    return head.eval()
