"""The last check of an export: reloaded from its files, it computes what the trained draft computes.

A fixed batch of seeded noise is passed through both. With the trained draft's weights rounded to the export's dtype, the
outputs must be bit-identical; the rounding error itself is reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoints.export.formats.base import ExportFormat
from checkpoints.export.formats.reading import ImportOptions
from checkpoints.export.target_facts import TargetFacts
from checkpoints.export.validator.findings import InvalidExport
from sage.drafts.head import DraftHead


@dataclass(frozen=True)
class RoundingError:
    """Effect of rounding the weights to the export's dtype.

    Attributes:
        max_abs_difference: largest absolute difference between the outputs of the trained and the exported draft.
        agreement: what the format's `agreement` returns.
    """

    max_abs_difference: float
    agreement: float


@torch.no_grad()
def check_reload(folder: Path, format_: ExportFormat, trained: DraftHead, facts: TargetFacts) -> RoundingError:
    """Reloads an export and compares it with the trained draft, which is rounded to the export's dtype in place.

    Raises:
        InvalidExport: the outputs differ.
    """
    exported = format_.read(folder, facts, ImportOptions(image_inputs=trained.config.image_inputs))
    original = format_.outputs(trained)
    rounded, reloaded = format_.outputs(trained.to(exported.dtype)), format_.outputs(exported)
    if not torch.equal(rounded, reloaded):
        gap = float((rounded.float() - reloaded.float()).abs().max())
        raise InvalidExport(f"{folder}: reloaded, its outputs differ from the trained draft's by up to {gap:.3g}")
    before, after = original.float(), reloaded.float()
    return RoundingError(float((before - after).abs().max()), float(format_.agreement(before, after)))
