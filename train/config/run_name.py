"""The default name of a run, which tells runs apart by target, draft, data and objective. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path

LONGEST_PART = 40


def run_name(target: str, draft: str, path: str | None, data: str, objective: str) -> str:
    """Returns `TARGET-DRAFT-DATA`, with `-OBJECTIVE` if it is not the draft's own.

    Args:
        path: `data.path`; names the data by its last part without suffix, because one format has many files.
        data: `data.name`, for data without a path.
    """
    parts = [target, draft, Path(path).name.split(".")[0] if path else data]
    if objective not in ("", draft):
        parts.append(objective)
    return "-".join(_plain(part)[:LONGEST_PART] for part in parts)


def _plain(part: str) -> str:
    """Replaces characters that a shell or Hydra would interpret."""
    return re.sub(r"[^\w.]+", "_", part).strip("_.") or "data"
