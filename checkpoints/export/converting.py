"""A foreign draft written down as one of ours, so that sage.load_draft, sage-generate and sage-validate take it."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from checkpoints.export.embedding import ENDING, target_embedding
from checkpoints.export.facts import TargetFacts, read_json
from checkpoints.export.folder import Weights
from checkpoints.export.importing import PREFIXES, Reading, read_eagle3
from checkpoints.export.writing import ABOUT, writing
from checkpoints.store import write_text
from sage.drafts import Eagle3Draft

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
    check_embedding(folder, facts)
    origin = read_json(folder / ABOUT) if (folder / ABOUT).is_file() else {}
    step = int(origin.get("step") or 0)
    with writing(out, step, overwrite) as part:
        draft.save_pretrained(part)
        write_text(part / ABOUT, json.dumps(_about(draft, folder, facts, origin, step), indent=2) + "\n")
    return out


def check_embedding(folder: Path, facts: TargetFacts) -> None:
    """Refuses a draft with an embedding of its own: our decoder lends it the target's.

    Where the target's weights are not at hand nothing can be compared; training frameworks freeze the target's.

    Raises:
        ValueError: the embedding in the folder is not the target's.
    """
    weights = Weights(folder)
    names = [name for name in weights.infos if name in (ENDING, *(prefix + ENDING for prefix in PREFIXES))]
    if not names or not (Path(facts.name or "") / "config.json").is_file():
        return
    own, lent = weights[names[0]].float(), target_embedding(facts).float()
    gap = (own - lent).abs().max() if own.shape == lent.shape else torch.tensor(torch.inf)
    if not bool(gap <= ROUNDING * lent.abs().max()):
        raise ValueError(
            f"{folder}: {names[0]} differs from the target's by up to {float(gap):.3g}: it was trained, and our decoder lends "
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
