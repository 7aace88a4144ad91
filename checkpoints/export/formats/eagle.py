"""EAGLE's formats: `eagle` (EAGLE-1/2), `eagle3`, and `speculators`, the tensors of `eagle3` in that package's layout.

`eagle` has a flavour per engine: vLLM's fc has no bias, SGLang's has one (written as zeros). Neither has a norm at the input of
its attention; vLLM with our plugin does.

`eagle3` is one folder that both engines load, and the format of SpecForge, AngelSlim and SafeAILab. The default of both for the
feature levels is not written. Other levels are written twice: vLLM uses `eagle_aux_hidden_state_layer_ids` unchanged, SGLang
reads the one in `eagle_config` and adds one. Levels 1, 4, 7:

    eagle_aux_hidden_state_layer_ids: [1, 4, 7]    eagle_config.eagle_aux_hidden_state_layer_ids: [0, 3, 6]

A folder of speculators has no model_type at the top level: readers recognize it by `speculators_model_type`. vLLM copies only
the fields of `transformer_layer_config`, and those that it knows of the algorithm, to the draft's config.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from checkpoints.export.configs import (
    FEATURE_LEVELS,
    FUSED_NORMS,
    GIVE_LEVELS,
    LEVELS_KEY,
    NORMS,
    EngineConfig,
    TensorSpec,
    TensorSpecs,
    as_mapping,
    default_levels,
    head_specs,
    layer_specs,
    levels_problem,
)
from checkpoints.export.folder import export_info
from checkpoints.export.format_checks import HEAD_NORMS, LAYER_CHECKS, check_tensors, switches, unsupported_residual
from checkpoints.export.formats.base import (
    TYPE,
    CheckInput,
    Checks,
    ExportFormat,
    Finding,
    ImportOptions,
    Obstacle,
    fixed_batch,
    with_prefix,
)
from checkpoints.export.target import EMBEDDING, TargetFacts
from checkpoints.vllm_plugin import EAGLE_WITH_NORM
from sage.drafts.eagle import Eagle3Config, Eagle3Draft, EagleConfig, EagleDraft
from sage.drafts.head import DraftHead

SGLANG, PLUGIN = "sglang", "plugin"
CLASSES = {"vllm": "EagleLlamaForCausalLM", SGLANG: "LlamaForCausalLMEagle", PLUGIN: EAGLE_WITH_NORM}
NO_BIAS = "SGLang's fc has a bias and keeps a random one: acceptance falls to 1.00"
SAVED_LAYER = "layers.0."  # prefix of the layer's tensors in the `eagle3` folders of most trainers


def single_layer(given: CheckInput) -> Iterator[Finding]:
    """The config must have one layer. Some trainers copy the target's layer count to such a draft, which can be imported."""
    layers = given.config.get("num_hidden_layers")
    if layers != 1:
        is_copied = layers is None or (given.facts is not None and layers == given.facts.num_layers)
        refusal = "" if is_copied else "our head has one layer, cannot import it"
        effect = "the engine builds layers without weights"
        yield given.at("num_hidden_layers", f"{layers!r}, expected 1", effect, refusal=refusal)


EAGLE_CHECKS = (*LAYER_CHECKS, switches, single_layer)


