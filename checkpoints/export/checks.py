"""Checks of a draft's folder: its files and config against what serving engines expect, with the effect of each error.

Every export passes these checks, and those of checkpoints.export.tensor_checks, before it is moved to its final name. A format
lists the checks that apply to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from checkpoints.export.configs import DEFAULT_THETA, EngineConfig, TargetFacts, as_list
from checkpoints.export.folder import CONFIG, Weights, export_info, verify_export
from checkpoints.export.formats.base import CheckInput, ExportFormat, Finding
from checkpoints.export.formats.registry import recognize, variants
from checkpoints.run_folder import CONFIG as RUN_CONFIG
from checkpoints.run_folder import is_run
from sage.drafts.location import EXPORT_INFO
from sage.io.manifest import MANIFEST, CorruptFolder, has_manifest
from sage.io.model_files import read_config

NOT_LOADABLE = "no engine can load it"
NOT_EXPORTED = "no engine loads it; export it first (sage-export DIR --format ...)"
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
EXTRA_NORMS = ("norm_before_fc", "fc_norm", "norm_output")


class InvalidExport(ValueError):
    """An engine would refuse the folder or serve it wrongly; the message lists the errors."""


@dataclass
class CheckResult:
    """The result of a check.

    Attributes:
        format: recognized by the config; None if it could not be read.
        notes: checks that were skipped, and why.
    """

    folder: Path
    format: ExportFormat | None = None
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def errors(self) -> list[Finding]:
        """The findings that are not warnings."""
        return [finding for finding in self.findings if not finding.is_warning]

    @property
    def warnings(self) -> list[Finding]:
        """The findings that are warnings."""
        return [finding for finding in self.findings if finding.is_warning]

    def raise_if_invalid(self) -> None:
        """Raises InvalidExport with all errors, if there are any."""
        if self.errors:
            raise InvalidExport(f"{self.folder}: {'; also '.join(str(finding) for finding in self.errors)}")


def check_folder(folder: Path, facts: TargetFacts | None = None) -> CheckResult:
    """Checks a draft in an engine's format, of this project or third-party; wrong content is a finding, not an error.

    Args:
        facts: facts about its target; None = those in sage_export.json, if there are any.

    Raises:
        ValueError: no such folder.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    result = CheckResult(folder)
    result.findings = _check_files(result, facts)
    return result


def _check_files(result: CheckResult, facts: TargetFacts | None) -> list[Finding]:
    """Reads config.json and the facts, in an order that names the first file at fault."""
    folder = result.folder
    if is_run(folder) and not (folder / CONFIG).is_file():
        return [Finding(RUN_CONFIG, "the folder of a run", NOT_EXPORTED)]
    try:
        if has_manifest(folder):
            verify_export(folder)
        config = EngineConfig(read_config(folder))
    except CorruptFolder as error:
        return [Finding(MANIFEST, str(error), "an engine would load the corrupt file")]
    except ValueError as error:
        return [Finding(CONFIG, str(error), NOT_LOADABLE)]
    try:
        if facts is None and (folder / EXPORT_INFO).is_file():
            facts = TargetFacts.from_dict(export_info(folder).get("target"))
    except ValueError as error:
        return [Finding(EXPORT_INFO, str(error), "the draft cannot be compared with its target")]
    return _check_content(result, config, facts)


def _check_content(result: CheckResult, config: EngineConfig, facts: TargetFacts | None) -> list[Finding]:
    if config.is_sage_draft:
        found = f"{config.raw['model_type']!r}, a draft in this package's own format"
        return [Finding("model_type", found, NOT_EXPORTED)]
    result.format = recognize(config)
    if result.format is None:
        known = ", ".join(one.engine_class for one in variants())
        found = f"{config.raw.get('architectures')}, model_type {config.raw.get('model_type')!r}; known drafts: {known}"
        return [Finding("architectures", found, f"{NOT_LOADABLE} as a draft")]
    try:
        weights = Weights(result.folder)
    except ValueError as error:
        return [Finding("weights", str(error), NOT_LOADABLE)]
    if facts is None:
        result.notes.append("vocabulary, context length, rope and layers were not compared with the target: give --target DIR")
    trained = as_list(export_info(result.folder).get("feature_levels"))
    given = CheckInput(result.format, config, weights, result.format.specs(config) or {}, facts, result.folder, trained)
    return [finding for check in result.format.checks for finding in check(given)]


# -- config.json ---------------------------------------------------------------------------------------------------------


def _classes(given: CheckInput) -> Iterator[Finding]:
    names, written, expected = given.config.classes, given.config.raw.get("architectures"), given.format.engine_class
    if written != [expected]:
        is_third_party = any(name in given.format.other_classes for name in names)
        effect = "vLLM loads it, SGLang does not load it as a draft" if is_third_party else "no engine loads it as a draft"
        yield Finding("architectures", f"{written}, expected ['{expected}']", effect)


