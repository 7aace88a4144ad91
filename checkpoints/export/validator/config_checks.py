"""What is asked of a draft's config.json: every field that an engine reads, with what the engine does when it is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from checkpoints.export.formats.layout import (
    DEFAULT_THETA,
    EAGLE3_CLASS,
    EAGLE3_ELSEWHERE,
    EAGLE_CLASSES,
    FEATURE_LEVELS,
    LEVELS_KEY,
    SPECULATORS_CLASS,
    Format,
    default_levels,
)
from checkpoints.export.validator.findings import Case, Finding

SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
EXTRA_NORMS = ("norm_before_fc", "fc_norm", "norm_output")


def check_config(case: Case) -> Iterator[Finding]:
    """All findings about a draft's config."""
    yield from _classes(case)
    yield from _sizes(case)
    yield from _single_layer(case)
    yield from _vocabulary(case)
    yield from _context(case)
    yield from _rope(case)
    yield from _switches(case)
    if case.head.format == Format.speculators:
        yield from _speculators(case)
    if case.head.format in (Format.eagle3, Format.speculators):
        yield from _levels(case)


def _classes(case: Case) -> Iterator[Finding]:
    names, written = case.head.classes, case.head.config.get("architectures")
    expected = {Format.speculators: SPECULATORS_CLASS, Format.eagle3: EAGLE3_CLASS}.get(case.head.format or Format.eagle)
    if case.head.format == Format.eagle:
        expected = next(name for name in EAGLE_CLASSES.values() if name in names)
    if written != [expected]:
        known = [name for name in names if name in EAGLE3_ELSEWHERE]
        what = "vLLM takes it, SGLang does not know it as a draft" if known else "no engine loads it as a draft"
        yield Finding("architectures", f"{written}, expected ['{expected}']", what)
    kind = case.head.layer.get("model_type")
    allowed = ("llama", "qwen3") if case.head.format == Format.speculators else ("llama",)
    if kind not in allowed:
        yield Finding(
            case.head.name("model_type"), f"{kind!r}, expected {' or '.join(allowed)}", "the engine's config loader refuses it"
        )
    if "auto_map" in case.head.config:
        yield Finding("auto_map", "names Python code to run", "engines run it only with trust_remote_code; never needed here")
    if case.head.config.get("quantization_config"):
        yield Finding("quantization_config", "present", "engines expect quantised tensors; these are plain")


