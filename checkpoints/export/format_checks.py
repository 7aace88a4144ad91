"""The checks that formats list: what engines expect of config.json and of tensors, and the effect of what is not met.

An import runs the same checks and refuses what our head cannot do without.

Shapes: U draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from checkpoints.export.configs import DEFAULT_EPS, DEFAULT_THETA, SIZES, as_mapping, is_size
from checkpoints.export.folder import PICKLED
from checkpoints.export.formats.base import MAPS, CheckInput, Finding
from sage.io.dtypes import dtype_name

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
KINDS = {"int64": (torch.int64,), "bool": (torch.bool,), "float": FLOATS}
INTEGERS = (torch.int64, torch.int32, torch.int16)
MAX_LISTED = 4  # tensors listed by name before "and N more"
HEAD_NORMS = ("norm_before_fc", "fc_norm", "norm_output")
ACTIVATIONS = (None, "silu", "gelu", "relu")  # that our layers compute; None: the default
CANNOT_IMPORT = "cannot import this draft"
UNSUPPORTED = "our head does not support it, cannot import it"
INVALID = "invalid, cannot import it"
RESIDUAL = "vLLM normalizes the residual, SGLang does not support it and computes something else"
TIED = "SGLang uses the embedding as lm_head and drops the trained one: acceptance 1.00"
NO_OTHER_SIZE = {
    "hidden_size": "the target's features have another size",
    "vocab_size": "draft and target use different token ids",
}
LENGTH_BY_AXES = {  # of `ExportFormat.has_axes`: what engines do without `max_position_embeddings`
    True: "LlamaConfig's default is 2048: beyond it acceptance is 1.00",
    False: "the engine stops, or takes a default of its own",
}


def is_token(value: Any, vocab: int | None) -> bool:
    """Returns whether a value is a token of a vocabulary; of any size, if that is unknown."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0 and (vocab is None or value < vocab)


def one_of(*values: Any) -> Callable[[Any], bool]:
    """Returns whether a value is one of these; None stands for a missing field too."""
    return lambda value: value in values


@dataclass(frozen=True)
class Field:
    """What engines expect of a field, for itself."""

    key: str
    is_met: Callable[[Any], bool]  # of the value, None if the field is missing
    expected: str  # in words
    effect: str  # in an engine, if it is not met
    is_top: bool = False  # whether the field is one of the draft, not of its decoder layer
    refusal: str = ""  # of an import; empty if only engines are affected


def check_fields(given: CheckInput, fields: Iterable[Field]) -> Iterator[Finding]:
    """Yields the findings about fields that are checked for themselves."""
    for field in fields:
        value = given.config.get(field.key)
        if not field.is_met(value):
            where = field.key if field.is_top else given.config.key_path(field.key)
            yield Finding(where, f"{value!r}, expected {field.expected}", field.effect, refusal=field.refusal)


is_absent = one_of(None, False)
SIZE_FIELDS = [Field(key, is_size, "a positive integer", "the engine cannot build the layer", refusal=INVALID) for key in SIZES]
BIASES = [
    Field(key, is_absent, "false", "the engine adds biases without weights", refusal=UNSUPPORTED)
    for key in ("attention_bias", "mlp_bias", "bias")
]


# -- config.json -------------------------------------------------------------------------------------------------------


def layer_class(given: CheckInput) -> Iterator[Finding]:
    """Classes of the draft and its layer, code to run, and quantization."""
    config, format_ = given.config, given.format
    written, model_type = config.raw.get("architectures"), config.layer.get("model_type")
    is_third_party = any(name in format_.other_classes for name in config.classes)
    is_loaded = is_third_party and len(config.classes) == len(format_.engines) == 1
    if written != [format_.engine_class] and not is_loaded:
        effect = "vLLM loads it, SGLang does not load it as a draft" if is_third_party else "no engine loads it as a draft"
        yield Finding("architectures", f"{written}, expected ['{format_.engine_class}']", effect)
    if model_type not in format_.layer_types:
        found = f"{model_type!r}, expected {' or '.join(format_.layer_types)}"
        yield given.at("model_type", found, "the engine's config loader refuses it")
    if "auto_map" in config.raw:
        effect = "engines run it only with trust_remote_code; no draft needs it"
        yield Finding("auto_map", "names Python code to run", effect, is_warning=format_.has_code)
    if config.raw.get("quantization_config"):
        yield Finding("quantization_config", "present", "engines expect quantized tensors; these are not quantized")


