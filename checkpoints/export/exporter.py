"""Exports a trained draft to a folder that serving engines load: check compatibility, write, validate, reload, describe.

The card of a folder, from card.md.jinja, reports figures that were not measured and a license that was not given as missing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, StrictUndefined
from safetensors.torch import save_file

from checkpoints import run_folder
from checkpoints.export.folder import CONFIG, WEIGHTS, new_export
from checkpoints.export.formats import find_format
from checkpoints.export.formats.base import SPECULATIVE_TOKENS, ExportFormat, ImportOptions
from checkpoints.export.importer import CheckResult, InvalidExport, check_folder
from checkpoints.export.registry import imported_drafts
from checkpoints.export.serving import COMPRESSOR, check_compatible, engines_for
from checkpoints.export.target import MERGED, TargetFacts
from checkpoints.vllm_plugin import INSTALL_PLUGIN
from sage.bench.report_table import measured_with
from sage.drafts.head import DraftHead
from sage.drafts.location import EXPORT_INFO, find_draft
from sage.drafts.registry import head_kind, resolve
from sage.io.dtypes import dtype_name
from sage.io.files import read_json, write_json, write_text
from sage.io.manifest import refuse_corrupt_draft
from sage.io.model_files import load_weights, read_config
from sage.targets import is_target_folder
from sage.trees import AUTOREGRESSIVE

logger = logging.getLogger(__name__)

CARD, CARD_TEMPLATE = "README.md", Path(__file__).with_name("card.md.jinja")
MAX_LORA_RANK = 64  # of the adapters that vLLM is started for
OMITTED = f"{COMPRESSOR}."  # prefix of tensors that the user allows to leave out, see check_compatible
REPORT_SETTINGS = ("step", "target", "device", "dtype", "prompts", "repeats", "max_new_tokens", "temperature", "seed")
RECIPE = (  # keys of the configuration that the card lists, or groups of them
    *("seed", "data.num_examples", "data.max_length", "launch.gpus", "launch.ranks"),
    *("draft", "objective", "optim", "train", "deepspeed"),
)


@dataclass(kw_only=True)
class ExportOptions:
    """Options of an export."""

    flavour: str | None = None  # the engine, for a format that differs between engines
    dtype: torch.dtype = torch.bfloat16  # dtype of the weights
    target: str | None = None  # the target's folder or hub id; None = the one in the draft's config.json
    target_name: str | None = None  # the target's name in configs and commands; None = as it was loaded
    embedding: bool | None = None  # write the target's embedding too; None = the format's default
    overwrite: bool = False  # replace an existing export
    name: str | None = None  # the export's name in the card's commands; None = its folder
    report: str | None = None  # the report.json with the card's measurements, or its folder; None = the run's own
    # license, license_link: for the model card; None = not stated
    license: str | None = None
    license_link: str | None = None
    converter: str | None = None  # source folder of llama.cpp, whose converter the format `gguf` calls
    allow_unserved: bool = False  # export although no engine serves the target's family
    allow_uncompressed: bool = False  # export without the draft's visual compressor


@dataclass(frozen=True, kw_only=True)
class DraftSource:
    """A draft and its origin."""

    draft: Path  # folder of the trained draft
    run: Path | None = None  # the run that contains it, if any
    step: int | None = None  # optimizer steps it was trained for; None if unknown
    recipe: dict[str, Any] = field(default_factory=dict)  # the run's configuration when the draft was saved
    recipe_changes: list[str] = field(default_factory=list)  # earlier changes of the recipe, one line each
    provenance: dict[str, Any] = field(default_factory=dict)  # the run's provenance.json
    # the validation report of this draft: the run's own, unless `with_report` chose another
    report: dict[str, Any] | None = None


@dataclass(frozen=True)
class ExportResult:
    """A finished export."""

    folder: Path
    format: ExportFormat
    options: ExportOptions
    source: DraftSource
    facts: TargetFacts
    check: CheckResult
    # effect of rounding to the export's dtype: largest difference of outputs, and their `ExportFormat.agreement`
    max_abs_difference: float
    agreement: float
    warnings: list[str]  # what differs from training, as complete sentences
    speculative_tokens: int  # drafted tokens per round in the card's commands

    @property
    def name(self) -> str:
        """The name in commands: the hub id it is uploaded to, or its folder."""
        return self.options.name or str(self.folder)

    @property
    def dtype(self) -> str:
        """Name of the dtype of the weights."""
        return dtype_name(self.options.dtype)


def export(path: Path | str, out: Path | str, name: str, options: ExportOptions | None = None) -> ExportResult:
    """Exports a draft, from its folder or that of its run, to a format that engines serve; `out` is written atomically.

    Args:
        name: of the format.

    Raises:
        ValueError: the format cannot express the draft, `out` exists, or the target is unknown.
        InvalidExport: the written export would not compute what the draft computes; `out` is unchanged.
    """
    out, options = Path(out), options or ExportOptions()
    chosen = find_format(name, options.flavour)
    source = find_source(Path(path))
    if options.report is not None:
        source = with_report(source, Path(options.report))
    trained = load_trained(source.draft)
    format_ = chosen.for_draft(trained.config)
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
        served = replace(named, name=options.target_name or MERGED) if facts.adapter else named
        write_json(part / CONFIG, format_.config(trained.config, served, options.dtype))
        try:
            check = check_folder(part, named)
            check.raise_if_invalid()
            gap, agreement = check_reload(part, format_, trained, named)
        except InvalidExport as error:
            raise InvalidExport(str(error).replace(str(part), str(out))) from error
        format_.complete(part, facts, options.dtype, options.converter)
        num_tokens = format_.most_tokens(trained.config) or SPECULATIVE_TOKENS
        result = ExportResult(out, format_, options, source, named, check, gap, agreement, warnings, num_tokens)
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
    """Reads the facts from `target`, else from the folder the draft was trained with, else from the draft's config."""
    trained_with = config.target_path
    if target is None and not (trained_with and (Path(trained_with) / CONFIG).is_file()):
        logger.info("the target %s is not available; its facts are read from the draft's config.json", trained_with)
        return TargetFacts.of_draft(config).adapted(config)
    return TargetFacts.of_folder(target or trained_with).adapted(config)