def _sizes(case: Case) -> Iterator[Finding]:
    head = case.head
    for key in SIZES:
        if head.size(key) is None:
            yield Finding(head.name(key), f"{head.get(key)!r}, expected a positive whole number", "the engine cannot build it")
    heads, kv_heads = head.size("num_attention_heads"), head.size("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        yield Finding(head.name("num_key_value_heads"), f"{kv_heads} does not divide {heads} heads", "the engine refuses it")
    if head.get("hidden_act") != "silu":
        yield Finding(head.name("hidden_act"), f"{head.get('hidden_act')!r}, expected 'silu'", "vLLM's Llama layer refuses it")
    if not isinstance(head.get("rms_norm_eps"), float):
        yield Finding(
            head.name("rms_norm_eps"), f"{head.get('rms_norm_eps')!r}", "the engine assumes 1e-6, whatever was trained"
        )
    facts = case.facts
    if facts and head.size("hidden_size") and head.size("hidden_size") != facts.hidden_size:
        found = f"{head.size('hidden_size')}, the target's is {facts.hidden_size}"
        yield Finding(head.name("hidden_size"), found, "the target's features do not fit into it")


def _single_layer(case: Case) -> Iterator[Finding]:
    layers = case.head.get("num_hidden_layers")
    if layers != 1:
        yield Finding(
            case.head.name("num_hidden_layers"), f"{layers!r}, expected 1", "the engine builds layers that have no weights here"
        )


def _vocabulary(case: Case) -> Iterator[Finding]:
    head, facts = case.head, case.facts
    vocab = head.size("vocab_size")
    if facts and vocab and vocab != facts.vocab_size:
        yield Finding(
            head.name("vocab_size"), f"{vocab}, the target's is {facts.vocab_size}", "token ids of the two do not mean the same"
        )
    if head.get("tie_word_embeddings") is not False:
        found = f"{head.get('tie_word_embeddings', 'missing')}, expected false"
        effect = "SGLang uses the embedding as lm_head and drops the trained one: acceptance 1.00"
        yield Finding(head.name("tie_word_embeddings"), found, effect)
    if head.format == Format.eagle:
        return
    draft = head.get("draft_vocab_size")
    if head.size("draft_vocab_size") is None:
        yield Finding("draft_vocab_size", f"{draft!r}", "SGLang takes the target's lm_head instead of the trained one")
    elif vocab and draft > vocab:
        yield Finding("draft_vocab_size", f"{draft}, larger than vocab_size {vocab}", "draft ids lead out of the vocabulary")


def _context(case: Case) -> Iterator[Finding]:
    length, facts = case.head.size("max_position_embeddings"), case.facts
    where = case.head.name("max_position_embeddings")
    if length is None:
        yield Finding(
            where, f"{case.head.get('max_position_embeddings')!r}", "LlamaConfig assumes 2048: beyond it acceptance is 1.00"
        )
    elif facts and length < facts.max_position_embeddings:
        found = f"{length}, the target's is {facts.max_position_embeddings}"
        yield Finding(where, found, f"beyond {length} tokens the draft is served at acceptance 1.00, without an error")


def _rope(case: Case) -> Iterator[Finding]:
    theta, section, scaled = case.head.rope
    if case.facts is None:
        return
    if theta != case.facts.rope_theta:
        how = "is" if case.head.get("rope_theta") or case.head.get("rope_parameters") else "is missing, which means"
        found = f"{how} {theta or DEFAULT_THETA:g}, the target's is {case.facts.rope_theta:g}"
        yield Finding(case.head.name("rope_theta"), found, "positions are rotated by other angles than in training")
    if scaled != case.facts.scaled_rope:
        found = f"{scaled or 'plain'}, the target's is {case.facts.scaled_rope or 'plain'}"
        yield Finding(case.head.name("rope_scaling"), found, "positions are scaled unlike in training")
    if section != case.facts.mrope_section:
        found = f"mrope_section {section}, the target's is {case.facts.mrope_section}"
        yield Finding(
            case.head.name("rope_scaling"), found, "picture positions reach the draft in another layout than in training"
        )


def _switches(case: Case) -> Iterator[Finding]:
    head = case.head
    for key in ("attention_bias", "mlp_bias", "bias"):
        if head.get(key):
            yield Finding(
                head.name(key), f"{head.get(key)!r}, expected false", "the engine adds biases that have no weights here"
            )
    if "target_hidden_size" in head.config and head.config["target_hidden_size"] is None and head.format == Format.eagle3:
        yield Finding("target_hidden_size", "null", "SGLang multiplies it by three and stops; leave the field out")
    elif head.get("target_hidden_size") not in (None, head.get("hidden_size")):
        found = f"{head.get('target_hidden_size')}, hidden_size is {head.get('hidden_size')}"
        yield Finding("target_hidden_size", found, "fc gets another width than its weight has")
    if head.format != Format.speculators and head.get("norm_before_residual"):
        yield Finding(
            "norm_before_residual",
            "true",
            "vLLM normalises the residual, SGLang has no such switch and computes something else",
        )
    for key in EXTRA_NORMS:
        if head.get(key):
            yield Finding(key, "true", "needs a norm that the trained drafts here do not have; SGLang ignores it")


def _speculators(case: Case) -> Iterator[Finding]:
    config = case.head.config
    if "model_type" in config:
        yield Finding("model_type", f"{config['model_type']!r} at the top level", "vLLM does not look for a speculator then")
    if config.get("speculators_model_type") != "eagle3":
        yield Finding(
            "speculators_model_type", f"{config.get('speculators_model_type')!r}, expected 'eagle3'", "vLLM refuses it"
        )
    if "norm_before_residual" not in config:
        yield Finding("norm_before_residual", "missing", "vLLM assumes true, the draft was trained with false")
    elif config["norm_before_residual"] is not False:
        yield Finding("norm_before_residual", f"{config['norm_before_residual']}", "only vLLM can serve it", is_warning=True)
    if case.head.layer is config:
        yield Finding("transformer_layer_config", "missing", "speculators cannot build the decoder layer")
    yield from _proposal(config.get("speculators_config"))


def _proposal(written: Any) -> Iterator[Finding]:
    if not isinstance(written, dict):
        yield Finding("speculators_config", f"{written!r}", "vLLM cannot find the verifier and the number of tokens")
        return
    methods = written.get("proposal_methods")
    listed = methods if isinstance(methods, list) else []
    kinds = [method.get("proposal_type") for method in listed if isinstance(method, dict)]
    if written.get("default_proposal_method") not in kinds:
        found = f"{written.get('default_proposal_method')!r} is not one of {kinds}"
        yield Finding("speculators_config.default_proposal_method", found, "speculators refuses the config")
    verifier = written.get("verifier")
    if not isinstance(verifier, dict) or not verifier.get("name_or_path"):
        yield Finding("speculators_config.verifier", f"{verifier!r}", "`vllm serve DIR` does not know which target to load")


def _levels(case: Case) -> Iterator[Finding]:
    """Both engines must read the same hidden states; what is not written means the default."""
    head, facts = case.head, case.facts
    default = default_levels(facts.num_layers) if facts else None
    read_by = {"vLLM": head.levels_vllm or default}
    if head.format == Format.eagle3:
        read_by["SGLang"] = head.levels_sglang or default
    for engine, levels in read_by.items():
        if levels is not None and (problem := _bad_levels(levels, facts.num_layers if facts else None)):
            yield Finding(LEVELS_KEY, f"{engine} reads hidden_states{levels}", problem)
    if len({str(levels) for levels in read_by.values()}) > 1:
        found = ", ".join(f"{engine} reads hidden_states{levels or ' default'}" for engine, levels in read_by.items())
        effect = "one of the engines feeds it other features than in training: acceptance near 1.00"
        yield Finding(f"{LEVELS_KEY} and eagle_config.{LEVELS_KEY}", found, effect)


def _bad_levels(levels: list[Any], num_layers: int | None) -> str | None:
    if len(levels) != FEATURE_LEVELS or not all(isinstance(level, int) for level in levels):
        return f"fc takes exactly {FEATURE_LEVELS} levels"
    if any(later <= earlier for earlier, later in zip(levels, levels[1:], strict=False)) or levels[0] < 0:
        return "engines capture levels in rising order, whatever order is written"
    if num_layers is not None and levels[-1] >= num_layers:
        return f"the target has {num_layers} layers and engines capture the inputs of layers 0 to {num_layers - 1} only"
    return None
