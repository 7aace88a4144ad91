"""The `eagle3` format: one folder that vLLM and SGLang both load.

Feature levels: the default of both engines is left out of the config. Any other choice is written twice, since vLLM reads
`eagle_aux_hidden_state_layer_ids` as it is and SGLang reads it inside `eagle_config` and adds one. Levels 1, 4, 7:

    eagle_aux_hidden_state_layer_ids: [1, 4, 7]    eagle_config.eagle_aux_hidden_state_layer_ids: [0, 3, 6]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from checkpoints.export.facts import TargetFacts
from checkpoints.export.formats.layout import EAGLE3_CLASS, LEVELS_KEY, default_levels
from sage.dtypes import dtype_name


def eagle3_config(draft: Any, facts: TargetFacts, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of the `eagle3` format.

    Args:
        draft: the `Eagle3Config` of the trained draft.
        facts: of its target.
        dtype: of the exported weights.
    """
    config = {
        "architectures": [EAGLE3_CLASS],
        "model_type": "llama",
        **layer_config(draft, facts),
        "draft_vocab_size": draft.draft_vocab_size,
        "dtype": dtype_name(dtype),
        "torch_dtype": dtype_name(dtype),
    }
    if list(draft.feature_levels) != default_levels(facts.num_layers):
        config[LEVELS_KEY] = list(draft.feature_levels)
        config["eagle_config"] = {LEVELS_KEY: [k - 1 for k in draft.feature_levels], "use_aux_hidden_state": True}
    return config


def layer_config(draft: Any, facts: TargetFacts) -> dict[str, Any]:
    """The Llama layer that every format describes: sizes from the draft, rope and context from the target."""
    config = {
        "hidden_size": draft.hidden_size,
        "intermediate_size": draft.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": draft.num_attention_heads,
        "num_key_value_heads": draft.num_key_value_heads,
        "head_dim": draft.head_dim,
        "hidden_act": draft.hidden_act,
        "rms_norm_eps": draft.rms_norm_eps,
        "vocab_size": facts.vocab_size,
        "max_position_embeddings": facts.max_position_embeddings,
        "rope_theta": facts.rope_theta,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    }
    if facts.scaled_rope:
        config["rope_scaling"] = dict(facts.scaled_rope)
    if facts.mrope_section:
        config["rope_scaling"] = {"type": "mrope", "rope_type": "default", "mrope_section": list(facts.mrope_section)}
    return config


def eagle3_tensors(state: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """A trained draft's tensors under the format's names, which are its own; without maps where there is nothing to map."""
    is_whole = len(state["d2t"]) == len(state["t2d"])
    kept = {name: tensor for name, tensor in state.items() if not (is_whole and name in ("d2t", "t2d"))}
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in kept.items()}
