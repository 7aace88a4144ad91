"""The layout of the package speculators, and the `speculators` format: the tensors of `eagle3` in it, served by vLLM.

A folder has no model_type at the top level: readers recognize it by `speculators_model_type`. vLLM copies only the fields of
`transformer_layer_config`, and those that it knows of the algorithm, to the draft's config.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from checkpoints.export.configs import EngineConfig, as_mapping
from checkpoints.export.format_checks import LAYER_CHECKS, check_tensors, single_layer
from checkpoints.export.formats.base import TYPE, CheckInput, Checks
from checkpoints.export.formats.eagle3 import Eagle3Format, draft_vocabulary, feature_levels
from checkpoints.export.formats.records import Finding


def _layout(given: CheckInput) -> Iterator[Finding]:
    """Yields the findings about a config that is not recognized as a speculator's, or lacks the decoder layer's part."""
    raw, algorithm = given.config.raw, given.format.algorithm
    if "model_type" in raw:
        effect = "vLLM does not recognize the folder as a speculator"
        yield Finding("model_type", f"{raw['model_type']!r} at the top level", effect)
    if raw.get(TYPE) != algorithm:
        yield Finding(TYPE, f"{raw.get(TYPE)!r}, expected {algorithm!r}", "vLLM refuses it")
    if given.config.layer is raw:
        yield Finding("transformer_layer_config", "missing", "speculators cannot build the decoder layer")


def _proposal(given: CheckInput) -> Iterator[Finding]:
    """Yields the findings about `speculators_config`, from which `vllm serve DIR` takes the target and the drafted tokens."""
    written = given.config.raw.get("speculators_config")
    if not isinstance(written, dict):
        yield Finding("speculators_config", f"{written!r}", "vLLM finds neither the verifier nor the number of tokens")
        return
    types = [method.get("proposal_type") for method in _methods(given.config.raw)]
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


SPECULATORS_CHECKS = (_layout, _proposal)


def residual(given: CheckInput) -> Iterator[Finding]:
    """Yields the finding about a residual stream that is not specified, or that vLLM alone supports."""
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
        *(*LAYER_CHECKS, single_layer, draft_vocabulary, *SPECULATORS_CHECKS),
        *(residual, feature_levels, check_tensors),
    )

    def recognizes(self, config: EngineConfig) -> bool:
        return TYPE in config.raw or self.engine_class in config.classes
