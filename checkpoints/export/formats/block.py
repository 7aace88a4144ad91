"""Drafts that predict a block in one pass: what their formats have in common.

Feature levels are written in two conventions. hidden_states[k] of transformers is the output of layer k - 1 (k = 0: the
embeddings). The layout of the package speculators writes k, the method's own layout the layer. Levels 2, 6, 10:

    aux_hidden_state_layer_ids: [2, 6, 10]    dflash_config.target_layer_ids: [1, 5, 9]

Shapes: H hidden, A feature levels, V target vocabulary, U draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from checkpoints.export.configs import (
    EMBEDDING,
    LAYER_FIELDS,
    LM_HEAD,
    EngineConfig,
    TargetFacts,
    TensorSpec,
    TensorSpecs,
    as_mapping,
    bias_specs,
    layer_specs,
    read_target_embedding,
    read_target_lm_head,
    rope_parameters,
)
from checkpoints.export.folder import CONFIG, Weights
from checkpoints.export.formats.base import (
    BATCH,
    TOKENS,
    CheckInput,
    Checks,
    ExportFormat,
    Finding,
    ImportOptions,
    Obstacle,
    fixed_batch,
)
from checkpoints.export.formats.block_checks import (
    BLOCK_CHECKS,
    CAUSAL,
    FULL,
    MASK_FILE,
    NATIVE,
    NON_CAUSAL_WINDOW,
    SLIDING,
    as_integers,
    attention_of,
    is_causal,
    levels_problem,
    native_default,
)
from checkpoints.export.formats.layout import layout, proposal, proposed_tokens, speculator_config
from checkpoints.export.tensor_checks import with_vocabulary_maps
from sage.drafts.block import BlockConfig, BlockDraft
from sage.drafts.head import DraftHead
from sage.io.dtypes import dtype_name
from sage.targets.rope import RopeConfig

MAX_LAYERS = 64
LEVELS = "aux_hidden_state_layer_ids"
NO_ROWS = "vLLM drafts with the target's lm_head, whose rows are other tokens than the draft vocabulary's: acceptance 1.00"
NO_D2T = "engines take draft ids for target ids and propose the wrong tokens: acceptance 1.00, no error"


class BlockFormat(ExportFormat):
    """What the formats of one-pass drafts have in common, in the layout of the package speculators.

    Class attributes:
        is_anchored: whether the slot of the anchor predicts too.
        reads_mask_file: whether vLLM takes the mask token's embedding from a file of its own.
        conditional, other_conditional: `draft.conditional` of the drafts that it expresses, and of `other_format`.
    """

    draft = BlockDraft
    layer_types = ("qwen3",)
    own_layer = layer = "layers."
    expressed = (
        *("feature_levels", "draft_vocab_size", "block_size", "num_layers", "conditional", "conditional_rank"),
        *("feed", "causal", "confidence", "mask_token"),
    )
    checks: ClassVar[Checks] = (layout, proposal, *BLOCK_CHECKS)
    borrowed = (EMBEDDING, LM_HEAD)
    has_code = True
    effect_without_length = "the engine stops, or takes a default of its own"
    effect_of_unexpected = "vLLM stops at an unknown name"
    max_layers: ClassVar[int] = MAX_LAYERS
    is_anchored: ClassVar[bool]
    reads_mask_file: ClassVar[bool] = True
    conditional: ClassVar[str]
    other_conditional: ClassVar[str]
    other_format: ClassVar[str]
    difference_of = "an output"
    agreement_is = "cosine similarity of the outputs"

    # -- what a folder says --------------------------------------------------------------------------------------------

    @property
    def first_level(self) -> int:
        """The lowest level that the layout has an id for."""
        return 0

    @property
    def levels_key(self) -> str:
        """Where levels are written, for messages."""
        return LEVELS

    @property
    def mask_token_key(self) -> str:
        """Where the mask token is written, for messages."""
        return "mask_token_id"

    @property
    def causal_key(self) -> str:
        """Where causality is written besides `is_causal`, for messages."""
        return NON_CAUSAL_WINDOW

    def written_levels(self, config: EngineConfig) -> Any:
        """Returns the ids as they are written."""
        return config.raw.get(LEVELS)

    def levels(self, config: EngineConfig) -> list[int] | None:
        """Returns the indices k of the hidden_states[k] that vLLM reads; None if they are missing or no integers."""
        return as_integers(self.written_levels(config))

    def second_levels(self, config: EngineConfig) -> tuple[str, list[int]] | None:
        """Returns a second place that names levels, and the hidden_states that it means; None if there is no other."""
        found = as_integers(as_mapping(config.raw.get(NATIVE)).get("target_layer_ids"))
        return (f"{NATIVE}.target_layer_ids", [level + 1 for level in found]) if found else None

    def foreign_default(self, levels: list[int], num_layers: int) -> str:
        """Returns whose defaults the ids are, if they would mean other levels there; empty for none."""
        return "DFlash's own layout" if levels == native_default(num_layers, len(levels)) else ""

    def mask_token(self, config: EngineConfig) -> Any:
        """Returns the mask token, of any type."""
        return config.raw.get("mask_token_id")

    def causal_override(self, config: EngineConfig) -> bool | None:
        """Returns what vLLM reads where `is_causal` is missing; None: sliding layers are causal."""
        return not config.raw.get(NON_CAUSAL_WINDOW, True)

    def has_causal_override(self, config: EngineConfig) -> bool:
        """Returns whether `causal_override` is written, not a default."""
        return NON_CAUSAL_WINDOW in config.raw

    def proposed_tokens(self, config: EngineConfig) -> Any:
        """Returns the drafted tokens per round that the folder asks for, of any type."""
        return proposed_tokens(config.raw)

    def drafted(self, block_size: int) -> int:
        """Returns the tokens that a block drafts."""
        return block_size if self.is_anchored else block_size - 1

    def anchor_findings(self, given: CheckInput) -> Iterator[Finding]:
        """Yields findings about which slots predict."""
        return iter(())

    def head_specs(self, config: EngineConfig) -> TensorSpecs:
        """Returns the expected tensors of the heads beside lm_head."""
        return {}

    def specs(self, config: EngineConfig) -> TensorSpecs | None:
        layers, levels, dim = config.size("num_hidden_layers"), self.levels(config), config.head_dim
        if (sizes := config.sizes) is None or layers is None or layers > MAX_LAYERS or not levels or dim is None:
            return None
        hidden, vocab = sizes.hidden, sizes.vocab
        draft_vocab = config.size("draft_vocab_size") or vocab
        is_full = draft_vocab == vocab
        norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), hidden)
        norms |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), dim)
        specs: TensorSpecs = {}
        for index in range(layers):
            specs |= layer_specs(sizes, f"layers.{index}.", attention_input=hidden)
            specs |= {f"layers.{index}.{name}.weight": TensorSpec((size,)) for name, size in norms.items()}
            if config.get("attention_bias"):
                specs |= bias_specs(sizes, f"layers.{index}.")
        return {
            **specs,
            "fc.weight": TensorSpec((hidden, len(levels) * hidden)),
            "hidden_norm.weight": TensorSpec((hidden,)),
            "norm.weight": TensorSpec((hidden,)),
            **self.head_specs(config),
            LM_HEAD: TensorSpec((draft_vocab, hidden), is_optional=is_full, effect_if_missing=NO_ROWS),
            EMBEDDING: TensorSpec((vocab, hidden), is_optional=True),
            "d2t": TensorSpec((draft_vocab,), "int64", is_optional=is_full, effect_if_missing=NO_D2T),
            "t2d": TensorSpec((vocab,), "bool", is_optional=True),
        }

    # -- export --------------------------------------------------------------------------------------------------------

    def config(self, draft: Any, facts: TargetFacts, dtype: torch.dtype) -> dict[str, Any]:
        """Every key is written: vLLM's reader fills in none of Qwen3's defaults."""
        return {
            **speculator_config(self.algorithm, self.engine_class, facts, self.speculative_tokens(draft), dtype),
            "block_size": draft.block_size,
            "draft_vocab_size": draft.draft_vocab_size,
            LEVELS: list(draft.feature_levels),
            "mask_token_id": draft.mask_token,
            "sample_from_anchor": self.is_anchored,
            NON_CAUSAL_WINDOW: not draft.causal,
            "transformer_layer_config": self.layers_config(draft, facts, dtype),
        }

    def layers_config(self, draft: Any, facts: TargetFacts, dtype: torch.dtype) -> dict[str, Any]:
        """Returns the config of the layers: sizes of the draft, rope and context length of the target."""
        return {
            "model_type": "qwen3",
            **{key: getattr(draft, key) for key in LAYER_FIELDS},
            "num_hidden_layers": draft.num_layers,
            "vocab_size": facts.vocab_size,
            "max_position_embeddings": facts.max_position_embeddings,
            "rope_parameters": rope_parameters(facts),
            "layer_types": [FULL] * draft.num_layers,
            "sliding_window": None,
            "use_sliding_window": False,
            CAUSAL: draft.causal,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "dtype": dtype_name(dtype),
        }

    def speculative_tokens(self, draft: Any) -> int:
        return self.drafted(draft.block_size)

    def most_tokens(self, draft: Any) -> int | None:
        return self.drafted(draft.block_size)

    def rope(self, facts: TargetFacts) -> RopeConfig:
        """Positions count along the stream, for a target with M-RoPE too."""
        return RopeConfig(facts.rope_theta, scaled=facts.scaled_rope)

    def tensors(self, state: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Without maps for a full draft vocabulary."""
        is_full = "d2t" not in state or len(state["d2t"]) == len(state["t2d"])
        return super().tensors({name: one for name, one in state.items() if not (is_full and name in ("d2t", "t2d"))}, dtype)

    def target_tensors(self, trained: DraftHead, facts: TargetFacts, embedding: bool | None) -> dict[str, Tensor]:
        """Adds the target's lm_head for a reduced draft vocabulary: engines take it from the target only for all tokens."""
        tensors = {EMBEDDING: read_target_embedding(facts)} if embedding else {}
        if trained.token_map is not None:
            tensors[LM_HEAD] = read_target_lm_head(facts)[trained.token_map.cpu()]
        return tensors

    def obstacles(self, draft: Any, facts: TargetFacts) -> Iterator[Obstacle]:
        if draft.conditional != self.conditional:
            is_other = draft.conditional == self.other_conditional
            problem = f"{draft.conditional}: {self.name} has {self.conditional}" if is_other else "mlp: no engine computes it"
            trains = f"train with draft.conditional={self.conditional} or {self.other_conditional}"
            remedy = f"export with --format {self.other_format}" if is_other else trains
            yield Obstacle(key="draft.conditional", value=draft.conditional, problem=problem, remedy=remedy)
        if draft.feed:
            problem = "true, but engines fill the slots with nothing but the embeddings of the anchor and the mask token"
            yield Obstacle(key="draft.feed", value="true", problem=problem, remedy="train with draft.feed=false")
        levels = list(draft.feature_levels)
        if problem := levels_problem(levels, facts.num_layers):
            remedy = f"train with increasing levels of {self.first_level}..{facts.num_layers - 1}"
            yield Obstacle(key="draft.feature_levels", value=str(levels), problem=f"{levels}: {problem}", remedy=remedy)

    def warnings(self, draft: Any, facts: TargetFacts) -> list[str]:
        found = []
        if facts.mrope_section:
            found.append(
                "After an image, vLLM's V1 runner stores keys and values of the draft at the target's M-RoPE positions, where "
                "they overwrite each other: serve image prompts with VLLM_USE_V2_MODEL_RUNNER=1 (not on a CPU)."
            )
        if draft.num_layers > 1:
            found.append(
                "vLLM 0.32 for CPUs and XPUs applies the k_norm of the first layer to the context of all layers "
                "(docs/upstream/vllm_k_norm.md): expect low acceptance there; CUDA is not affected."
            )
        return found

    # -- import --------------------------------------------------------------------------------------------------------

    def own_name(self, name: str) -> str:
        return name

    def borrowed_rows(self, name: str, own: Tensor, table: Tensor, weights: Weights, config: EngineConfig) -> Tensor:
        if name != LM_HEAD or "d2t" not in weights.infos or len(own) == len(table):
            return table
        ids = torch.arange(len(own)) + weights["d2t"]
        return table[ids.clamp(0, len(table) - 1)]

    def draft_config(self, folder: Path, config: EngineConfig, facts: TargetFacts, options: ImportOptions) -> BlockConfig:
        levels = list(options.levels or self.levels(config) or ())
        self.check_supported(folder, config, facts, levels)
        rope = self.rope(facts)
        if not options.use_target_rope and (config.rope.theta, config.rope.scaled) != (rope.theta, rope.scaled):
            raise ValueError(
                f"{folder}: {config.key_path('rope_parameters')} is {config.rope.scaled or 'unscaled'} with theta "
                f"{config.rope.theta:g}, the target's is {rope.scaled or 'unscaled'} with {rope.theta:g}: positions would "
                f"differ from training; --use-target-rope uses the target's"
            )
        return BlockConfig(
            **{key: config.get(key) for key in LAYER_FIELDS} | {"head_dim": config.head_dim},
            vocab_size=facts.vocab_size,
            max_position_embeddings=facts.max_position_embeddings,
            **rope.fields,
            feature_levels=levels,
            draft_vocab_size=config.size("draft_vocab_size") or facts.vocab_size,
            block_size=config.size("block_size"),
            num_layers=config.size("num_hidden_layers"),
            causal=is_causal(config, 0, self),
            mask_token=self.mask_token(config),
            feed=False,
            **self.head_fields(config),
            target=facts.fingerprint,
            target_path=facts.name,
        )

    def head_fields(self, config: EngineConfig) -> dict[str, Any]:
        """Returns the fields of our draft's configuration for its conditional and its confidence head."""
        return {"conditional": self.conditional, "confidence": False}

    def check_supported(self, folder: Path, config: EngineConfig, facts: TargetFacts, levels: list[int]) -> None:
        """Raises ValueError for a folder that our draft does not support, with the field and the reason."""
        layers, mask = config.size("num_hidden_layers") or 0, self.mask_token(config)
        wrong = [
            (
                config.key_path(key),
                f"is {config.get(key)!r}, the target's ({facts.name or facts.model_type}) is {getattr(facts, key)}",
            )
            for key in ("hidden_size", "vocab_size")
            if config.size(key) != getattr(facts, key)
        ]
        for key in ("attention_bias", "target_hidden_size"):
            if config.get(key) and config.get(key) != config.get("hidden_size"):
                wrong.append((config.key_path(key), f"is {config.get(key)!r}: our block head does not support it"))
        if SLIDING in attention_of(config) or as_mapping(config.raw.get(NATIVE)).get("use_swa"):
            wrong.append(
                (
                    config.key_path("layer_types"),
                    "names sliding attention: the slots of our block head attend to the whole context",
                )
            )
        if len({is_causal(config, layer, self) for layer in range(min(layers, MAX_LAYERS))}) > 1:
            wrong.append((config.key_path(CAUSAL), "differs between layers"))
        if problem := levels_problem(levels, facts.num_layers):
            wrong.append((self.levels_key, f"means hidden_states{levels}: {problem}; give --levels A,B,C"))
        if not isinstance(mask, int) or isinstance(mask, bool) or not 0 <= mask < facts.vocab_size:
            wrong.append((self.mask_token_key, f"is {mask!r}, not a token of the target"))
        if (config.size("block_size") or 0) < 2:
            wrong.append(("block_size", f"is {config.get('block_size')!r}: give the size that was trained, 2 or more"))
        if bool(config.get("sample_from_anchor", False)) != self.is_anchored:
            expected = str(self.is_anchored).lower()
            wrong.append(("sample_from_anchor", f"is not {expected}: this kind of our block head predicts from other slots"))
        if (folder / MASK_FILE).is_file():
            wrong.append((MASK_FILE, "is present: our block head takes the target's embedding of the mask token"))
        eps, activation = config.get("rms_norm_eps"), config.get("hidden_act")
        if not isinstance(eps, float) or not 0 < eps < 1 or activation not in ("silu", "gelu", "relu"):
            wrong.append((config.key_path("rms_norm_eps"), f"is {eps!r}, with hidden_act {activation!r}: invalid"))
        if wrong:
            raise ValueError(f"{folder / CONFIG}: {wrong[0][0]} {wrong[0][1]}; cannot import it")
        if self.specs(config) is None:
            raise ValueError(f"{folder / CONFIG}: layer sizes are missing; give the number of heads and intermediate_size")

    def draft_tensors(self, folder: Path, config: EngineConfig, facts: TargetFacts) -> dict[str, Tensor]:
        """Adds d2t and t2d where the folder omits them: our head always has both."""
        tensors = super().draft_tensors(folder, config, facts)
        return with_vocabulary_maps(tensors, config.size("draft_vocab_size") or facts.vocab_size, facts.vocab_size, folder)

    # -- the reload check ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def outputs(self, draft: DraftHead) -> Tensor:
        """Returns the input of the lm_head and the heads' outputs for every slot of A blocks, [B, K * A, D + ..]."""
        assert isinstance(draft, BlockDraft)
        embeds, levels, _ = fixed_batch(draft)
        mask, own = embeds[0, -1], draft.mask_embedding.clone()
        draft.mask_embedding.copy_(mask)
        anchors = torch.tensor([[1, TOKENS]] * BATCH)
        sizes = [anchors.shape[1]] * draft.num_levels
        hidden = draft.read_blocks(draft.hidden_norm(draft.fc(levels)), anchors, embeds[:, :2], sizes)
        draft.mask_embedding.copy_(own)
        parts = [hidden]
        if draft.markov_head is not None:
            tokens = torch.arange(hidden[..., 0].numel()).view(hidden.shape[:-1]) % draft.config.vocab_size
            state = draft.markov_head(tokens)
            parts += [draft.markov_head.markov_w2(state)]
            parts += [] if draft.confidence_head is None else [draft.confidence_head(torch.cat((hidden, state), -1))[..., None]]
        return torch.cat(parts, -1)

    def agreement(self, before: Tensor, after: Tensor) -> Tensor:
        return torch.nn.functional.cosine_similarity(before, after, dim=-1).mean()
