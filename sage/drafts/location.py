"""The folder of the draft that a user names: a run, one of its drafts, or any other draft. The only place that resolves it.

Imports no torch, so that a command answers a wrong name before it loads anything; `sage.drafts.draft` loads drafts.
"""

from __future__ import annotations

from pathlib import Path

from sage.io.files import read_json

RUN_CONFIG = "config.yaml"  # makes a folder a run
DRAFT, BEST_DRAFT = "draft", "draft_best"  # folders of a run: the latest draft, and the one with the best validation score
DRAFT_CONFIG = "config.json"  # makes a folder a draft
EXPORT_INFO = "sage_export.json"  # of an export: facts for which the engines' config.json has no field
ALLOWED = f"give a run, RUN/{DRAFT}, RUN/{BEST_DRAFT} or the folder of a draft"
DRAFT_HELP = f"a run (its best draft), RUN/{DRAFT}, RUN/{BEST_DRAFT} or the folder of a draft"


def find_draft(path: str | Path, key: str = "draft") -> Path:
    """Returns the folder of a draft. A run stands for its best draft, or for its latest one if none has a score.

    Args:
        path: a run, a draft of a run, or the folder of any draft (a head or a smaller target).
        key: of the setting, for the message.

    Raises:
        ValueError: no such folder, or no draft in it.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ValueError(f"{key}: {path}: no such folder; {ALLOWED}")
    if (folder / DRAFT_CONFIG).is_file():
        return folder
    if not (folder / RUN_CONFIG).is_file():
        raise ValueError(f"{key}: {path}: neither a run ({RUN_CONFIG}) nor a draft ({DRAFT_CONFIG}); {ALLOWED}")
    saved = [folder / name for name in (BEST_DRAFT, DRAFT) if (folder / name / DRAFT_CONFIG).is_file()]
    if not saved:
        raise ValueError(f"{key}: {path}: the run has no {BEST_DRAFT} or {DRAFT} yet; train further, or give another draft")
    return saved[0]


def target_of(draft: Path, options: str) -> str:
    """Returns the folder or hub id of the target that a draft was trained for, from its config.json or its sage_export.json.

    Args:
        options: the settings that name a target instead, for the message.

    Raises:
        ValueError: the file cannot be read or names no target.
    """
    try:
        target = read_json(draft / DRAFT_CONFIG).get("target_path")
        if not target and (draft / EXPORT_INFO).is_file():
            target = (read_json(draft / EXPORT_INFO).get("target") or {}).get("name")
    except ValueError as error:
        raise ValueError(f"draft: {error}; save or copy the draft again") from error
    if not target:
        raise ValueError(f"target: missing; {draft / DRAFT_CONFIG} does not name it; give {options}")
    return str(target)
