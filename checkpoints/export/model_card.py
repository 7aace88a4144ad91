"""README.md of an export: summary, measurements, serve commands, training recipe, license.

Figures that were not measured and a license that was not given are reported as missing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from checkpoints.export.formats.base import SPECULATIVE_TOKENS, ExportFormat
from checkpoints.export.result import ExportResult
from checkpoints.export.serving import engines_for
from checkpoints.export.target import TargetFacts
from checkpoints.run_folder import dotted_keys
from checkpoints.vllm_plugin import INSTALL_PLUGIN
from sage.bench.report_table import measured_with
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


def render_card(card: ExportResult) -> str:
    """Renders the card as Markdown, with the hub's metadata at the top."""
    sections = (_front_matter, _summary, _warnings, _measurements, _serving, _checks, _recipe, _license)
    parts = [section(card) for section in sections]
    return "\n\n".join(part for part in parts if part) + "\n"


MERGE_FIRST = (  # a draft of an engine is given the target's features without an adapter
    "Engines serve this draft with the adapter merged into the target: merge {} with PEFT (`merge_and_unload`, "
    "`save_pretrained`), and give that folder as the model."
)


def serve_commands(format_: ExportFormat, facts: TargetFacts, draft: str, tokens: int = SPECULATIVE_TOKENS) -> dict[str, str]:
    """Returns the command line for each engine with the export's folder or hub id; empty if no engine serves the family."""
    target = facts.name or "TARGET"
    return {engine: format_.serve_command(engine, target, draft, tokens) for engine in engines_for(format_, facts)}


def _front_matter(card: ExportResult) -> str:
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
    fields |= {"pipeline_tag": task, "tags": ["speculative-decoding", card.format.name, "sage-draft"]}
    return "\n".join(["---", *(f"{key}: {json.dumps(value)}" for key, value in fields.items()), "---"])


def _summary(card: ExportResult) -> str:
    facts, kind = card.facts, f"`{card.format.name}`" + (f" ({card.format.flavour})" if card.format.flavour else "")
    steps = f"trained for {card.source.step} steps" if card.source.step is not None else "number of training steps unknown"
    adapter = f", with the adapter **{facts.adapter_path}** in its weights" if facts.adapter else ""
    changed = (f", quantized ({facts.quantization})" if facts.quantization else "") + adapter
    return (
        f"# {Path(card.name).name}\n\n"
        f"A draft head for speculative decoding with **{facts.name or facts.model_type}** ({facts.architecture}: "
        f"{facts.num_layers} layers, hidden size {facts.hidden_size}, vocabulary {facts.vocab_size}{changed}), {steps}, in the "
        f"format {kind}, {card.dtype}. Speculative decoding is lossless: the draft changes the target's speed, not its output."
    )


def _warnings(card: ExportResult) -> str:
    return "\n".join(["## Limitations", "", *(f"* {warning}" for warning in card.warnings)]) if card.warnings else ""


def _measurements(card: ExportResult) -> str:
    report = card.source.report
    if report is None:
        return "## Measurements\n\nNothing was measured: the run has no report for this draft."
    policies = report["policies"].items()
    rows = [[column.format(name=name, **figures) for column in COLUMNS.values()] for name, figures in policies]
    table = markdown_table(list(COLUMNS), rows)
    note = (
        f"Measured with this project's lossless decoder, not with a serving engine: {measured_with(report)}, "
        f"target {report['target']}, seed {report['seed']}. Speedups are relative to the fastest autoregressive decoder of the "
        f"same run; *identical* counts outputs that equal the target's own."
    )
    return f"## Measurements\n\n{table}\n\n{note}"


def _serving(card: ExportResult) -> str:
    commands = serve_commands(card.format, card.facts, card.name, card.speculative_tokens)
    install = f" (`{INSTALL_PLUGIN}` in vLLM's environment)" if card.format.needs_plugin(card.facts) else ""
    notes = {**NOT_RUN, "vLLM": install}
    labels = {one: card.format.engine_label(one, card.facts) + notes.get(one, "") for one in commands}
    parts = [f"{labels[one]}:\n\n```\n{command}\n```" for one, command in commands.items()]
    if commands and card.facts.adapter:
        parts.insert(0, MERGE_FIRST.format(card.facts.adapter_path))
    if not commands:
        parts = [f"No engine serves drafts for {card.facts.model_type}."]
    if card.format.row.imports:
        target = card.facts.name or "TARGET"
        adapter = f" --adapter {card.facts.adapter_path}" if card.facts.adapter else ""
        parts.append(
            f"This project's server, behind OpenAI's API:\n\n```\n"
            f"sage-serve --target {target}{adapter} --draft {card.name} --port 8000\n```"
        )
        parts.append(
            f"This project's decoder, which also separates a bad draft from a misconfigured engine:\n\n```\n"
            f"sage-export --import {card.name} --target {target} --out draft\n"
            f"sage-validate draft=draft target.path={target}\n```"
        )
    return "## Serving\n\n" + "\n\n".join(parts)


def _checks(card: ExportResult) -> str:
    output = f"{'an' if card.format.output[0] in 'aeiou' else 'a'} {card.format.output}"
    return (
        f"## Checks\n\n`sage-export --check` reports no errors, and the reloaded files compute, bit for bit, what the trained "
        f"draft computes in {card.dtype}. Rounding error in {card.dtype} on a fixed batch: largest difference "
        f"of {output} {card.rounding.max_abs_difference:.3g}, {card.format.agreement_is} "
        f"{card.rounding.agreement:.1%}. The hashes are in `manifest.json`."
    )


def _recipe(card: ExportResult) -> str:
    source = card.source
    if not source.recipe:
        return "## Training\n\nThe run that trained this draft is not available."
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
    return "\n".join(["## Training", "", method, "", *origin, *lines, *changed])


def _license(card: ExportResult) -> str:
    name = card.options.license or "not stated"
    link = f" ({card.options.license_link})" if card.options.license_link else ""
    return (
        f"## License\n\n{name[0].upper()}{name[1:]}{link}. The weights were distilled from "
        f"{card.facts.name or card.facts.model_type}; its license, and that of the data, may apply to them."
    )
