"""The `speculators` format, served by vLLM: the tensors of `eagle3` under `layers.0` and a self-contained config."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from checkpoints.export.formats.eagle3 import eagle3_tensors, layer_config
from checkpoints.export.formats.layout import LEVELS_KEY, SPECULATORS_CLASS
from checkpoints.export.target_facts import TargetFacts
from sage.io.dtypes import dtype_name

VERSION = "0.9.0"  # of the PyPI package that the configs are tested against
SPECULATIVE_TOKENS = 3


def speculators_config(draft: Any, facts: TargetFacts, dtype: torch.dtype) -> dict[str, Any]:
    """Returns config.json of the `speculators` format; see `eagle3_config` for the arguments.

    It has no top-level model_type: readers recognize a speculator by `speculators_model_type`.
    """
    name = dtype_name(dtype)
    return {
        "architectures": [SPECULATORS_CLASS],
        "speculators_model_type": "eagle3",
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
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": SPECULATIVE_TOKENS,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": facts.name, "architectures": [facts.architecture]},
        },
        "transformer_layer_config": {"model_type": "llama", **layer_config(draft, facts), "torch_dtype": name},
    }


def speculators_tensors(state: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns a trained draft's tensors under the format's names."""
    tensors = eagle3_tensors(state, dtype)
    return {_renamed(name, "midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def eagle3_name(name: str) -> str:
    """Returns a tensor's name in the `eagle3` format."""
    return _renamed(name, "layers.0.", "midlayer.")


def _renamed(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name
