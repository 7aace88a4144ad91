"""README.md of an export: what it is, what was measured, how to serve it, how it was trained, under which licence.

Nothing in it is invented: a figure that was not measured and a licence that was not named are said to be missing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints.export.facts import TargetFacts
from checkpoints.export.formats.layout import Flavour, Format
from checkpoints.export.reload import Reload
from checkpoints.export.serving import serve_commands
from checkpoints.export.source import Source

RECIPE_KEYS = ("seed", "data.num_examples", "data.max_length", "launch.gpus", "launch.ranks")
RECIPE_GROUPS = ("draft", "objective", "optim", "train", "deepspeed")
POLICY_COLUMNS = ("policy", "tokens per target pass", "mean accepted draft", "tokens/s", "speedup", "end to end", "identical")


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """What the card is written from.

    Attributes:
        name: what to call the export in commands: its folder, or the hub id it goes to.
        dtype: of the exported weights.
        warnings: what is lost or differs, as whole sentences.
        licence, licence_link: as the user gave them; None = not stated.
    """

    name: str
    format: Format
    flavour: Flavour | None
    facts: TargetFacts
    source: Source
    reload: Reload
    dtype: str
    warnings: Sequence[str] = ()
    licence: str | None = None
    licence_link: str | None = None


def render_card(card: CardFacts) -> str:
    """The whole card as Markdown with the hub's metadata on top."""
    sections = (_front_matter, _summary, _warnings, _measured, _serve, _proof, _recipe, _licence)
    parts = [section(card) for section in sections]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(card: CardFacts) -> str:
    """Metadata the hub reads; JSON values are valid YAML and need no quoting rules."""
    fields: dict[str, Any] = {"license": card.licence or "other"}
    if card.licence is None:
        fields["license_name"] = "not-stated"
    if card.licence_link:
        fields["license_link"] = card.licence_link
    if _is_hub_id(card.facts.name):
        fields |= {"base_model": card.facts.name, "base_model_relation": "adapter"}
    fields |= {"pipeline_tag": "image-text-to-text", "tags": ["speculative-decoding", str(card.format), "sage-draft"]}
    return "\n".join(["---", *(f"{key}: {json.dumps(value)}" for key, value in fields.items()), "---"])


def _is_hub_id(name: str | None) -> bool:
    return (
        bool(name) and str(name).count("/") == 1 and not str(name).startswith((".", "/", "~")) and not Path(str(name)).exists()
    )


def _summary(card: CardFacts) -> str:
    facts, kind = card.facts, f"`{card.format}`" + (f" ({card.flavour})" if card.flavour else "")
    steps = f"trained for {card.source.step} steps" if card.source.step is not None else "of unknown training length"
    return (
        f"# {Path(card.name).name}\n\n"
        f"A draft head for speculative decoding with **{facts.name or facts.model_type}** ({facts.architecture}: "
        f"{facts.num_layers} layers, width {facts.hidden_size}, vocabulary {facts.vocab_size}), {steps}, in the format {kind}, "
        f"{card.dtype}. "
        f"It changes how fast the target answers, never what it answers."
    )


def _warnings(card: CardFacts) -> str:
    if not card.warnings:
        return ""
    return "\n".join(["## Know before serving", "", *(f"* {warning}" for warning in card.warnings)])


def _measured(card: CardFacts) -> str:
    report = card.source.report
    if report is None:
        return "## Measured\n\nNothing was measured: no validation/report.json came with this draft."
    rows = [_policy_row(name, part) for name, part in report["policies"].items()]
    rule = ["---", *["---:"] * (len(POLICY_COLUMNS) - 1)]
    table = "\n".join("| " + " | ".join(row) + " |" for row in (POLICY_COLUMNS, rule, *rows))
    note = (
        f"With this project's lossless decoder, not with a serving engine: {report['prompts']} prompts, up to "
        f"{report['max_new_tokens']} tokens, temperature {report['temperature']:g}, {report['dtype']} on {report['device']}, "
        f"target {report['target']}, seed {report['seed']}. Speedups are against the fastest autoregressive decoder of the "
        f"same run; *identical* counts answers equal to the target's own."
    )
    return f"## Measured\n\n{table}\n\n{note}"


