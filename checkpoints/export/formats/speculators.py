"""The `speculators` format, served by vLLM: the tensors of `eagle3` under `layers.0` and a self-contained config."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from checkpoints.export.checks import LAYER_CHECKS, CheckInput, Finding, check_tensors, single_layer, vocabulary_maps
from checkpoints.export.configs import LEVELS_KEY, EngineConfig, TargetFacts, layer_config
from checkpoints.export.folder import CONFIG
from checkpoints.export.formats.base import SPECULATIVE_TOKENS
from checkpoints.export.formats.eagle3 import Eagle3Format, draft_vocabulary, feature_levels
from sage.io.dtypes import dtype_name

VERSION = "0.9.0"  # of the PyPI package that the configs are tested against
ALGORITHM = "eagle3"


def _speculator(given: CheckInput) -> Iterator[Finding]:
    raw = given.config.raw
    if "model_type" in raw:
        effect = "vLLM does not recognize the folder as a speculator"
        yield Finding("model_type", f"{raw['model_type']!r} at the top level", effect)
    if raw.get("speculators_model_type") != ALGORITHM:
        found = f"{raw.get('speculators_model_type')!r}, expected {ALGORITHM!r}"
        yield Finding("speculators_model_type", found, "vLLM refuses it")
    if "norm_before_residual" not in raw:
        yield Finding("norm_before_residual", "missing", "vLLM's default is true, the draft was trained with false")
    elif raw["norm_before_residual"] is not False:
        yield Finding("norm_before_residual", f"{raw['norm_before_residual']}", "only vLLM supports it", is_warning=True)
    if given.config.layer is raw:
        yield Finding("transformer_layer_config", "missing", "speculators cannot build the decoder layer")


def _proposal(given: CheckInput) -> Iterator[Finding]:
    written = given.config.raw.get("speculators_config")
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


class SpeculatorsFormat(Eagle3Format):
    """EAGLE-3 drafts in the layout of the package `speculators`."""

    layer = "layers.0."
    engine_class = "Eagle3DraftModel"
    layer_types = ("llama", "qwen3")
    has_embedding = True
    needs_t2d = True
    checks = (
        *(*LAYER_CHECKS, single_layer, draft_vocabulary, _speculator, _proposal, feature_levels),
        *(check_tensors, vocabulary_maps),
    )

    def config(self, draft: Any, facts: TargetFacts, dtype: torch.dtype) -> dict[str, Any]:
        """Without a top-level model_type: readers recognize a speculator by `speculators_model_type`."""
        name = dtype_name(dtype)
        method = {
            "proposal_type": "greedy",
            "speculative_tokens": SPECULATIVE_TOKENS,
            "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }
        return {
            "architectures": [self.engine_class],
            "speculators_model_type": ALGORITHM,
            "speculators_version": VERSION,
            "draft_vocab_size": draft.draft_vocab_size,
            "norm_before_residual": draft.norm_before_residual,
            "norm_before_fc": False,
            "fc_norm": False,
            "norm_output": False,
            "target_hidden_size": None,
            LEVELS_KEY: list(draft.feature_levels),
            "dtype": name,
            "torch_dtype": name,
            "tie_word_embeddings": False,
            "speculators_config": {
                "algorithm": ALGORITHM,
                "default_proposal_method": "greedy",
                "proposal_methods": [method],
                "verifier": {"name_or_path": facts.name, "architectures": [facts.architecture]},
            },
            "transformer_layer_config": {"model_type": "llama", **layer_config(draft, facts), "torch_dtype": name},
        }

    def recognizes(self, config: EngineConfig) -> bool:
        return "speculators_model_type" in config.raw or self.engine_class in config.classes

    def norm_before_residual(self, folder: Path, config: EngineConfig) -> bool:
        if "norm_before_residual" not in config.raw:
            raise ValueError(
                f"{folder / CONFIG}: norm_before_residual is missing: engines assume true, others false; add the value used in "
                f"training"
            )
        return super().norm_before_residual(folder, config)

    def serve_command(self, engine: str, target: str, draft: str) -> str:
        """vLLM reads target and settings from the config."""
        return f"vllm serve {draft}"