@torch.no_grad()
def check_reload(folder: Path, format_: ExportFormat, trained: DraftHead, facts: TargetFacts) -> tuple[float, float]:
    """Reloads an export and compares it with the trained draft, which is rounded to the export's dtype in place.

    A fixed batch of seeded noise is passed through both. With the trained draft's weights rounded to the export's dtype, the
    outputs must be bit-identical; the largest difference by rounding and the agreement in spite of it are returned.

    Raises:
        InvalidExport: the outputs differ.
    """
    exported = format_.read(folder, facts, ImportOptions(image_inputs=getattr(trained.config, "image_inputs", None)))
    original = format_.outputs(trained)
    rounded, reloaded = format_.outputs(trained.to(exported.dtype)), format_.outputs(exported)
    if not torch.equal(rounded, reloaded):
        gap = float((rounded.float() - reloaded.float()).abs().max())
        raise InvalidExport(f"{folder}: reloaded, its outputs differ from the trained draft's by up to {gap:.3g}")
    before, after = original.float(), reloaded.float()
    return float((before - after).abs().max()), float(format_.agreement(before, after))


def _export_info(result: ExportResult, trained: DraftHead) -> dict[str, Any]:
    """Returns the content of sage_export.json, for which the engines' config.json has no fields."""
    source, config = result.source, trained.config
    return {
        "schema": 1,
        "format": result.format.name,
        "flavour": result.format.flavour,
        "dtype": result.dtype,
        "step": source.step or 0,
        "steps_trained": source.step,
        "draft": config.model_type,
        "parameters": sum(weight.numel() for name, weight in trained.named_parameters() if not name.startswith(OMITTED)),
        "image_inputs": getattr(config, "image_inputs", None),
        "feature_levels": list(getattr(config, "feature_levels", [])),
        "target": asdict(result.facts),
        "data_fingerprint": source.provenance.get("data_fingerprint"),
        "git": source.provenance.get("git"),
        "rounding": {"largest_difference": result.max_abs_difference, "same_choice": result.agreement},
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
        recipe_changes=run_folder.recipe_changes(run, step),
        provenance=read_json(run / run_folder.PROVENANCE) if (run / run_folder.PROVENANCE).is_file() else {},
        report=run_folder.draft_report(draft),
    )


def with_report(source: DraftSource, path: Path) -> DraftSource:
    """Replaces the run's own measurement by a report.json or its folder; ValueError for that of another step."""
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
    """Loads a draft of this package without its target, in the dtype it was saved in; ValueError for anything else."""
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


# -- the model card -----------------------------------------------------------------------------------------------------


def render_card(card: ExportResult) -> str:
    """Renders the card as Markdown, with the hub's metadata at the top."""
    pages = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
    pages.filters["json"] = json.dumps
    license_, name, known = card.options.license or "not stated", card.facts.name or "", card.source.provenance
    install = f" (`{INSTALL_PLUGIN}` in vLLM's environment)" if card.format.needs_plugin(card.facts) else ""
    return pages.from_string(CARD_TEMPLATE.read_text(encoding="utf-8")).render(
        card=card,
        facts=card.facts,
        format=card.format,
        source=card.source,
        title=Path(card.name).name,
        is_hub_id=name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(name).exists(),
        measured_with=measured_with(card.source.report or {}),
        commands=serve_commands(card.format, card.facts, card.name, card.speculative_tokens),
        lora_command=lora_command(card),
        notes={"SGLang": " (as it documents; this project has not run it)", "vLLM": install},
        target=name or "TARGET",
        known=known,
        versions=[f"{name} {version}" for name, version in (known.get("versions") or {}).items() if version],
        settings=_settings(card.source),
        license=f"{license_[0].upper()}{license_[1:]}",
    )


def serve_commands(format_: ExportFormat, facts: TargetFacts, draft: str, tokens: int = SPECULATIVE_TOKENS) -> dict[str, str]:
    """Returns the command line for each engine with the export's folder or hub id; empty if no engine serves the family.

    A target with an adapter is merged by `facts.merge_command` before.
    """
    target = MERGED if facts.adapter else facts.name or "TARGET"
    return {engine: format_.serve_command(engine, target, draft, tokens) for engine in engines_for(format_, facts)}


def lora_command(card: ExportResult) -> str:
    """Returns the command line of vLLM for a target beside its adapter; empty without one, or where that was not checked."""
    format_, facts = card.format, card.facts
    is_checked = "vLLM" in engines_for(format_, facts) and not format_.needs_plugin(facts) and not format_.names_target
    if not facts.adapter or not is_checked:
        return ""
    command = format_.serve_command("vLLM", facts.name or "TARGET", card.name, card.speculative_tokens)
    return f"{command} \\\n  --enable-lora --max-lora-rank {MAX_LORA_RANK} --lora-modules adapted={facts.adapter_path}"


def _settings(source: DraftSource) -> dict[str, Any]:
    """Returns the settings of the run that the card lists, by dotted key, without folders of the training machine."""
    settings = {
        key: value
        for key, value in run_folder.dotted_keys(source.recipe).items()
        if value not in (None, "", [], {}) and not key.endswith((".path", ".dir"))
    }
    return {key: settings[key] for name in RECIPE for key in settings if key == name or key.startswith(f"{name}.")}
