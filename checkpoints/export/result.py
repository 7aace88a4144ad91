"""What an export is made of and what it results in: options, the draft and its origin, the finished folder, and its README.md.

The card, from card.md.jinja, reports figures that were not measured and a license that was not given as missing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jinja2 import Environment, StrictUndefined

from checkpoints.export.checks import CheckResult
from checkpoints.export.formats.base import SPECULATIVE_TOKENS, ExportFormat
from checkpoints.export.serving import engines_for
from checkpoints.export.target import TargetFacts
from checkpoints.run_folder import dotted_keys
from checkpoints.vllm_plugin import INSTALL_PLUGIN
from sage.bench.report_table import measured_with
from sage.io.dtypes import dtype_name
from sage.io.tables import markdown_table

RECIPE = (  # keys of the configuration that the card lists, or groups of them
    *("seed", "data.num_examples", "data.max_length", "launch.gpus", "launch.ranks"),
    *("draft", "objective", "optim", "train", "deepspeed"),
)
NOT_RUN = {"SGLang": " (as it documents; this project has not run it)"}
COLUMNS = {  # of the table of policies -> the figure of a report
    "policy": "`{name}`",
    "tokens per target pass": "{tokens_per_target_pass:.2f}",
    "mean accepted draft": "{mean_accepted_draft:.2f}",
    "tokens/s": "{tokens_per_s:.1f}",
    "speedup": "{speedup:.2f}x",
    "end to end": "{speedup_end_to_end:.2f}x",
    "identical": "{match}/{total}",
}


TEMPLATE = Path(__file__).with_name("card.md.jinja")


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


class RoundingError(NamedTuple):
    """Effect of rounding to the export's dtype: largest difference of outputs, and their `ExportFormat.agreement`."""

    max_abs_difference: float
    agreement: float


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
    check: CheckResult  # the findings of `check_folder`
    rounding: RoundingError
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


# -- the model card -----------------------------------------------------------------------------------------------------


def render_card(card: ExportResult) -> str:
    """Renders the card as Markdown, with the hub's metadata at the top."""
    pages = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
    pages.filters["json"] = json.dumps
    report, license_ = card.source.report or {}, card.options.license or "not stated"
    policies = report.get("policies", {}).items()
    rows = [[column.format(name=name, **figures) for column in COLUMNS.values()] for name, figures in policies]
    install = f" (`{INSTALL_PLUGIN}` in vLLM's environment)" if card.format.needs_plugin(card.facts) else ""
    return pages.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        card=card,
        facts=card.facts,
        format=card.format,
        source=card.source,
        title=Path(card.name).name,
        metadata=_metadata(card),
        table=markdown_table(list(COLUMNS), rows),
        measured_with=measured_with(report),
        commands=serve_commands(card.format, card.facts, card.name, card.speculative_tokens),
        notes={**NOT_RUN, "vLLM": install},
        target=card.facts.name or "TARGET",
        training=_training(card.source),
        license=f"{license_[0].upper()}{license_[1:]}",
    )


def serve_commands(format_: ExportFormat, facts: TargetFacts, draft: str, tokens: int = SPECULATIVE_TOKENS) -> dict[str, str]:
    """Returns the command line for each engine with the export's folder or hub id; empty if no engine serves the family."""
    target = facts.name or "TARGET"
    return {engine: format_.serve_command(engine, target, draft, tokens) for engine in engines_for(format_, facts)}


def _metadata(card: ExportResult) -> dict[str, Any]:
    """The hub's metadata; JSON values are valid YAML without quoting rules."""
    fields: dict[str, Any] = {"license": card.options.license or "other"}
    if card.options.license is None:
        fields["license_name"] = "not-stated"
    if card.options.license_link:
        fields["license_link"] = card.options.license_link
    name = card.facts.name or ""
    if name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(name).exists():  # a hub id
        fields |= {"base_model": name, "base_model_relation": "adapter"}
    task = "image-text-to-text" if card.facts.has_images else "text-generation"
    return fields | {"pipeline_tag": task, "tags": ["speculative-decoding", card.format.name, "sage-draft"]}


def _training(source: DraftSource) -> list[str]:
    """Returns the lines about data, code, versions and settings of the run; none without a run."""
    if not source.recipe:
        return []
    settings = {
        key: value
        for key, value in dotted_keys(source.recipe).items()
        if value not in (None, "", [], {}) and not key.endswith((".path", ".dir"))  # folders of the training machine
    }
    listed = [key for name in RECIPE for key in settings if key == name or key.startswith(f"{name}.")]
    lines = [f"* `{key}`: {settings[key]}" for key in listed]
    known = source.provenance
    data = source.recipe.get("data") or {}
    names = ", ".join(map(str, data.get("sources") or [data.get("name", "not stated")]))
    origin = [f"* data: {names} (fingerprint `{known.get('data_fingerprint', 'unknown')}`)"]
    if commit := (known.get("git") or {}).get("commit"):
        origin.append(f"* code: {commit}{' with uncommitted changes' if known['git'].get('is_dirty') else ''}")
    versions = ", ".join(f"{name} {value}" for name, value in (known.get("versions") or {}).items() if value)
    origin += [f"* versions: {versions}"] if versions else []
    changed = [f"* recipe changed {line}" for line in source.recipe_changes]
    method = "Online distillation: features and logits of the frozen target are computed in the training step."
    return [method, "", *origin, *lines, *changed]
