"""The `peagle` format: EAGLE-3 drafts with a masked input, which predict all tokens of a round in one pass, for vLLM.

The layout is that of `speculators` with `mask_hidden`, and with the target's embedding, its row of the mask token replaced.
Ref: P-EAGLE, arXiv 2602.01469.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from checkpoints.export.configs import FEATURE_LEVELS, LEVELS_KEY, EngineConfig, TensorSpec, TensorSpecs, layer_specs
from checkpoints.export.format_checks import HEAD_NORMS, INVALID, LAYER_CHECKS, UNSUPPORTED, check_tensors, is_token
from checkpoints.export.formats.base import TYPE, CheckInput, Finding, ImportOptions, fixed_batch
from checkpoints.export.formats.eagle import (
    SpeculatorsFormat,
    draft_vocabulary,
    feature_levels,
    proposed_tokens,
    residual,
    speculators_layout,
)
from checkpoints.export.target import EMBEDDING, TargetFacts, read_table
from sage.drafts.eagle import PEagleConfig, PEagleDraft
from sage.drafts.head import DraftHead

MASK, COUNT, LAYERS = "mask_token_id", "num_aux_hidden_states", "num_hidden_layers"
MAX_LAYERS = 16
SLOTS = 3  # masked inputs of the reload check
NO_MASK = "vLLM stops: it is configured for parallel drafting"


def _slots(given: CheckInput) -> Iterator[Finding]:
    """Yields findings about the mask token, and in an import about what vLLM does not need."""
    token, vocab, tokens = given.config.raw.get(MASK), given.config.size("vocab_size") or 0, proposed_tokens(given.config.raw)
    if not is_token(token, vocab):
        yield Finding(MASK, f"{token!r}, the vocabulary is 0 to {vocab - 1}", "vLLM cannot fill the slots", refusal=INVALID)
    if given.options and (not isinstance(tokens, int) or tokens < 2):
        where, remedy = "speculators_config.proposal_methods", "give the tokens that one pass drafts, 2 or more"
        yield Finding(where, f"speculative_tokens is {tokens!r}", "", refusal=remedy)
    if given.options:
        yield from residual(given)


def _layers(given: CheckInput) -> Iterator[Finding]:
    config, layers = given.config, given.config.size(LAYERS)
    if layers is None or layers > MAX_LAYERS:
        found = f"{config.get(LAYERS)!r}, expected 1 to {MAX_LAYERS}"
        yield given.at(LAYERS, found, "the engine cannot build the layers", refusal=INVALID)
    levels = config.vllm_levels
    built = config.layer.get(COUNT, FEATURE_LEVELS)
    if levels is not None and len(levels) != built:
        found = f"{built!r}, {LEVELS_KEY} has {len(levels)}"
        yield Finding(f"transformer_layer_config.{COUNT}", found, "vLLM builds fc for that number of levels and stops")
    for key in HEAD_NORMS[1:]:
        if config.get(key):
            yield Finding(key, "true", "vLLM does not read it for P-EAGLE: it serves something else than was trained")
    for key in (*HEAD_NORMS, "attention_bias", "mlp_bias"):
        if given.options and config.get(key):
            yield given.at(key, f"{config.get(key)!r}", "", refusal=UNSUPPORTED)


class PEagleFormat(SpeculatorsFormat):
    """P-EAGLE drafts in the layout of the package speculators."""

    template = "peagle"
    draft = PEagleDraft
    algorithm = "peagle"
    engine_class = "PEagleSpeculator"
    other_classes = ("PEagleDraftModel",)
    expressed = (*SpeculatorsFormat.expressed, "block_size", "num_layers", "mask_token")
    num_levels = None
    has_axes = False
    effect_of_unexpected = "vLLM stops at an unknown name"
    checks = (*LAYER_CHECKS, draft_vocabulary, speculators_layout, feature_levels, _layers, _slots, check_tensors)

    @property
    def vllm_options(self) -> dict[str, Any]:
        return {"method": self.method, "parallel_drafting": True}

    def recognizes(self, config: EngineConfig) -> bool:
        return config.raw.get(TYPE) == self.algorithm

    def specs(self, config: EngineConfig) -> TensorSpecs:
        layers, specs = config.size(LAYERS), super().specs(config)
        if layers is None or layers > MAX_LAYERS:
            return {}
        for index in range(1, layers):
            specs |= layer_specs(config, f"layers.{index}.", has=self.layer_has(config))
        _, width = specs["fc.weight"].shape
        specs["mask_hidden"] = TensorSpec((1, 1, width), effect_if_missing=NO_MASK)
        return specs

    def layer_has(self, config: EngineConfig) -> tuple[str, ...]:
        return ("biases", "head_norms") if config.layer.get("model_type") == "qwen3" else ("biases",)

    # -- export --------------------------------------------------------------------------------------------------------

    def most_tokens(self, draft: Any) -> int | None:
        return int(draft.block_size)

    def tensors(self, state: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Without the mask's embedding, which is a row of the embedding."""
        shifted = {_shift(name, 1): tensor for name, tensor in state.items() if name != "mask_embedding"}
        return super().tensors(shifted, dtype)

    def target_tensors(self, trained: DraftHead, facts: TargetFacts, embedding: bool | None) -> dict[str, Tensor]:
        assert isinstance(trained, PEagleDraft)
        if embedding is False:
            raise ValueError("--no-embedding: the row of the mask token is the draft's own, engines need it; drop the option")
        mask = trained.mask_embedding.detach().cpu().flatten()
        table = read_table(facts, EMBEDDING).to(mask.dtype, copy=True)  # the table may be rounded, the mask is not
        table[trained.config.mask_token] = mask
        return {EMBEDDING: table}

    def warnings(self, draft: Any, facts: TargetFacts) -> list[str]:
        if not facts.mrope_section:
            return []
        return [
            "After an image, vLLM gives the draft one axis of positions and stores its keys at them, where they overwrite each "
            "other: image prompts are served at low acceptance, text prompts as trained."
        ]

    # -- import --------------------------------------------------------------------------------------------------------

    def draft_config(self, given: CheckInput, facts: TargetFacts, options: ImportOptions) -> PEagleConfig:
        return PEagleConfig(
            **self.config_fields(given, facts, options),
            block_size=proposed_tokens(given.config.raw),
            num_layers=given.config.size(LAYERS) or 1,
            mask_token=given.config.raw[MASK],
        )

    def own_name(self, name: str) -> str:
        return _shift(super().own_name(name), -1)

    def draft_tensors(self, given: CheckInput, facts: TargetFacts) -> dict[str, Tensor]:
        """Adds the mask's embedding: its row of the folder's embedding, or of the target's."""
        tensors, weights = super().draft_tensors(given, facts), given.weights
        table = weights[EMBEDDING] if EMBEDDING in weights.infos else read_table(facts, EMBEDDING)
        mask = table[given.config.raw[MASK]][None, None]
        return {**tensors, "mask_embedding": mask.to(tensors["mask_hidden"].dtype)}

    def borrowed_rows(self, name: str, table: Tensor, given: CheckInput) -> Tensor:
        rows, token = table.clone(), given.config.raw[MASK]
        rows[token] = given.weights[name][token].to(rows.dtype)
        return rows

    @torch.no_grad()
    def outputs(self, draft: DraftHead) -> Tensor:
        """Returns logits [B, T + slots, U]: those of pairs, and of masked inputs behind them."""
        assert isinstance(draft, PEagleDraft)
        embeds, levels, positions = fixed_batch(draft)
        slot_embeds, _ = draft.slots(len(embeds), SLOTS)
        places = torch.cat((positions, positions[..., -1:] + torch.arange(1, SLOTS + 1)), -1)
        masked = draft.mask_hidden.expand(len(levels), SLOTS, -1)
        # In one product: that of one row depends on the alignment of weights.
        features = draft.fc(torch.cat((levels, masked), 1))
        return draft.lm_head(draft.norm(draft(torch.cat((embeds, slot_embeds), 1), features, places)))


def _shift(name: str, by: int) -> str:
    """Adds to the number of a layer in a tensor's name: our further layers are counted from 0, the format's from 1."""
    return re.sub(r"^layers\.(\d+)\.", lambda found: f"layers.{int(found[1]) + by}.", name)
