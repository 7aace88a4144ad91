"""Checks of a draft's folder: its files, config and tensors against what serving engines expect, with the effect of each error.

Every export passes these checks before it is moved to its final name. A format lists the checks that apply to it.

Shapes: U draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from checkpoints.export.configs import DEFAULT_THETA, EngineConfig, TargetFacts, TensorSpecs
from checkpoints.export.folder import CONFIG, PICKLED, Weights, export_info, verify_export
from checkpoints.export.formats.registry import recognize, variants
from checkpoints.run_folder import CONFIG as RUN_CONFIG
from checkpoints.run_folder import is_run
from sage.drafts.location import EXPORT_INFO
from sage.io.dtypes import dtype_name
from sage.io.manifest import MANIFEST, CorruptFolder, has_manifest
from sage.io.model_files import read_config

if TYPE_CHECKING:
    from checkpoints.export.formats.base import ExportFormat

NOT_LOADABLE = "no engine can load it"
NOT_EXPORTED = "no engine loads it; export it first (sage-export DIR --format ...)"
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
EXTRA_NORMS = ("norm_before_fc", "fc_norm", "norm_output")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
MAX_LISTED = 4  # tensors listed by name before "and N more"


@dataclass(frozen=True)
class Finding:
    """One error or warning: the tensor, config field or file, its value, and its effect in an engine."""

    where: str
    found: str
    effect: str
    is_warning: bool = False  # the draft can be served

    def __str__(self) -> str:
        return f"{self.where}: {self.found}; {self.effect}"


class InvalidExport(ValueError):
    """An engine would refuse the folder or serve it wrongly; the message lists the errors."""


@dataclass
class CheckInput:
    """The folder to check: its format, config, tensors, expected tensors (none if the config lacks sizes), target if known."""

    format: ExportFormat
    config: EngineConfig
    weights: Weights
    specs: TensorSpecs
    facts: TargetFacts | None

    def at(self, key: str, found: str, effect: str) -> Finding:
        """Returns a finding about a field of the decoder layer."""
        return Finding(self.config.key_path(key), found, effect)


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
    given = CheckInput(result.format, config, weights, result.format.specs(config) or {}, facts)
    return [finding for check in result.format.checks for finding in check(given)]


# -- config.json ---------------------------------------------------------------------------------------------------------


def _classes(given: CheckInput) -> Iterator[Finding]:
    names, written, expected = given.config.classes, given.config.raw.get("architectures"), given.format.engine_class
    if written != [expected]:
        is_third_party = any(name in given.format.other_classes for name in names)
        effect = "vLLM loads it, SGLang does not load it as a draft" if is_third_party else "no engine loads it as a draft"
        yield Finding("architectures", f"{written}, expected ['{expected}']", effect)


def _layer_type(given: CheckInput) -> Iterator[Finding]:
    config, allowed = given.config, given.format.layer_types
    model_type = config.layer.get("model_type")
    if model_type not in allowed:
        found = f"{model_type!r}, expected {' or '.join(allowed)}"
        yield given.at("model_type", found, "the engine's config loader refuses it")
    if "auto_map" in config.raw:
        yield Finding("auto_map", "names Python code to run", "engines run it only with trust_remote_code; no draft needs it")
    if config.raw.get("quantization_config"):
        yield Finding("quantization_config", "present", "engines expect quantized tensors; these are not quantized")


def _sizes(given: CheckInput) -> Iterator[Finding]:
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


def _vocabulary(given: CheckInput) -> Iterator[Finding]:
    config, facts = given.config, given.facts
    vocab = config.size("vocab_size")
    if facts and vocab and vocab != facts.vocab_size:
        found = f"{vocab}, the target's is {facts.vocab_size}"
        yield given.at("vocab_size", found, "draft and target use different token ids")
    if config.get("tie_word_embeddings") is not False:
        found = f"{config.get('tie_word_embeddings', 'missing')}, expected false"
        effect = "SGLang uses the embedding as lm_head and drops the trained one: acceptance 1.00"
        yield given.at("tie_word_embeddings", found, effect)


def _context_length(given: CheckInput) -> Iterator[Finding]:
    key = "max_position_embeddings"
    length, facts = given.config.size(key), given.facts
    if length is None:
        yield given.at(key, f"{given.config.get(key)!r}", "LlamaConfig's default is 2048: beyond it acceptance is 1.00")
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


LAYER_CHECKS = (_classes, _layer_type, _sizes, _vocabulary, _context_length, _rope, _switches)  # of every format


# -- tensors -------------------------------------------------------------------------------------------------------------


def check_tensors(given: CheckInput) -> Iterator[Finding]:
    """Yields all findings about a draft's tensors; none if the config lacks the sizes to compare with."""
    if not given.specs:
        return
    yield from _missing(given)
    yield from _unexpected(given)
    yield from _shapes_and_dtypes(given)
    yield from _values(given)
    if given.weights.is_pickled:
        effect = "engines open it, but a pickle can run code: convert it to safetensors"
        yield Finding(PICKLED, "weights in a pickle", effect, is_warning=True)


def _missing(given: CheckInput) -> Iterator[Finding]:
    for name, spec in given.specs.items():
        if not spec.is_optional and name not in given.weights.infos:
            yield Finding(name, "missing", spec.effect_if_missing)


