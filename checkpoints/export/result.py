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

RECIPE = (  # keys of the configuration that the card lists, or groups of them
    *("seed", "data.num_examples", "data.max_length", "launch.gpus", "launch.ranks"),
    *("draft", "objective", "optim", "train", "deepspeed"),
)
NOT_RUN = {"SGLang": " (as it documents; this project has not run it)"}


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
    license_, name, known = card.options.license or "not stated", card.facts.name or "", card.source.provenance
    install = f" (`{INSTALL_PLUGIN}` in vLLM's environment)" if card.format.needs_plugin(card.facts) else ""
    return pages.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        card=card,
        facts=card.facts,
        format=card.format,
        source=card.source,
        title=Path(card.name).name,
        is_hub_id=name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(name).exists(),
        measured_with=measured_with(card.source.report or {}),
        commands=serve_commands(card.format, card.facts, card.name, card.speculative_tokens),
        notes={**NOT_RUN, "vLLM": install},
        target=name or "TARGET",
        known=known,
        versions=[f"{name} {version}" for name, version in (known.get("versions") or {}).items() if version],
        settings=_settings(card.source),
        license=f"{license_[0].upper()}{license_[1:]}",
    )


def serve_commands(format_: ExportFormat, facts: TargetFacts, draft: str, tokens: int = SPECULATIVE_TOKENS) -> dict[str, str]:
    """Returns the command line for each engine with the export's folder or hub id; empty if no engine serves the family."""
    target = facts.name or "TARGET"
    return {engine: format_.serve_command(engine, target, draft, tokens) for engine in engines_for(format_, facts)}


def _settings(source: DraftSource) -> dict[str, Any]:
    """Returns the settings of the run that the card lists, by dotted key, without folders of the training machine."""
    settings = {
        key: value
        for key, value in dotted_keys(source.recipe).items()
        if value not in (None, "", [], {}) and not key.endswith((".path", ".dir"))
    }
    return {key: settings[key] for name in RECIPE for key in settings if key == name or key.startswith(f"{name}.")}
