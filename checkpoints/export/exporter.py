"""Exports a trained draft to a folder that serving engines load: check compatibility, write, validate, reload, describe."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from checkpoints import run_folder
from checkpoints.export.checks import InvalidExport, check_folder
from checkpoints.export.folder import CONFIG, WEIGHTS, new_export
from checkpoints.export.formats.base import ExportFormat
from checkpoints.export.formats.records import ImportOptions
from checkpoints.export.formats.registry import find_format, imported_drafts
from checkpoints.export.result import DraftSource, ExportOptions, ExportResult, RoundingError, render_card
from checkpoints.export.serving import COMPRESSOR, check_compatible, image_inputs_of
from checkpoints.export.target import TargetFacts
from sage.drafts.head import DraftHead
from sage.drafts.location import EXPORT_INFO, find_draft
from sage.drafts.registry import head_kind, resolve
from sage.io.files import read_json, write_json, write_text
from sage.io.manifest import refuse_corrupt_draft
from sage.io.model_files import load_weights, read_config
from sage.targets import is_target_folder
from sage.trees import AUTOREGRESSIVE

logger = logging.getLogger(__name__)

CARD = "README.md"
SCHEMA = 1
OMITTED = f"{COMPRESSOR}."  # prefix of tensors that the user allows to leave out, see check_compatible
REPORT_SETTINGS = ("step", "target", "device", "dtype", "prompts", "repeats", "max_new_tokens", "temperature", "seed")


def export(path: Path | str, out: Path | str, name: str, options: ExportOptions | None = None) -> ExportResult:
    """Exports a draft, from its folder or that of its run, to a format that engines serve; `out` is written atomically.

    Args:
        name: of the format.

    Raises:
        ValueError: the format cannot express the draft, `out` exists, or the target is unknown.
        InvalidExport: the written export would not compute what the draft computes; `out` is unchanged.
    """
    out, options = Path(out), options or ExportOptions()
    format_ = find_format(name, options.flavour)
    source = find_source(Path(path))
    if options.report is not None:
        source = with_report(source, Path(options.report))
    trained = load_trained(source.draft)
    facts = find_facts(trained.config, options.target)
    allowed = {"target": options.allow_unserved, f"draft.{COMPRESSOR}": options.allow_uncompressed}
    warnings = [*check_compatible(trained.config, facts, format_, allowed), *speed_warnings(source.report or {})]
    state = {name: tensor.detach().cpu() for name, tensor in trained.state_dict().items() if not name.startswith(OMITTED)}
    tables = format_.target_tensors(trained, facts, options.embedding)
    tensors = format_.tensors(state, options.dtype) | {name: table.to(options.dtype) for name, table in tables.items()}
    named = replace(facts, name=options.target_name) if options.target_name else facts
    with new_export(out, source.step or 0, options.overwrite) as part:
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, part / WEIGHTS, metadata={"format": "pt"})
        write_json(part / CONFIG, format_.config(trained.config, named, options.dtype))
        try:
            check = check_folder(part, named)
            check.raise_if_invalid()
            rounding = check_reload(part, format_, trained, named)
        except InvalidExport as error:
            raise InvalidExport(str(error).replace(str(part), str(out))) from error
        format_.complete(part, facts, options.dtype, options.converter)
        num_tokens = format_.speculative_tokens(trained.config)
        result = ExportResult(out, format_, options, source, named, check, rounding, warnings, num_tokens)
        write_json(part / EXPORT_INFO, _export_info(result, trained))
        write_text(part / CARD, render_card(result))
    return result


def speed_warnings(report: Mapping[str, Any]) -> list[str]:
    """Returns a warning about a draft with which decoding was slower than without one in its validation."""
    speedups = [figures["speedup"] for name, figures in report.get("policies", {}).items() if name != AUTOREGRESSIVE]
    if not speedups or max(speedups) >= 1:
        return []
    return [f"Slower than decoding without a draft in its validation: {max(speedups):.2f}x at best; sage-validate states why."]


def find_facts(config: Any, target: str | None) -> TargetFacts:
    """Reads the facts from `target`, else from the folder the draft was trained with, else from the draft's config.

    Raises:
        ValueError: the target's config cannot be read.
    """
    trained_with = config.target_path
    if target is None and not (trained_with and (Path(trained_with) / CONFIG).is_file()):
        logger.info("the target %s is not available; its facts are read from the draft's config.json", trained_with)
        return TargetFacts.of_draft(config).adapted(config)
    return TargetFacts.of_folder(target or trained_with).adapted(config)


@torch.no_grad()
def check_reload(folder: Path, format_: ExportFormat, trained: DraftHead, facts: TargetFacts) -> RoundingError:
    """Reloads an export and compares it with the trained draft, which is rounded to the export's dtype in place.

    A fixed batch of seeded noise is passed through both. With the trained draft's weights rounded to the export's dtype, the
    outputs must be bit-identical; the rounding error itself is returned.

    Raises:
        InvalidExport: the outputs differ.
    """
    exported = format_.read(folder, facts, ImportOptions(image_inputs=image_inputs_of(trained.config)))
    original = format_.outputs(trained)
    rounded, reloaded = format_.outputs(trained.to(exported.dtype)), format_.outputs(exported)
    if not torch.equal(rounded, reloaded):
        gap = float((rounded.float() - reloaded.float()).abs().max())
        raise InvalidExport(f"{folder}: reloaded, its outputs differ from the trained draft's by up to {gap:.3g}")
    before, after = original.float(), reloaded.float()
    return RoundingError(float((before - after).abs().max()), float(format_.agreement(before, after)))


def _export_info(result: ExportResult, trained: DraftHead) -> dict[str, Any]:
    """Returns the content of sage_export.json, for which the engines' config.json has no fields."""
    source, config = result.source, trained.config
    return {
        "schema": SCHEMA,
        "format": result.format.name,
        "flavour": result.format.flavour,
        "dtype": result.dtype,
        "step": source.step or 0,
        "steps_trained": source.step,
        "draft": config.model_type,
        "parameters": sum(weight.numel() for name, weight in trained.named_parameters() if not name.startswith(OMITTED)),
        "image_inputs": image_inputs_of(config),
        "feature_levels": list(getattr(config, "feature_levels", [])),
        "target": result.facts.to_dict(),
        "data_fingerprint": source.provenance.get("data_fingerprint"),
        "git": source.provenance.get("git"),
        "rounding": {"largest_difference": result.rounding.max_abs_difference, "same_choice": result.rounding.agreement},
        "warnings": result.warnings,
        "validation": summarize_report(source.report),
    }


# -- the draft to export --------------------------------------------------------------------------------------------------


def find_source(path: Path) -> DraftSource:
    """Finds the draft that `path` names (see `find_draft`), and the run that contains it; ValueError if there is no draft."""
    draft = find_draft(path)
    run = run_folder.run_of(draft)
    if run is None:
        return DraftSource(draft=draft)
    step = run_folder.draft_step(draft)
    return DraftSource(
        draft=draft,
        run=run,
        step=step,
        recipe=run_folder.read_run_config(run, step),
        recipe_changes=run_folder.describe_recipe_changes(run, step),
        provenance=read_json(run / run_folder.PROVENANCE) if (run / run_folder.PROVENANCE).is_file() else {},
        report=run_folder.draft_report(draft),
    )


def with_report(source: DraftSource, path: Path) -> DraftSource:
    """Replaces the run's own measurement by another report.json (or the folder that contains it), e.g. of a later check.

    Raises:
        ValueError: there is no report, or it measured the draft after another number of steps.
    """
    report = run_folder.read_report(path / run_folder.REPORT if path.is_dir() else path)
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
    head: DraftHead = load_weights(resolve(kind.draft), folder, "draft", dtype="auto")
    return head.eval()
