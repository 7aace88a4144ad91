"""Checks of a draft's config.json: every field that an engine reads, with the effect of a wrong value."""

from __future__ import annotations

from collections.abc import Iterator

from checkpoints.export.formats.layout import DEFAULT_THETA
from checkpoints.export.validator.validator import CheckInput, Finding

SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
EXTRA_NORMS = ("norm_before_fc", "fc_norm", "norm_output")


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
