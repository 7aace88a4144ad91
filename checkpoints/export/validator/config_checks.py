"""Checks of a draft's config.json: every field that an engine reads, with the effect of a wrong value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from checkpoints.export.formats.layout import (
    DEFAULT_THETA,
    EAGLE3_CLASS,
    EAGLE3_THIRD_PARTY_CLASSES,
    EAGLE_CLASSES,
    FEATURE_LEVELS,
    LEVELS_KEY,
    SPECULATORS_CLASS,
    Format,
    default_levels,
)
from checkpoints.export.validator.findings import CheckInput, Finding

SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
EXTRA_NORMS = ("norm_before_fc", "fc_norm", "norm_output")


def check_config(given: CheckInput) -> Iterator[Finding]:
    """Yields all findings about a draft's config."""
    for check in (_classes, _layer_type, _sizes, _single_layer, _vocabulary, _context_length, _rope, _switches):
        yield from check(given)
    if given.config.format == Format.speculators:
        yield from _speculators(given)
    if given.config.format in (Format.eagle3, Format.speculators):
        yield from _levels(given)


def _classes(given: CheckInput) -> Iterator[Finding]:
    config = given.config
    names, written = config.classes, config.raw.get("architectures")
    expected = {Format.speculators: SPECULATORS_CLASS, Format.eagle3: EAGLE3_CLASS}.get(config.format or Format.eagle)
    if config.format == Format.eagle:
        expected = next(name for name in EAGLE_CLASSES.values() if name in names)
    if written != [expected]:
        is_third_party = any(name in EAGLE3_THIRD_PARTY_CLASSES for name in names)
        effect = "vLLM loads it, SGLang does not load it as a draft" if is_third_party else "no engine loads it as a draft"
        yield Finding("architectures", f"{written}, expected ['{expected}']", effect)


def _layer_type(given: CheckInput) -> Iterator[Finding]:
    config = given.config
    model_type = config.layer.get("model_type")
    allowed = ("llama", "qwen3") if config.format == Format.speculators else ("llama",)
    if model_type not in allowed:
        found = f"{model_type!r}, expected {' or '.join(allowed)}"
        yield Finding(config.key_path("model_type"), found, "the engine's config loader refuses it")
    if "auto_map" in config.raw:
        yield Finding("auto_map", "names Python code to run", "engines run it only with trust_remote_code; no draft needs it")
    if config.raw.get("quantization_config"):
        yield Finding("quantization_config", "present", "engines expect quantized tensors; these are not quantized")