def layer_type(given: CheckInput) -> Iterator[Finding]:
    """Yields the findings about the layer's class, code to run, and quantization."""
    config, allowed = given.config, given.format.layer_types
    model_type = config.layer.get("model_type")
    if model_type not in allowed:
        found = f"{model_type!r}, expected {' or '.join(allowed)}"
        yield given.at("model_type", found, "the engine's config loader refuses it")
    if "auto_map" in config.raw:
        effect = "engines run it only with trust_remote_code; no draft needs it"
        yield Finding("auto_map", "names Python code to run", effect, is_warning=given.format.has_code)
    if config.raw.get("quantization_config"):
        yield Finding("quantization_config", "present", "engines expect quantized tensors; these are not quantized")


def sizes(given: CheckInput) -> Iterator[Finding]:
    """Yields the findings about sizes, activation and epsilon of the layer."""
    config, facts = given.config, given.facts
    for key in SIZES:
        if config.size(key) is None:
            yield given.at(key, f"{config.get(key)!r}, expected a positive integer", "the engine cannot build the layer")
    heads, kv_heads = config.size("num_attention_heads"), config.size("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        yield given.at("num_key_value_heads", f"{kv_heads} does not divide {heads} heads", "the engine refuses it")
    if config.get("hidden_act") != "silu":
        yield given.at("hidden_act", f"{config.get('hidden_act')!r}, expected 'silu'", "vLLM's Llama layer refuses it")
    if not isinstance(config.get("rms_norm_eps"), float):
        effect = "the engine uses 1e-6, whatever was used in training"
        yield given.at("rms_norm_eps", f"{config.get('rms_norm_eps')!r}", effect)
    if facts and config.size("hidden_size") and config.size("hidden_size") != facts.hidden_size:
        found = f"{config.size('hidden_size')}, the target's is {facts.hidden_size}"
        yield given.at("hidden_size", found, "the target's features have another size")


def single_layer(given: CheckInput) -> Iterator[Finding]:
    """Yields a finding unless the config has one layer."""
    layers = given.config.get("num_hidden_layers")
    if layers != 1:
        yield given.at("num_hidden_layers", f"{layers!r}, expected 1", "the engine builds layers without weights")


def vocabulary(given: CheckInput) -> Iterator[Finding]:
    """Yields a finding unless the token ids are the target's."""
    config, facts = given.config, given.facts
    vocab = config.size("vocab_size")
    if facts and vocab and vocab != facts.vocab_size:
        found = f"{vocab}, the target's is {facts.vocab_size}"
        yield given.at("vocab_size", found, "draft and target use different token ids")


def _ties(given: CheckInput) -> Iterator[Finding]:
    config = given.config
    if config.get("tie_word_embeddings") is not False:
        found = f"{config.get('tie_word_embeddings', 'missing')}, expected false"
        effect = "SGLang uses the embedding as lm_head and drops the trained one: acceptance 1.00"
        yield given.at("tie_word_embeddings", found, effect)


def context_length(given: CheckInput) -> Iterator[Finding]:
    """Yields a finding unless the draft has positions for every token of the target's context."""
    key = "max_position_embeddings"
    length, facts = given.config.size(key), given.facts
    if length is None:
        yield given.at(key, f"{given.config.get(key)!r}", given.format.effect_without_length)
    elif facts and length < facts.max_position_embeddings:
        found = f"{length}, the target's is {facts.max_position_embeddings}"
        yield given.at(key, found, f"beyond {length} tokens the draft is served at acceptance 1.00, without an error")


def _rope(given: CheckInput) -> Iterator[Finding]:
    config, facts = given.config, given.facts
    if facts is None:
        return
    theta, _, scaled, _ = config.rope
    if theta != facts.rope_theta:
        is_written = config.get("rope_theta") or config.get("rope_parameters")
        prefix = "" if is_written else "missing, default "
        found = f"{prefix}{theta or DEFAULT_THETA:g}, the target's is {facts.rope_theta:g}"
        yield given.at("rope_theta", found, "rotation angles differ from training")
    if scaled != facts.scaled_rope:
        found = f"{scaled or 'unscaled'}, the target's is {facts.scaled_rope or 'unscaled'}"
        yield given.at("rope_scaling", found, "positions are scaled differently in draft and target")
    if config.rope.axes != facts.rope.axes:
        found = f"mrope_section {config.rope.axes}, the target's is {facts.rope.axes}"
        yield given.at("rope_scaling", found, "image positions differ from training")


def _switches(given: CheckInput) -> Iterator[Finding]:
    config = given.config
    for key in ("attention_bias", "mlp_bias", "bias"):
        if config.get(key):
            yield given.at(key, f"{config.get(key)!r}, expected false", "the engine adds biases without weights")
    key = "target_hidden_size"
    if config.get(key) not in (None, config.get("hidden_size")):
        found = f"{config.get(key)}, hidden_size is {config.get('hidden_size')}"
        yield Finding(key, found, "fc gets another input size than its weight has")
    for key in EXTRA_NORMS:
        if config.get(key):
            yield Finding(key, "true", "requires a norm that drafts of this project do not have; SGLang ignores it")


def unsupported_residual(given: CheckInput) -> Iterator[Finding]:
    """Yields a finding if the normed feature is the residual stream."""
    if given.config.get("norm_before_residual"):
        effect = "vLLM normalizes the residual, SGLang does not support it and computes something else"
        yield Finding("norm_before_residual", "true", effect)


LAYER_CHECKS = (_classes, layer_type, sizes, vocabulary, _ties, context_length, _rope, _switches)  # of EAGLE's formats
