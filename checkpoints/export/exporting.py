"""From a trained draft to a folder that an engine serves: refuse, write, check, reload, describe, seal."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoints.export.card import CardFacts, render_card
from checkpoints.export.expressible import COMPRESSOR, Allowed, check_expressible
from checkpoints.export.facts import TargetFacts
from checkpoints.export.folder import CONFIG, WEIGHTS
from checkpoints.export.formats.eagle import eagle_config, eagle_tensors
from checkpoints.export.formats.eagle3 import eagle3_config, eagle3_tensors
from checkpoints.export.formats.embedding import ENDING, target_embedding
from checkpoints.export.formats.layout import Flavour, Format
from checkpoints.export.formats.speculators import speculators_config, speculators_tensors
from checkpoints.export.reload import Reload, compare_reload
from checkpoints.export.source import Source, find_source, headline, load_trained
from checkpoints.export.validator.findings import BadExport, Check
from checkpoints.export.validator.validator import check_folder
from checkpoints.export.writing import ABOUT, writing
from sage.drafts import DraftHead
from sage.dtypes import dtype_name
from sage.files import write_text

logger = logging.getLogger(__name__)

CARD = "README.md"
SCHEMA = 1


@dataclass(kw_only=True)
class Options:
    """How to export.

    Attributes:
        flavour: the engine, for the format `eagle`.
        dtype: of the weights.
        target: folder or hub id; None = where the draft remembers it from.
        target_name: how commands and configs are to call the target; None = as it was loaded.
        embedding: write the target's embedding too; None = as the format wants it (`speculators` does).
        name: what commands on the card call the export; None = its folder.
        draft: which draft of a run (`draft`, `draft_best`); None = the best.
    """

    flavour: Flavour | None = None
    dtype: torch.dtype = torch.bfloat16
    target: str | None = None
    target_name: str | None = None
    embedding: bool | None = None
    overwrite: bool = False
    name: str | None = None
    draft: str | None = None
    licence: str | None = None
    licence_link: str | None = None
    allowed: Allowed = field(default_factory=Allowed)


@dataclass(frozen=True)
class Exported:
    """A finished export: its folder, what the check said, what rounding cost, and what is lost."""

    folder: Path
    source: Source
    check: Check
    reload: Reload
    warnings: list[str]


def export(path: Path | str, out: Path | str, format_: Format | str, options: Options | None = None) -> Exported:
    """Exports a run's draft, or any draft of ours, into a format that engines serve.

    Args:
        path: a run's folder or a draft's.
        out: the folder to write; it appears whole or not at all.
        format_: one of `Format`.

    Raises:
        ValueError: the draft cannot be expressed in the format, something is in the way at `out`, or the target is unknown.
        BadExport: the written export would not compute what the draft does; `out` is not touched.
    """
    out, format_, options = Path(out), _format(format_), options or Options()
    source = find_source(Path(path), options.draft)
    trained = load_trained(source.draft)
    facts = find_facts(trained.config, options.target)
    check_expressible(trained, facts, format_, options.flavour, options.allowed)
    tensors = _tensors(trained, format_, options)
    if _wants_embedding(format_, options):
        tensors[ENDING] = target_embedding(facts).to(options.dtype)
    if options.target_name:
        facts = replace(facts, name=options.target_name)
    with writing(out, source.step or 0, options.overwrite) as part:
        save_file(tensors, part / WEIGHTS, metadata={"format": "pt"})
        write_text(part / CONFIG, _json(_config(trained.config, facts, format_, options)))
        check, reload = _prove(part, out, trained, facts)
        write_text(part / ABOUT, _json(_about(trained, source, facts, format_, options, reload)))
        write_text(part / CARD, _card(out, source, facts, format_, options, reload))
    return Exported(out, source, check, reload, options.allowed.warnings)


def _prove(part: Path, out: Path, trained: DraftHead, facts: TargetFacts) -> tuple[Check, Reload]:
    """Validator and reload, on what is on disk; their messages name the folder the user knows."""
    try:
        check = check_folder(part, facts)
        check.raise_if_bad()
        return check, compare_reload(part, trained, facts)
    except BadExport as error:
        raise BadExport(str(error).replace(str(part), str(out))) from error


def find_facts(config: Any, target: str | None) -> TargetFacts:
    """The target's facts: from the folder named, else from where the draft remembers it, else from the draft's own memory.

    Raises:
        ValueError: `target` was named and cannot be read.
    """
    if target is not None:
        return TargetFacts.of_folder(target)
    remembered = config.target_path
    if remembered and (Path(remembered) / CONFIG).is_file():
        return TargetFacts.of_folder(remembered)
    logger.info("the target %s is not at hand; its facts are those the draft remembers", remembered)
    return TargetFacts.of_draft(config)


def _format(name: Format | str) -> Format:
    try:
        return Format(name)
    except ValueError as error:
        raise ValueError(f"--format {name}: unknown; choose one of {', '.join(Format)}") from error


def _tensors(trained: DraftHead, format_: Format, options: Options) -> dict[str, Tensor]:
    state = {name: tensor.detach().cpu() for name, tensor in trained.state_dict().items() if not _is_left_behind(name)}
    if format_ == Format.eagle:
        assert options.flavour is not None
        found = eagle_tensors(state, options.dtype, options.flavour)
    else:
        found = {Format.eagle3: eagle3_tensors, Format.speculators: speculators_tensors}[format_](state, options.dtype)
    return {name: tensor.contiguous() for name, tensor in found.items()}


def _is_left_behind(name: str) -> bool:
    return name.startswith(f"{COMPRESSOR}.")  # check_expressible has asked the user


def _config(draft: Any, facts: TargetFacts, format_: Format, options: Options) -> dict[str, Any]:
    if format_ == Format.eagle:
        assert options.flavour is not None
        return eagle_config(draft, facts, options.dtype, options.flavour)
    return {Format.eagle3: eagle3_config, Format.speculators: speculators_config}[format_](draft, facts, options.dtype)


def _wants_embedding(format_: Format, options: Options) -> bool:
    return format_ == Format.speculators if options.embedding is None else options.embedding


def _about(
    trained: DraftHead, source: Source, facts: TargetFacts, format_: Format, options: Options, reload: Reload
) -> dict[str, Any]:
    """What sage_export.json says: everything about the draft that the engines' config has no field for."""
    config = trained.config
    return {
        "schema": SCHEMA,
        "format": str(format_),
        "flavour": str(options.flavour) if options.flavour else None,
        "dtype": dtype_name(options.dtype),
        "step": source.step or 0,
        "steps_trained": source.step,
        "draft": config.model_type,
        "parameters": sum(weight.numel() for name, weight in trained.named_parameters() if not _is_left_behind(name)),
        "image_inputs": config.image_inputs,
        "feature_levels": list(getattr(config, "feature_levels", [])),
        "target": facts.to_dict(),
        "data_fingerprint": source.provenance.get("data_fingerprint"),
        "git": source.provenance.get("git"),
        "rounding": {"largest_difference": reload.largest, "same_choice": reload.same_choice},
        "warnings": list(options.allowed.warnings),
        "validation": headline(source.report),
    }


def _card(out: Path, source: Source, facts: TargetFacts, format_: Format, options: Options, reload: Reload) -> str:
    return render_card(
        CardFacts(
            name=options.name or str(out),
            format=format_,
            flavour=options.flavour,
            facts=facts,
            source=source,
            reload=reload,
            dtype=dtype_name(options.dtype),
            warnings=options.allowed.warnings,
            licence=options.licence,
            licence_link=options.licence_link,
        )
    )


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"