def _sizes(given: CheckInput) -> Iterator[Finding]:
    config, facts = given.config, given.facts
    for key in SIZES:
        if config.size(key) is None:
            where, found = config.key_path(key), f"{config.get(key)!r}, expected a positive integer"
            yield Finding(where, found, "the engine cannot build the layer")
    heads, kv_heads = config.size("num_attention_heads"), config.size("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        found = f"{kv_heads} does not divide {heads} heads"
        yield Finding(config.key_path("num_key_value_heads"), found, "the engine refuses it")
    if config.get("hidden_act") != "silu":
        found = f"{config.get('hidden_act')!r}, expected 'silu'"
        yield Finding(config.key_path("hidden_act"), found, "vLLM's Llama layer refuses it")
    if not isinstance(config.get("rms_norm_eps"), float):
        found = f"{config.get('rms_norm_eps')!r}"
        yield Finding(config.key_path("rms_norm_eps"), found, "the engine uses 1e-6, whatever was used in training")
    if facts and config.size("hidden_size") and config.size("hidden_size") != facts.hidden_size:
        found = f"{config.size('hidden_size')}, the target's is {facts.hidden_size}"
        yield Finding(config.key_path("hidden_size"), found, "the target's features have another size")


def _single_layer(given: CheckInput) -> Iterator[Finding]:
    layers = given.config.get("num_hidden_layers")
    if layers != 1:
        where = given.config.key_path("num_hidden_layers")
        yield Finding(where, f"{layers!r}, expected 1", "the engine builds layers without weights")


def _vocabulary(given: CheckInput) -> Iterator[Finding]:
    config, facts = given.config, given.facts
    vocab = config.size("vocab_size")
    if facts and vocab and vocab != facts.vocab_size:
        found = f"{vocab}, the target's is {facts.vocab_size}"
        yield Finding(config.key_path("vocab_size"), found, "draft and target use different token ids")
    if config.get("tie_word_embeddings") is not False:
        found = f"{config.get('tie_word_embeddings', 'missing')}, expected false"
        effect = "SGLang uses the embedding as lm_head and drops the trained one: acceptance 1.00"
        yield Finding(config.key_path("tie_word_embeddings"), found, effect)
    if config.format == Format.eagle:
        return
    draft_vocab = config.get("draft_vocab_size")
    if config.size("draft_vocab_size") is None:
        yield Finding("draft_vocab_size", f"{draft_vocab!r}", "SGLang uses the target's lm_head instead of the trained one")
    elif vocab and draft_vocab > vocab:
        found = f"{draft_vocab}, larger than vocab_size {vocab}"
        yield Finding("draft_vocab_size", found, "draft ids are outside the vocabulary")


def _context_length(given: CheckInput) -> Iterator[Finding]:
    key = "max_position_embeddings"
    length, where, facts = given.config.size(key), given.config.key_path(key), given.facts
    if length is None:
        yield Finding(where, f"{given.config.get(key)!r}", "LlamaConfig's default is 2048: beyond it acceptance is 1.00")
    elif facts and length < facts.max_position_embeddings:
        found = f"{length}, the target's is {facts.max_position_embeddings}"
        yield Finding(where, found, f"beyond {length} tokens the draft is served at acceptance 1.00, without an error")


def _rope(given: CheckInput) -> Iterator[Finding]:
    config, facts = given.config, given.facts
    if facts is None:
        return
    theta, _, scaled, _ = config.rope
    if theta != facts.rope_theta:
        is_written = config.get("rope_theta") or config.get("rope_parameters")
        prefix = "" if is_written else "missing, default "
        found = f"{prefix}{theta or DEFAULT_THETA:g}, the target's is {facts.rope_theta:g}"
        yield Finding(config.key_path("rope_theta"), found, "rotation angles differ from training")
    where = config.key_path("rope_scaling")
    if scaled != facts.scaled_rope:
        found = f"{scaled or 'unscaled'}, the target's is {facts.scaled_rope or 'unscaled'}"
        yield Finding(where, found, "positions are scaled differently in draft and target")
    if config.rope.axes != facts.rope.axes:
        found = f"mrope_section {config.rope.axes}, the target's is {facts.rope.axes}"
        yield Finding(where, found, "image positions differ from training")


def _switches(given: CheckInput) -> Iterator[Finding]:
    config = given.config
    for key in ("attention_bias", "mlp_bias", "bias"):
        if config.get(key):
            found = f"{config.get(key)!r}, expected false"
            yield Finding(config.key_path(key), found, "the engine adds biases without weights")
    key = "target_hidden_size"
    if key in config.raw and config.raw[key] is None and config.format == Format.eagle3:
        yield Finding(key, "null", "SGLang multiplies it by three and stops; omit the field")
    elif config.get(key) not in (None, config.get("hidden_size")):
        found = f"{config.get(key)}, hidden_size is {config.get('hidden_size')}"
        yield Finding(key, found, "fc gets another input size than its weight has")
    if config.format != Format.speculators and config.get("norm_before_residual"):
        effect = "vLLM normalizes the residual, SGLang does not support it and computes something else"
        yield Finding("norm_before_residual", "true", effect)
    for key in EXTRA_NORMS:
        if config.get(key):
            yield Finding(key, "true", "requires a norm that drafts of this project do not have; SGLang ignores it")


def _speculators(given: CheckInput) -> Iterator[Finding]:
    raw = given.config.raw
    if "model_type" in raw:
        effect = "vLLM does not recognize the folder as a speculator"
        yield Finding("model_type", f"{raw['model_type']!r} at the top level", effect)
    if raw.get("speculators_model_type") != "eagle3":
        found = f"{raw.get('speculators_model_type')!r}, expected 'eagle3'"
        yield Finding("speculators_model_type", found, "vLLM refuses it")
    if "norm_before_residual" not in raw:
        yield Finding("norm_before_residual", "missing", "vLLM's default is true, the draft was trained with false")
    elif raw["norm_before_residual"] is not False:
        yield Finding("norm_before_residual", f"{raw['norm_before_residual']}", "only vLLM supports it", is_warning=True)
    if given.config.layer is raw:
        yield Finding("transformer_layer_config", "missing", "speculators cannot build the decoder layer")
    yield from _proposal(raw.get("speculators_config"))


def _proposal(written: Any) -> Iterator[Finding]:
    if not isinstance(written, dict):
        yield Finding("speculators_config", f"{written!r}", "vLLM finds neither the verifier nor the number of tokens")
        return
    methods = written.get("proposal_methods")
    listed = methods if isinstance(methods, list) else []
    types = [method.get("proposal_type") for method in listed if isinstance(method, dict)]
    if written.get("default_proposal_method") not in types:
        found = f"{written.get('default_proposal_method')!r} is not one of {types}"
        yield Finding("speculators_config.default_proposal_method", found, "speculators refuses the config")
    verifier = written.get("verifier")
    if not isinstance(verifier, dict) or not verifier.get("name_or_path"):
        effect = "`vllm serve DIR` does not know which target to load"
        yield Finding("speculators_config.verifier", f"{verifier!r}", effect)


def _levels(given: CheckInput) -> Iterator[Finding]:
    """Feature levels that engines cannot capture or that differ between engines; the default applies if none are written."""
    config, facts = given.config, given.facts
    default = default_levels(facts.num_layers) if facts else None
    levels_of = {"vLLM": config.vllm_levels or default}
    if config.format == Format.eagle3:
        levels_of["SGLang"] = config.sglang_levels or default
    for engine, levels in levels_of.items():
        if levels is not None and (effect := _levels_error(levels, facts.num_layers if facts else None)):
            yield Finding(LEVELS_KEY, f"{engine} reads hidden_states{levels}", effect)
    if len({str(levels) for levels in levels_of.values()}) > 1:
        found = ", ".join(f"{engine} reads hidden_states{levels or ' default'}" for engine, levels in levels_of.items())
        effect = "one of the engines feeds it other features than in training: acceptance near 1.00"
        yield Finding(f"{LEVELS_KEY} and eagle_config.{LEVELS_KEY}", found, effect)


def _levels_error(levels: list[Any], num_layers: int | None) -> str | None:
    if len(levels) != FEATURE_LEVELS or not all(isinstance(level, int) for level in levels):
        return f"fc takes exactly {FEATURE_LEVELS} levels"
    if any(later <= earlier for earlier, later in zip(levels, levels[1:], strict=False)) or levels[0] < 0:
        return "engines capture levels in increasing order, whatever order is written"
    if num_layers is not None and levels[-1] >= num_layers:
        return f"the target has {num_layers} layers and engines only capture the inputs of layers 0 to {num_layers - 1}"
    return None