def _unexpected(given: CheckInput) -> Iterator[Finding]:
    extra = sorted(set(given.weights.infos) - set(given.specs))
    effect = given.format.effect_of_unexpected
    prefixed = [name for name in extra if name.removeprefix("model.") in given.specs]
    if prefixed:
        yield Finding(prefixed[0], f"{len(prefixed)} tensors have the prefix 'model.'", effect)
    others = [name for name in extra if name not in prefixed]
    for name in others[:MAX_LISTED]:
        yield Finding(name, "unexpected tensor", effect)
    if len(others) > MAX_LISTED:
        yield Finding(given.format.name, f"{len(others) - MAX_LISTED} more unexpected tensors", effect)


def _shapes_and_dtypes(given: CheckInput) -> Iterator[Finding]:
    kinds = {"int64": (torch.int64,), "bool": (torch.bool,), "float": FLOATS}
    for name, spec in given.specs.items():
        info = given.weights.infos.get(name)
        if info is None:
            continue
        if info.shape != spec.shape:
            found = f"shape {list(info.shape)}, expected {list(spec.shape)}"
            yield Finding(name, found, "the engine stops, or loads a slice of it")
        if info.dtype not in kinds[spec.kind]:
            yield Finding(name, f"dtype {dtype_name(info.dtype)}, expected {spec.kind}", "the engine casts it or stops")
    floats = {dtype_name(info.dtype) for info in given.weights.infos.values() if info.dtype in FLOATS}
    if len(floats) > 1:
        yield Finding("dtype", f"mixed: {', '.join(sorted(floats))}", "engines cast all tensors to one", is_warning=True)
    written = given.config.raw.get("dtype", given.config.raw.get("torch_dtype"))
    if len(floats) == 1 and written not in (None, *floats):
        yield Finding("dtype", f"{written!r} in config.json, {floats.pop()} in the file", "engines cast it", is_warning=True)


def _values(given: CheckInput) -> Iterator[Finding]:
    """Non-finite and all-zero tensors; a ZeRO-3 save without gathering, or weights that were never loaded, are all zero."""
    for name, spec in given.specs.items():
        info = given.weights.infos.get(name)
        if spec.kind != "float" or info is None or info.dtype not in FLOATS:
            continue
        tensor = given.weights[name]
        num_bad = int((~torch.isfinite(tensor)).sum())
        if num_bad:
            yield Finding(name, f"{num_bad} values are not finite", "all logits become NaN: acceptance 1.00 or an error")
        elif spec.is_zero and bool(tensor.any()):
            yield Finding(name, "not zero", "drafts trained here have no bias", is_warning=True)
        elif tensor.numel() and not spec.is_zero and not bool(tensor.any()):
            yield Finding(name, "all zero", "the weight was not saved (ZeRO-3 without gathering?): acceptance 1.00")


def vocabulary_maps(given: CheckInput) -> Iterator[Finding]:
    """Yields the findings about the values of d2t and t2d, if both have the expected shape."""
    if not given.specs:
        return
    infos = given.weights.infos
    has_shape = [name for name in ("d2t", "t2d") if name in infos and infos[name].shape == given.specs[name].shape]
    usable = {name: given.weights[name] for name in has_shape if infos[name].dtype}
    is_readable = "d2t" in usable and usable["d2t"].dtype == torch.int64
    if is_readable and (problem := check_vocabulary_maps(usable["d2t"], usable.get("t2d"), given.specs["t2d"].shape[0])):
        yield problem


def check_vocabulary_maps(d2t: Tensor, t2d: Tensor | None, vocab: int) -> Finding | None:
    """Checks that d2t holds unique offsets into the target vocabulary, and that t2d marks exactly the ids in d2t's range.

    Args:
        d2t: LongTensor [U], target id = draft id + d2t[draft id].
        t2d: BoolTensor [V].
    """
    ids = torch.arange(len(d2t)) + d2t
    is_mask = t2d is not None and t2d.dtype == torch.bool
    if problem := _check_d2t(d2t, ids, vocab, t2d if is_mask else None):
        return Finding("d2t", *problem)
    if t2d is not None and is_mask and not _agree(ids, t2d):
        found = f"marks {int(t2d.sum())} ids, d2t maps to {len(ids)}, {int(t2d[ids].sum())} of them marked"
        return Finding("t2d", found, "training and verification use other tokens than the draft vocabulary")
    return None


def _check_d2t(d2t: Tensor, ids: Tensor, vocab: int, t2d: Tensor | None) -> tuple[str, str] | None:
    effect = "draft tokens are mapped to the wrong target tokens: acceptance 1.00, no error"
    is_absolute = len(d2t) > 1 and bool((d2t[1:] > d2t[:-1]).all()) and int(d2t[0]) >= 0 and int(d2t[-1]) < vocab
    if is_absolute and (int(ids[-1]) >= vocab or (t2d is not None and _agree(d2t, t2d))):
        return "holds absolute target ids, not offsets (target id = draft id + d2t[draft id])", effect
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        return f"maps to ids {int(ids.min())} to {int(ids.max())}, the vocabulary is 0 to {vocab - 1}", effect
    num_duplicates = len(ids) - len(ids.unique())
    if num_duplicates:
        return f"maps {num_duplicates} draft ids to target ids that are already taken", effect
    return None


def _agree(ids: Tensor, t2d: Tensor) -> bool:
    return int(t2d.sum()) == len(ids) and bool(t2d[ids].all())
