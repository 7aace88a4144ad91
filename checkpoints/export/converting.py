"""A foreign draft as one of ours: in memory for a measurement, or written down so that sage.load_draft takes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sage
from checkpoints.export.facts import TargetFacts, read_json
from checkpoints.export.folder import CONFIG, Weights, read_config
from checkpoints.export.formats.embedding import ENDING, target_embedding
from checkpoints.export.formats.layout import Head
from checkpoints.export.importing import PREFIXES, Reading, read_eagle3
from checkpoints.export.writing import ABOUT, writing
from sage.drafts import Eagle3Draft
from sage.files import write_text
from sage.manifest import refuse_corrupt_draft

ROUNDING = 2**-7  # one step of bf16's eight bits, relative


def convert(folder: Path | str, target: str, out: Path | str, reading: Reading | None = None, overwrite: bool = False) -> Path:
    """Reads an EAGLE-3 draft made elsewhere and writes it as one of ours.

    Args:
        folder: the foreign draft.
        target: folder or hub id of the target it is for.
        out: the folder to write; it appears whole or not at all.
        reading: how to read what the folder leaves open.

    Returns:
        `out`, which `sage.load_draft` takes.

    Raises:
        ValueError: names what cannot be imported, or what lies at `out`.
    """
    folder, out = Path(folder), Path(out)
    facts = TargetFacts.of_folder(target)
    draft = read_eagle3(folder, facts, reading)
    if (Path(target) / CONFIG).is_file():
        check_embedding(folder, target_embedding(facts))
    origin = read_json(folder / ABOUT) if (folder / ABOUT).is_file() else {}
    step = int(origin.get("step") or 0)
    with writing(out, step, overwrite) as part:
        draft.save_pretrained(part)
        write_text(part / ABOUT, json.dumps(_about(draft, folder, facts, origin, step), indent=2) + "\n")
    return out


def load_any(folder: Path | str, target: sage.Target, reading: Reading | None = None) -> Any:
    """A draft in our format, or an EAGLE-3 draft made elsewhere; on the target's device, in its dtype.

    Raises:
        ValueError: neither, damaged, or not for this target.
    """
    folder = Path(folder)
    if not (folder / CONFIG).is_file() or Head(read_config(folder)).format is None:
        return sage.load_draft(folder, target)
    refuse_corrupt_draft(folder)
    draft = read_eagle3(folder, TargetFacts.of_config(target.model.config, target.name), reading)
    check_embedding(folder, target.embed_tokens.weight.detach().cpu())
    return draft.to(device=target.device, dtype=target.dtype)


def check_embedding(folder: Path, lent: Tensor) -> None:
    """Refuses a draft with an embedding of its own: our decoder lends every draft the target's.

    Args:
        lent: the target's, [V, D].

    Raises:
        ValueError: the embedding in the folder is not the target's, up to rounding to bf16.
    """
    weights = Weights(folder)
    for name in weights.infos:
        if name not in (ENDING, *(prefix + ENDING for prefix in PREFIXES)):
            continue
        own = weights[name]
        gap = (own.float() - lent.float()).abs().max() if own.shape == lent.shape else torch.tensor(torch.inf)
        if not bool(gap <= ROUNDING * lent.abs().max()):
            raise ValueError(
                f"{folder}: {name} differs from the target's by up to {float(gap):.3g}: it was trained, and our decoder lends "
                f"every draft the target's embedding; cannot import it"
            )


def _about(draft: Eagle3Draft, folder: Path, facts: TargetFacts, origin: dict[str, object], step: int) -> dict[str, object]:
    return {
        "schema": 1,
        "imported_from": str(folder),
        "step": step,
        "steps_trained": origin.get("steps_trained"),
        "draft": draft.config.model_type,
        "parameters": sum(parameter.numel() for parameter in draft.parameters()),
        "target": facts.to_dict(),
        "data_fingerprint": origin.get("data_fingerprint"),
        "validation": origin.get("validation"),
    }
