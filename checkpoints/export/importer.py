"""Imports third-party drafts: those of SpecForge, AngelSlim, SafeAILab and speculators.

The imported draft computes exactly what was trained; what our head cannot express is refused by name. Fields that only affect
engines (class name, context length) are ignored here; `sage-export --check` reports them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import sage
from checkpoints.export.configs import EngineConfig
from checkpoints.export.folder import CONFIG, export_info, new_export
from checkpoints.export.formats.base import Table
from checkpoints.export.formats.records import ImportOptions
from checkpoints.export.formats.registry import imported_drafts, recognize
from checkpoints.export.target import EMBEDDING, LM_HEAD, TargetFacts, read_target_embedding, read_target_lm_head
from sage.drafts.head import DraftHead, check_target
from sage.drafts.location import EXPORT_INFO
from sage.io.files import write_json
from sage.io.model_files import read_config


def convert(
    folder: Path | str, target: str, out: Path | str, options: ImportOptions | None = None, overwrite: bool = False
) -> Path:
    """Converts a third-party draft to a draft of this package, written atomically to `out`, which is returned.

    Args:
        target: folder or hub id of the draft's target.

    Raises:
        ValueError: names what cannot be imported, or that `out` exists.
    """
    folder, out = Path(folder), Path(out)
    facts = TargetFacts.of_folder(target)
    tables = {EMBEDDING: partial(read_target_embedding, facts), LM_HEAD: partial(read_target_lm_head, facts)}
    draft = read_draft(folder, facts, options, tables if (Path(target) / CONFIG).is_file() else {})
    origin = export_info(folder)
    step = int(origin.get("step") or 0)
    with new_export(out, step, overwrite) as part:
        draft.save_pretrained(part)
        info = {
            "schema": 1,
            "imported_from": str(folder),
            "step": step,
            "steps_trained": origin.get("steps_trained"),
            "draft": draft.config.model_type,
            "parameters": draft.num_parameters(),
            "target": facts.to_dict(),
            "data_fingerprint": origin.get("data_fingerprint"),
            "validation": origin.get("validation"),
        }
        write_json(part / EXPORT_INFO, info)
    return out


def is_export(folder: Path) -> bool:
    """Whether the folder holds a draft in a format of an engine: an export, or a third-party draft."""
    return recognize(EngineConfig(read_config(folder))) is not None


def load_export(folder: Path, target: sage.Target) -> DraftHead:
    """Loads an export, or a third-party draft, on the target's device and in its dtype; `sage.load_draft` calls it.

    Raises:
        ValueError: it cannot be expressed, or is not for this target.
    """
    modules = {} if target.is_meta else {EMBEDDING: target.embed_tokens, LM_HEAD: target.lm_head}
    tables = {name: partial(module.weight.detach().to, "cpu") for name, module in modules.items()}
    facts = TargetFacts.of_config(target.model.config, target.name)
    stored = export_info(folder).get("target") or {}
    facts = replace(facts, adapter=stored.get("adapter"), adapter_path=stored.get("adapter_path"))
    check_target(facts.fingerprint, target, folder)
    draft = read_draft(folder, facts, tables=tables)
    draft.to(device=target.device, dtype=target.dtype)
    if not target.is_meta:
        draft.borrow(target)
    return draft


def read_draft(
    folder: Path, facts: TargetFacts, options: ImportOptions | None = None, tables: Mapping[str, Table] | None = None
) -> DraftHead:
    """Reads a third-party draft as a draft of this package, in the dtype of its file.

    Args:
        folder: contains config.json and model.safetensors, shards, or a pytorch_model.bin of tensors only.
        tables: the target's, to compare with those of the folder.

    Raises:
        ValueError: names the field or tensor that is wrong, missing, or cannot be expressed.
    """
    config = EngineConfig(read_config(folder))
    if config.is_sage_draft:
        raise ValueError(f"{folder}: already a draft of this package; sage-validate and sage-generate load it as it is")
    format_ = recognize(config)
    if format_ is None or not format_.row.imports:
        found = config.raw.get("architectures") or config.raw.get("model_type")
        raise ValueError(f"{folder / CONFIG}: {found} is not an {imported_drafts()} draft; only those can be imported")
    return format_.read(folder, facts, options or ImportOptions(), tables or {})