def sizes(given: CheckInput) -> Iterator[Finding]:
    """Sizes, activation and epsilon of the layer, and the sizes that must be the target's."""
    config, facts = given.config, given.facts
    yield from check_fields(given, SIZE_FIELDS)
    heads, kv_heads = config.size("num_attention_heads"), config.size("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        found = f"{kv_heads} does not divide {heads} heads"
        yield given.at("num_key_value_heads", found, "the engine refuses it", refusal=INVALID)
    activation, eps = config.get("hidden_act"), config.get("rms_norm_eps")
    if activation != "silu":
        refusal = "" if activation in ACTIVATIONS else INVALID
        yield given.at("hidden_act", f"{activation!r}, expected 'silu'", "vLLM's Llama layer refuses it", refusal=refusal)
    if not isinstance(eps, float) or not 0 < eps < 1:
        effect = f"the engine uses {DEFAULT_EPS:g}, whatever was used in training, or computes NaN"
        yield given.at("rms_norm_eps", f"{eps!r}", effect, refusal="" if eps is None else INVALID)
    for key, effect in NO_OTHER_SIZE.items():
        value = config.size(key)
        if facts and value and value != getattr(facts, key):
            found = f"{value}, the target's is {getattr(facts, key)}"
            remedy = f"give the target it was trained for in place of {facts.name or facts.model_type}"
            yield given.at(key, found, effect, refusal=remedy)
    key = "target_hidden_size"
    if config.get(key) not in (None, config.get("hidden_size")):
        found = f"{config.get(key)}, hidden_size is {config.get('hidden_size')}"
        yield Finding(key, found, "fc gets another input size than its weight has")


def context_length(given: CheckInput) -> Iterator[Finding]:
    """The draft needs positions for every token of the target's context."""
    key = "max_position_embeddings"
    length, facts = given.config.size(key), given.facts
    if length is None:
        yield given.at(key, f"{given.config.get(key)!r}", LENGTH_BY_AXES[given.format.has_axes])
    elif facts and length < facts.max_position_embeddings:
        found = f"{length}, the target's is {facts.max_position_embeddings}"
        yield given.at(key, found, f"beyond {length} tokens the draft is served at acceptance 1.00, without an error")


def rope(given: CheckInput) -> Iterator[Finding]:
    """The rope must be the one that engines compute for the target (`ExportFormat.has_axes`)."""
    config, facts, has_axes = given.config, given.facts, given.format.has_axes
    if given.options and given.options.use_target_rope:
        return
    (theta, section, scaled, _), key = config.rope, "rope_scaling" if has_axes else "rope_parameters"
    is_written = bool(config.get("rope_theta") or config.get("rope_parameters"))
    option = "positions would differ from training; --use-target-rope uses the target's"
    place = "rope_parameters" if as_mapping(config.get("rope_parameters")).get("rope_theta") else "the config itself"
    for other in (config.get("rope_theta"), as_mapping(config.get("rope_scaling")).get("rope_theta")):
        if isinstance(other, (int, float)) and theta > 0 and other != theta:
            found, refusal = f"{other:g}, and {theta:g} in {place}", "a contradiction; keep the one that was trained"
            yield given.at("rope_theta", found, "engines read one or the other", refusal=refusal)
    if section and not has_axes:
        effect = "vLLM stops: parallel drafting does not support M-RoPE; such drafts count positions along the stream"
        yield given.at(key, f"mrope_section {section}", effect)
    if not is_written and not has_axes:
        yield given.at(key, "missing", "each reader takes a theta of its own: 1e6 in vLLM")
    elif facts and theta != facts.rope_theta:
        found = f"{'' if is_written else 'missing, default '}{theta or DEFAULT_THETA:g}, the target's is {facts.rope_theta:g}"
        is_base = 0 < theta < float("inf")
        yield given.at("rope_theta", found, "rotation angles differ from training", refusal="" if is_base else INVALID)
    if facts and scaled != facts.scaled_rope:
        found = f"{scaled or 'unscaled'}, the target's is {facts.scaled_rope or 'unscaled'}"
        yield given.at(key, found, "positions are scaled differently in draft and target", refusal=option)
    if facts and has_axes and config.rope.axes != facts.rope.axes:
        found = f"mrope_section {config.rope.axes}, the target's is {facts.rope.axes}"
        yield given.at(key, found, "image positions differ from training", refusal=option)


LAYER_CHECKS = (layer_class, sizes, context_length, rope)  # of all formats
# EAGLE's layer has neither tied tables nor biases, and the normed feature is not its residual stream.
switches = partial(check_fields, fields=(Field("tie_word_embeddings", one_of(False), "false", TIED), *BIASES))
unsupported_residual = partial(check_fields, fields=[Field("norm_before_residual", is_absent, "false", RESIDUAL, is_top=True)])


# -- tensors -----------------------------------------------------------------------------------------------------------


def check_tensors(given: CheckInput) -> Iterator[Finding]:
    """All findings about a draft's tensors and maps; none if the config lacks the sizes to compare with."""
    if not given.specs:
        return
    yield from _names(given)
    yield from _shapes_and_dtypes(given)
    yield from _values(given)
    if given.weights.is_pickled:
        effect = "engines open it, but a pickle can run code: convert it to safetensors"
        yield Finding(PICKLED, "weights in a pickle", effect, is_warning=True)
    if "d2t" in given.specs:
        yield from _vocabulary_maps(given)


def _names(given: CheckInput) -> Iterator[Finding]:
    infos, specs, format_ = given.weights.infos, given.specs, given.format
    for name, spec in specs.items():
        if not spec.is_optional and name not in infos:
            refusal = "" if name in format_.borrowed else "the draft is incomplete"
            yield Finding(name, "missing", spec.effect_if_missing, refusal=refusal)
    extra = sorted(set(infos) - set(specs) - set(format_.borrowed))
    effect = format_.effect_of_unexpected
    prefixed = [name for name in extra if name.removeprefix("model.") in specs]
    if prefixed:
        yield Finding(prefixed[0], f"{len(prefixed)} tensors have the prefix 'model.'", effect)
    others = [name for name in extra if name not in prefixed]
    for name in others[:MAX_LISTED]:
        refusal = f"not part of our {format_.row.imports or format_.name} head, cannot import this draft"
        yield Finding(name, "unexpected tensor", effect, refusal=refusal)
    if len(others) > MAX_LISTED:
        yield Finding(format_.name, f"{len(others) - MAX_LISTED} more unexpected tensors", effect)


def _shapes_and_dtypes(given: CheckInput) -> Iterator[Finding]:
    for name, spec in given.specs.items():
        info = given.weights.infos.get(name)
        if info is None:
            continue
        if info.shape != spec.shape:
            found = f"shape {list(info.shape)}, expected {list(spec.shape)}"
            refusal = "config.json gives other sizes, cannot import this draft"
            yield Finding(name, found, "the engine stops, or loads a slice of it", refusal=refusal)
        if info.dtype not in KINDS[spec.kind]:
            is_number = spec.kind != "float" or (info.dtype is not None and info.dtype.is_floating_point)
            found = f"dtype {dtype_name(info.dtype)}, expected {spec.kind}"
            yield Finding(name, found, "the engine casts it or stops", refusal="" if is_number else CANNOT_IMPORT)
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
            effect = "all logits become NaN: acceptance 1.00 or an error"
            yield Finding(name, f"{num_bad} values are not finite", effect, refusal=CANNOT_IMPORT)
        elif spec.is_zero and bool(tensor.any()):
            yield Finding(name, "not zero", "drafts trained here have no bias", is_warning=True)
        elif tensor.numel() and not spec.is_zero and not bool(tensor.any()):
            yield Finding(name, "all zero", "the weight was not saved (ZeRO-3 without gathering?): acceptance 1.00")


def _vocabulary_maps(given: CheckInput) -> Iterator[Finding]:
    """d2t [U] must hold unique offsets (target id = draft id + d2t[draft id]), t2d [V] mark exactly the ids in its range.

    Maps of another shape or kind are findings of their own.
    """
    infos, vocab = given.weights.infos, given.specs["t2d"].shape[0]
    maps = {name: given.weights[name] for name in MAPS if name in infos and infos[name].shape == given.specs[name].shape}
    d2t, t2d = maps.get("d2t"), maps.get("t2d")
    if d2t is None or d2t.dtype not in INTEGERS:
        return
    if t2d is not None and t2d.dtype != torch.bool:
        t2d = None
    ids = torch.arange(len(d2t)) + d2t.long()
    if found := _d2t_problem(d2t.long(), ids, vocab, t2d):
        effect = "draft tokens are mapped to the wrong target tokens: acceptance 1.00, no error"
        yield Finding("d2t", found, effect, refusal=CANNOT_IMPORT)
    elif t2d is not None and not _agree(ids, t2d):
        found = f"marks {int(t2d.sum())} ids, d2t maps to {len(ids)}, {int(t2d[ids].sum())} of them marked"
        effect = "training and verification use other tokens than the draft vocabulary"
        yield Finding("t2d", found, effect, refusal=CANNOT_IMPORT)


def _d2t_problem(d2t: Tensor, ids: Tensor, vocab: int, t2d: Tensor | None) -> str:
    is_absolute = len(d2t) > 1 and bool((d2t[1:] > d2t[:-1]).all()) and int(d2t[0]) >= 0 and int(d2t[-1]) < vocab
    if is_absolute and (int(ids[-1]) >= vocab or (t2d is not None and _agree(d2t, t2d))):
        return "holds absolute target ids, not offsets (target id = draft id + d2t[draft id])"
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        return f"maps to ids {int(ids.min())} to {int(ids.max())}, the vocabulary is 0 to {vocab - 1}"
    num_duplicates = len(ids) - len(ids.unique())
    return f"maps {num_duplicates} draft ids to target ids that are already taken" if num_duplicates else ""


def _agree(ids: Tensor, t2d: Tensor) -> bool:
    return int(t2d.sum()) == len(ids) and bool(t2d[ids].all())