def _policy_row(name: str, part: dict[str, Any]) -> list[str]:
    return [
        f"`{name}`",
        f"{part['tokens_per_target_pass']:.2f}",
        f"{part['mean_accepted_draft']:.2f}",
        f"{part['tokens_per_s']:.1f}",
        f"{part['speedup']:.2f}x",
        f"{part['speedup_end_to_end']:.2f}x",
        f"{part['match']}/{part['total']}",
    ]


def _serve(card: CardFacts) -> str:
    commands = serve_commands(card.format, card.flavour, card.facts, card.name)
    parts = [f"{engine}:\n\n```\n{command}\n```" for engine, command in commands.items()]
    if not commands:
        parts = [f"No engine serves drafts for {card.facts.model_type}."]
    if card.format != Format.eagle:
        target = card.facts.name or "TARGET"
        parts.append(
            f"This project's decoder, also to tell a bad draft from a bad engine:\n\n```\n"
            f"sage-export --import {card.name} --target {target} --out draft\n"
            f"sage-validate draft=draft target.path={target}\n```"
        )
    return "## Serve\n\n" + "\n\n".join(parts)


def _proof(card: CardFacts) -> str:
    what = "largest difference of a logit" if card.format != Format.eagle else "largest difference of a feature"
    same = "positions with the same first choice" if card.format != Format.eagle else "cosine of features"
    return (
        f"## Checked\n\n`sage-export --check` found nothing wrong, and the reloaded files compute bit for bit what the trained "
        f"draft does at {card.dtype}. What rounding to {card.dtype} costs on a fixed batch: {what} {card.reload.largest:.3g}, "
        f"{same} {card.reload.same_choice:.1%}. `manifest.json` holds the hashes."
    )


def _recipe(card: CardFacts) -> str:
    source = card.source
    if not source.recipe:
        return "## Training\n\nThe run that made this draft is not at hand."
    named = [pair for key in (*RECIPE_KEYS, *RECIPE_GROUPS) for pair in _flat(_at(source.recipe, key), key)]
    lines = [f"* `{key}`: {value}" for key, value in named]
    known = source.provenance
    origin = [f"* data: {', '.join(_sources(source.recipe))} (fingerprint `{known.get('data_fingerprint', 'unknown')}`)"]
    if commit := (known.get("git") or {}).get("commit"):
        origin.append(f"* code: {commit}{' with changes' if known['git'].get('is_dirty') else ''}")
    versions = ", ".join(f"{name} {value}" for name, value in (known.get("versions") or {}).items() if value)
    origin += [f"* versions: {versions}"] if versions else []
    return "\n".join(
        ["## Training", "", "Online distillation: the frozen target teaches in the same step.", "", *origin, *lines]
    )


def _sources(recipe: dict[str, Any]) -> list[str]:
    data = recipe.get("data") or {}
    return [str(name) for name in (data.get("sources") or {})] or [str(data.get("name", "not stated"))]


def _at(recipe: dict[str, Any], key: str) -> Any:
    """What is under a dotted key, if anything."""
    tree: Any = recipe
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _flat(tree: Any, prefix: str) -> list[tuple[str, Any]]:
    """Dotted keys and values that are set; folders of the machine it was trained on are left out."""
    if isinstance(tree, dict):
        return [pair for key, part in tree.items() for pair in _flat(part, f"{prefix}.{key}")]
    return [] if tree in (None, "", []) or prefix.endswith((".path", ".dir")) else [(prefix, tree)]


def _licence(card: CardFacts) -> str:
    named = f"{card.licence}" if card.licence else "not stated by whoever exported it"
    link = f" ({card.licence_link})" if card.licence_link else ""
    return (
        f"## Licence\n\n{named[0].upper()}{named[1:]}{link}. The weights were distilled from "
        f"{card.facts.name or card.facts.model_type}, whose own licence may bind them; so may that of the data."
    )
