"""What is being exported: a draft's folder, and what the run around it knows (training, validation, data)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints.export.facts import read_json
from checkpoints.export.folder import CONFIG
from checkpoints.run_folder import BEST_DRAFT, DRAFT, PROVENANCE, draft_report, draft_step, is_run, read_config, run_of
from checkpoints.run_folder import CONFIG as RUN_CONFIG
from sage.drafts import DraftHead
from sage.drafts.registry import head_kind
from sage.manifest import refuse_corrupt_draft
from sage.model_files import load_weights
from sage.targets import is_target_folder


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
    if not is_run(path):
        if not (path / CONFIG).is_file():
            raise ValueError(f"{path}: neither a run ({RUN_CONFIG}) nor a draft ({CONFIG})")
        if name:
            raise ValueError(f"--draft {name}: {path} belongs to no run to choose from: it is a draft's own folder")
        run = run_of(path)
        return _of_run(path, run) if run else Source(draft=path)
    names = [name] if name else [BEST_DRAFT, DRAFT]
    for candidate in names:
        if (path / candidate / CONFIG).is_file():
            return _of_run(path / candidate, path)
    raise ValueError(f"{path}: the run has no {' or '.join(names)} yet; train further, or give another --draft")


def _of_run(draft: Path, run: Path) -> Source:
    return Source(
        draft=draft,
        run=run,
        step=draft_step(draft),
        recipe=read_config(run),
        provenance=read_json(run / PROVENANCE) if (run / PROVENANCE).is_file() else {},
        report=draft_report(draft),
    )


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


def load_trained(folder: Path) -> DraftHead:
    """One of our drafts, whole, without its target; on the CPU, in the dtype it was saved in.

    Raises:
        ValueError: another kind of folder, a damaged one, or weights that do not fit its config.
    """
    refuse_corrupt_draft(folder)
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
