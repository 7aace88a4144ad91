"""The `eagle3` format: one folder that both vLLM and SGLang load.

Feature levels: the default of both engines is not written. Other levels are written twice: vLLM uses
`eagle_aux_hidden_state_layer_ids` unchanged, SGLang reads the one in `eagle_config` and adds one. Levels 1, 4, 7:

    eagle_aux_hidden_state_layer_ids: [1, 4, 7]    eagle_config.eagle_aux_hidden_state_layer_ids: [0, 3, 6]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from checkpoints.export.formats.layout import EAGLE3_CLASS, LEVELS_KEY, default_levels
from checkpoints.export.target_facts import TargetFacts
from sage.io.dtypes import dtype_name


def eagle3_config(draft: Any, facts: TargetFacts, dtype: torch.dtype) -> dict[str, Any]:
    """Returns config.json of the `eagle3` format for the `Eagle3Config` of a trained draft, exported in `dtype`."""
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
    """Returns the config of the Llama layer of every format: sizes of the draft, rope and context length of the target."""
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
        if facts.mrope_interleaved:
            config["rope_scaling"]["mrope_interleaved"] = True
    return config


def eagle3_tensors(state: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns a trained draft's tensors, whose names are those of the format; without maps for a full draft vocabulary."""
    is_full = len(state["d2t"]) == len(state["t2d"])
    kept = {name: tensor for name, tensor in state.items() if not (is_full and name in ("d2t", "t2d"))}
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in kept.items()}