class EagleFormat(ExportFormat):
    """EAGLE-1/2 drafts: features instead of logits, the target's lm_head, no norms at the input and the output."""

    template = "eagle"
    draft = EagleDraft
    checks = (*EAGLE_CHECKS, unsupported_residual, check_tensors)
    expressed = ("input_norm",)
    own_layer, layer = "layer.", "layers.0."
    method = "eagle"
    effect_of_unexpected = "the engine skips it without a message: it serves something else than was trained"
    output = "feature"

    @property
    def engine_class(self) -> str:  # type: ignore[override]
        return CLASSES[self.flavour or SGLANG]

    @property
    def _has_norm(self) -> bool:
        return self.flavour == PLUGIN

    def needs_plugin(self, facts: TargetFacts) -> bool:
        return self._has_norm or super().needs_plugin(facts)

    def tensors(self, state: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        bias = {"fc.bias": torch.zeros(len(state["fc.weight"]), dtype=dtype)} if self.flavour == SGLANG else {}
        return super().tensors(state, dtype) | bias

    def obstacles(self, draft: Any, facts: TargetFacts) -> Iterator[Obstacle]:
        if draft.input_norm and not self._has_norm:
            layer = "the engines' `eagle` layer has no input_layernorm"
            problem = f"true, but {layer}, so its attention's input would differ from training"
            remedy = "train with draft.input_norm=false, or export with --flavour plugin for vLLM with our plugin"
            yield Obstacle(key="draft.input_norm", value="true", problem=problem, remedy=remedy)
        if self._has_norm and not draft.input_norm:
            problem = "the draft has no norm at the input of its attention, which this flavour adds"
            yield Obstacle(key="--flavour plugin", problem=problem, remedy="give --flavour vllm")

    def warnings(self, draft: Any, facts: TargetFacts) -> list[str]:
        if self.flavour != SGLANG or not facts.mrope_section:
            return []
        return ["SGLang's EAGLE-1/2 layer uses plain text positions, not M-RoPE: after an image they differ from training."]

    def specs(self, config: EngineConfig) -> TensorSpecs:
        hidden = config.sizes.hidden
        bias = TensorSpec((hidden,), is_zero=True, effect_if_missing=NO_BIAS)
        return {
            **layer_specs(config, self.layer, norms=NORMS if self._has_norm else NORMS[1:]),
            "fc.weight": TensorSpec((hidden, 2 * hidden)),
            EMBEDDING: TensorSpec((config.sizes.vocab, hidden), is_optional=True),
            **({"fc.bias": bias} if self.flavour == SGLANG else {}),
        }

    def draft_config(self, given: CheckInput, facts: TargetFacts, options: ImportOptions) -> EagleConfig:
        fields = self.head_fields(given.config, facts, options)
        return EagleConfig(**fields, input_norm=self._has_norm, image_inputs=options.image_inputs or "embed")

    @torch.no_grad()
    def outputs(self, draft: DraftHead) -> Tensor:
        """Returns the predicted features [B, T, D]."""
        embeds, levels, positions = fixed_batch(draft)
        return draft(embeds, levels[..., : draft.config.hidden_size], positions)


# -- EAGLE-3 -----------------------------------------------------------------------------------------------------------


def draft_vocabulary(given: CheckInput) -> Iterator[Finding]:
    """`draft_vocab_size` must be there, and not too large."""
    vocab, draft_vocab = given.config.size("vocab_size"), given.config.get("draft_vocab_size")
    if given.config.size("draft_vocab_size") is None:
        yield Finding("draft_vocab_size", f"{draft_vocab!r}", "SGLang uses the target's lm_head instead of the trained one")
    elif vocab and draft_vocab > vocab:
        found = f"{draft_vocab}, larger than vocab_size {vocab}"
        yield Finding("draft_vocab_size", found, "draft ids are outside the vocabulary")


def feature_levels(given: CheckInput) -> Iterator[Finding]:
    """Levels that engines cannot capture or read differently; without any, the default applies."""
    config, num_layers = given.config, given.facts.num_layers if given.facts else None
    count, default = given.format.num_levels, default_levels(num_layers) if num_layers else None
    if given.options and given.options.levels:
        chosen, count = list(given.options.levels), count or len(config.vllm_levels or range(FEATURE_LEVELS))
        if problem := levels_problem(chosen, num_layers, count):
            yield Finding("--levels", str(chosen), "", refusal=problem)
        return
    written = {"vLLM": config.vllm_levels, "llama.cpp": config.vllm_levels, "SGLang": config.sglang_levels}
    levels_of = {engine: written[engine] or default for engine in given.format.engines}
    for engine, read in levels_of.items():
        if read is not None and (effect := levels_problem(read, num_layers, count)):
            is_missing = given.options is not None and not written[engine] and any(written.values())
            refusal = "" if is_missing else f"{effect}; {GIVE_LEVELS}"
            yield Finding(LEVELS_KEY, f"{engine} reads hidden_states{read}", effect, refusal=refusal)
    if len({str(levels) for levels in levels_of.values()}) > 1:
        found = ", ".join(f"{engine} reads hidden_states{levels or ' default'}" for engine, levels in levels_of.items())
        effect = "one of the engines feeds it other features than in training: acceptance near 1.00"
        refusal = f"{GIVE_LEVELS}: those used in training" if all(written.values()) else ""
        yield Finding(f"{LEVELS_KEY} and eagle_config.{LEVELS_KEY}", found, effect, refusal=refusal)


def _null_target_size(given: CheckInput) -> Iterator[Finding]:
    if given.config.raw.get("target_hidden_size", ...) is None:
        yield Finding("target_hidden_size", "null", "SGLang multiplies it by three and stops; omit the field")


def norms_of(config: EngineConfig) -> dict[str, bool]:
    """Returns which of the norms around fc and of the output a draft has; engines read the first from `eagle_config` too."""
    nested, first = as_mapping(config.raw.get("eagle_config")), HEAD_NORMS[0]
    return {key: bool(config.raw.get(key)) for key in HEAD_NORMS} | ({first: bool(nested[first])} if first in nested else {})


class Eagle3Format(ExportFormat):
    """EAGLE-3 drafts for vLLM and SGLang."""

    template = "eagle3"
    draft = Eagle3Draft
    expressed: ClassVar[tuple[str, ...]] = ("feature_levels", "draft_vocab_size", "norm_before_residual", *HEAD_NORMS)
    own_layer = layer = "midlayer."
    engine_class = "LlamaForCausalLMEagle3"
    other_classes: ClassVar[tuple[str, ...]] = ("Eagle3LlamaForCausalLM", "LlamaForCausalLM")  # AngelSlim's and SafeAILab's
    method = "eagle3"
    needs_t2d: ClassVar[bool] = False  # whether a reduced draft vocabulary needs t2d
    checks: ClassVar[Checks] = (
        *(*EAGLE_CHECKS, draft_vocabulary, _null_target_size, unsupported_residual, feature_levels, check_tensors),
    )

    def config_values(self, draft: Any, facts: TargetFacts) -> dict[str, Any]:
        levels, norms = list(draft.feature_levels), {key: True for key in HEAD_NORMS if getattr(draft, key)}
        values = super().config_values(draft, facts) | {"levels": levels, "num_levels": len(levels), **norms}
        if levels == default_levels(facts.num_layers):
            return values
        eagle_config = {LEVELS_KEY: [k - 1 for k in draft.feature_levels], "use_aux_hidden_state": True}
        return values | {"vllm_levels": levels, "eagle_config": eagle_config}

    def obstacles(self, draft: Any, facts: TargetFacts) -> Iterator[Obstacle]:
        if draft.norm_before_residual and "SGLang" in self.engines:
            remedy = "--format speculators serves it with vLLM"
            problem = "true, which SGLang does not support"
            yield Obstacle(key="draft.norm_before_residual", value="true", problem=problem, remedy=remedy)
        levels = list(draft.feature_levels)
        if levels_problem(levels, facts.num_layers, self.num_levels):
            counted = "any number of" if self.num_levels is None else f"exactly {self.num_levels}"
            problem = f"{levels} cannot be served: engines fuse {counted} increasing levels of 0..{facts.num_layers - 1}"
            yield Obstacle(key="draft.feature_levels", value=str(levels), problem=problem, remedy="train with such levels")

    def recognizes(self, config: EngineConfig) -> bool:
        return "draft_vocab_size" in config.raw or any("Eagle3" in name for name in config.classes)

    def specs(self, config: EngineConfig) -> TensorSpecs:
        levels = FEATURE_LEVELS if self.num_levels else len(config.vllm_levels or range(FEATURE_LEVELS))
        layer = layer_specs(config, self.layer, FUSED_NORMS, self.layer_has(config))
        has, hidden = norms_of(config), config.sizes.hidden
        norms = {"input_norm.weight": TensorSpec((levels * hidden,))} if has["norm_before_fc"] else {}
        norms |= {f"fc_norm.{i}.weight": TensorSpec((hidden,)) for i in range(levels) if has["fc_norm"]}
        return layer | norms | head_specs(config, levels, self.needs_t2d)

    def layer_has(self, config: EngineConfig) -> tuple[str, ...]:
        """Returns what a layer has besides that of EAGLE-3, as in `layer_specs`."""
        return ()

    def format_name(self, name: str) -> str | None:
        known = super().format_name(name)
        return known and with_prefix(known, SAVED_LAYER, self.layer)

    def draft_config(self, given: CheckInput, facts: TargetFacts, options: ImportOptions) -> Eagle3Config:
        return Eagle3Config(**self.config_fields(given, facts, options))

    def config_fields(self, given: CheckInput, facts: TargetFacts, options: ImportOptions) -> dict[str, Any]:
        """Returns the fields of our draft's configuration."""
        config = given.config
        levels = options.levels or config.vllm_levels or config.sglang_levels or default_levels(facts.num_layers)
        return {
            **self.head_fields(config, facts, options),
            "draft_vocab_size": config.size("draft_vocab_size") or facts.vocab_size,
            "norm_before_residual": bool(config.raw.get("norm_before_residual", False)),
            **norms_of(config),
            "feature_levels": list(levels),
            "image_inputs": options.image_inputs or export_info(given.folder).get("image_inputs") or "embed",
        }

    @torch.no_grad()
    def outputs(self, draft: DraftHead) -> Tensor:
        """Returns logits [B, 2 * T, U]: those of pairs, and of pairs with the first ones' outputs as features."""
        assert isinstance(draft, Eagle3Draft)
        embeds, levels, positions = fixed_batch(draft)
        first = draft(embeds, draft.combine(levels), positions)
        return draft.lm_head(draft.to_lm_head(torch.cat((first, draft(embeds, first, positions)), 1)))


# -- the layout of the package speculators -----------------------------------------------------------------------------


def speculators_layout(given: CheckInput) -> Iterator[Finding]:
    """The folder must be a speculator's; `vllm serve DIR` takes target and drafted tokens from `speculators_config`."""
    raw, algorithm, written = given.config.raw, given.format.algorithm, given.config.raw.get("speculators_config")
    if "model_type" in raw:
        effect = "vLLM does not recognize the folder as a speculator"
        yield Finding("model_type", f"{raw['model_type']!r} at the top level", effect)
    if raw.get(TYPE) != algorithm:
        yield Finding(TYPE, f"{raw.get(TYPE)!r}, expected {algorithm!r}", "vLLM refuses it")
    if given.config.layer is raw:
        yield Finding("transformer_layer_config", "missing", "speculators cannot build the decoder layer")
    if not isinstance(written, dict):
        yield Finding("speculators_config", f"{written!r}", "vLLM finds neither the verifier nor the number of tokens")
        return
    types = [method.get("proposal_type") for method in _methods(raw)]
    if written.get("default_proposal_method") not in types:
        found = f"{written.get('default_proposal_method')!r} is not one of {types}"
        yield Finding("speculators_config.default_proposal_method", found, "speculators refuses the config")
    verifier = written.get("verifier")
    if not isinstance(verifier, dict) or not verifier.get("name_or_path"):
        effect = "`vllm serve DIR` does not know which target to load"
        yield Finding("speculators_config.verifier", f"{verifier!r}", effect)


def proposed_tokens(raw: Any) -> Any:
    """Returns the drafted tokens per round of the first proposal method, of any type; None if there is none."""
    return next((method.get("speculative_tokens") for method in _methods(raw)), None)


def _methods(raw: Any) -> list[dict[str, Any]]:
    listed = as_mapping(raw.get("speculators_config")).get("proposal_methods")
    return [method for method in listed if isinstance(method, dict)] if isinstance(listed, list) else []


def residual(given: CheckInput) -> Iterator[Finding]:
    """The residual stream must be specified; vLLM alone supports one before the norm."""
    key, raw = "norm_before_residual", given.config.raw
    if key not in raw:
        effect = "vLLM's default is true, the draft was trained with false"
        yield Finding(key, "missing", effect, refusal="engines assume true, others false; add the value used in training")
    elif raw[key] is not False:
        yield Finding(key, f"{raw[key]}", "only vLLM supports it", is_warning=True)


class SpeculatorsFormat(Eagle3Format):
    """EAGLE-3 drafts in the layout of the package `speculators`."""

    template = "speculators"
    layer = "layers.0."
    engine_class = "Eagle3DraftModel"
    other_classes: ClassVar[tuple[str, ...]] = ()
    layer_types = ("llama", "qwen3")
    has_embedding = True
    needs_t2d = True
    names_target = True
    algorithm = "eagle3"
    checks: ClassVar[Checks] = (
        *(*EAGLE_CHECKS, draft_vocabulary, speculators_layout, residual, feature_levels, check_tensors),
    )

    def recognizes(self, config: EngineConfig) -> bool:
        return TYPE in config.raw or self.engine_class in config.classes
