"""Drafts that predict a block in one pass: what their formats have in common, and the formats `dflash` and `dspark`.

`dflash` has the layout of the package speculators, or with `--flavour native` DFlash's own. The slot of the anchor predicts
nothing, slot k the token k after it. Blocks of `dspark` predict from the anchor on, corrected by the token before;
`sample_from_anchor` is always written: without it vLLM reads false, speculators true.
Ref: DFlash, arXiv 2602.06036, z-lab/dflash; DSpark, arXiv 2607.05147.

Shapes: H hidden, A feature levels, V target vocabulary, U draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from checkpoints.export.configs import EngineConfig, TensorSpec, TensorSpecs, head_specs, is_size, layer_specs, levels_problem
from checkpoints.export.format_checks import UNSUPPORTED, Field, check_fields, one_of
from checkpoints.export.formats.base import (
    BATCH,
    TOKENS,
    TYPE,
    CheckInput,
    Checks,
    ExportFormat,
    Finding,
    ImportOptions,
    Obstacle,
    fixed_batch,
)
from checkpoints.export.formats.block_checks import (
    ANCHOR,
    FULL,
    MAX_LAYERS,
    NATIVE_LAYOUT,
    NATIVE_PART,
    SPECULATORS_LAYOUT,
    BlockLayout,
    block_checks,
    lookup,
    native_part,
)
from checkpoints.export.formats.eagle import speculators_layout
from checkpoints.export.target import EMBEDDING, LM_HEAD, TargetFacts, read_table
from sage.drafts.block import BlockConfig, BlockDraft
from sage.drafts.head import DraftHead
from sage.targets.rope import RopeConfig

NO_ROWS = "vLLM drafts with the target's lm_head, whose rows are other tokens than the draft vocabulary's: acceptance 1.00"


class BlockFormat(ExportFormat):
    """What the formats of one-pass drafts have in common, in the layout of the package speculators."""

    draft = BlockDraft
    layer_types = ("qwen3",)
    own_layer = layer = "layers."
    expressed = (
        *("feature_levels", "draft_vocab_size", "block_size", "num_layers", "conditional", "conditional_rank"),
        *("feed", "causal", "confidence", "mask_token"),
    )
    borrowed = (EMBEDDING, LM_HEAD)
    has_axes = False
    has_code = True
    effect_of_unexpected = "vLLM stops at an unknown name"
    # conditional, other_conditional: `draft.conditional` of the drafts that it expresses, and of `other_format`
    conditional: ClassVar[str]
    other_conditional: ClassVar[str]
    other_format: ClassVar[str]
    own_checks: ClassVar[Checks]  # those of this format alone
    layout: ClassVar[BlockLayout]  # where config.json contains what engines read of a block
    output = "output"

    @property
    def checks(self) -> Checks:  # type: ignore[override]
        first = speculators_layout if self.names_target else native_part
        return (first, *block_checks(self.layout), *self.own_checks)

    def specs(self, config: EngineConfig) -> TensorSpecs:
        layers, levels = config.size("num_hidden_layers"), self.layout.read_levels(config)
        if layers is None or layers > MAX_LAYERS or not levels:
            return {}
        specs = head_specs(config, len(levels))
        for index in range(layers):
            specs |= layer_specs(config, f"layers.{index}.", has=("biases", "head_norms"))
        is_full = config.size("draft_vocab_size") in (None, config.sizes.vocab)
        lm_head = replace(specs[LM_HEAD], is_optional=is_full, effect_if_missing=NO_ROWS)
        return specs | {LM_HEAD: lm_head, "hidden_norm.weight": TensorSpec((config.sizes.hidden,))}

    # -- export --------------------------------------------------------------------------------------------------------

    def config_values(self, draft: Any, facts: TargetFacts) -> dict[str, Any]:
        levels = list(draft.feature_levels)
        values: dict[str, Any] = {"levels": levels, "target_layer_ids": [level - self.layout.first_level for level in levels]}
        values |= {"layer_types": [FULL] * draft.num_layers, "is_bidirectional": not draft.causal}
        return super().config_values(draft, facts) | values

    def most_tokens(self, draft: Any) -> int | None:
        return self.layout.drafted(draft.block_size)

    def rope(self, facts: TargetFacts) -> RopeConfig:
        """Positions count along the stream, for a target with M-RoPE too."""
        return RopeConfig(facts.rope_theta, scaled=facts.scaled_rope)

    def target_tensors(self, trained: DraftHead, facts: TargetFacts, embedding: bool | None) -> dict[str, Tensor]:
        """Adds the target's lm_head for a reduced draft vocabulary: engines take it from the target only for all tokens."""
        tensors = {EMBEDDING: read_table(facts, EMBEDDING)} if embedding else {}
        if trained.token_map is not None:
            tensors[LM_HEAD] = read_table(facts, LM_HEAD)[trained.token_map.cpu()]
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
            remedy = f"train with increasing levels of {self.layout.first_level}..{facts.num_layers - 1}"
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
                "(tests/engines/vllm_k_norm.md): expect low acceptance there; CUDA is not affected."
            )
        return found

    # -- import --------------------------------------------------------------------------------------------------------

    def borrowed_rows(self, name: str, table: Tensor, given: CheckInput) -> Tensor:
        if name != LM_HEAD or "d2t" not in given.weights.infos:
            return table
        d2t = given.weights["d2t"]
        return table[torch.arange(len(d2t)) + d2t]

    def draft_config(self, given: CheckInput, facts: TargetFacts, options: ImportOptions) -> BlockConfig:
        config = given.config
        return BlockConfig(
            **self.head_fields(config, facts, options),
            conditional=self.conditional,
            confidence=False,
            feature_levels=list(options.levels or self.layout.read_levels(config) or ()),
            draft_vocab_size=config.size("draft_vocab_size") or facts.vocab_size,
            block_size=config.size("block_size"),
            num_layers=config.size("num_hidden_layers"),
            causal=self.layout.is_causal(config, 0),
            mask_token=lookup(config.raw, self.layout.mask_token),
            feed=False,
        )

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


# -- DFlash -------------------------------------------------------------------------------------------------------------


SGLANG_TARGETS = ("llama", "qwen3", "qwen3_moe", "qwen3_vl", "qwen3_5")  # with `set_dflash_layers_to_capture` in SGLang 0.5.23


def _anchor(given: CheckInput) -> Iterator[Finding]:
    if given.config.raw.get(ANCHOR) or lookup(given.config.raw, f"{NATIVE_PART}.{ANCHOR}"):
        effect = "vLLM's V2 runner refuses it and V1 shifts every token by one: a head that predicts in slot 0 is a DSpark"
        yield Finding(ANCHOR, "true", effect)


class DFlashFormat(BlockFormat):
    """Block drafts whose first slot predicts nothing, with the target's lm_head."""

    method = algorithm = "dflash"
    conditional, other_conditional, other_format = "none", "markov", "dspark"
    own_checks = (_anchor,)
    sglang_tree = ""  # SGLang reads the size of a block

    @property
    def is_native(self) -> bool:
        """Whether the layout is DFlash's own."""
        return self.flavour is not None

    @property
    def label(self) -> str:
        return f"{self.name} in its native layout" if self.is_native else self.name

    @property
    def template(self) -> str:  # type: ignore[override]
        return "dflash_native" if self.is_native else "dflash"

    @property
    def engine_class(self) -> str:  # type: ignore[override]
        return "DFlashDraftModel" if self.is_native else "DFlashSpeculator"

    @property
    def layout(self) -> BlockLayout:  # type: ignore[override]
        return NATIVE_LAYOUT if self.is_native else SPECULATORS_LAYOUT

    @property
    def names_target(self) -> bool:  # type: ignore[override]
        return not self.is_native

    def recognizes(self, config: EngineConfig) -> bool:
        if not self.is_native:
            return super().recognizes(config)
        return TYPE not in config.raw and (NATIVE_PART in config.raw or self.engine_class in config.classes)

    def obstacles(self, draft: Any, facts: TargetFacts) -> Iterator[Obstacle]:
        yield from super().obstacles(draft, facts)
        if draft.confidence:
            remedy = "train with draft.confidence=false"
            yield Obstacle(key="draft.confidence", value="true", problem="DFlash has no such head", remedy=remedy)
        if not self.is_native:
            return
        if 0 in draft.feature_levels:
            problem = "contains 0, the embeddings, which are no output of a layer"
            remedy = "choose --format dflash without --flavour, or train without it"
            yield Obstacle(key="draft.feature_levels", problem=problem, remedy=remedy)
        if draft.draft_vocab_size != facts.vocab_size:
            problem = f"{draft.draft_vocab_size}: the native layout has no lm_head, SGLang takes the target's"
            yield Obstacle(key="draft.draft_vocab_size", problem=problem, remedy="choose --format dflash without --flavour")

    def served_by(self, facts: TargetFacts) -> tuple[str, ...]:
        vllm = tuple(engine for engine in facts.served_by if engine != "SGLang")
        return (*vllm, "SGLang") if self.is_native and facts.model_type in SGLANG_TARGETS else vllm


# -- DSpark -------------------------------------------------------------------------------------------------------------


RANK, HEAD, CONFIDENCE, WITH_MARKOV = "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"
NO_ANCHOR = "vLLM takes a missing one for false, speculators for true: all tokens shift by one"
NO_RANK = "vLLM's class needs the markov head; a draft without one is a DFlash"
OTHER_HEAD = "vLLM computes the vanilla head, whatever was trained, or stops at an unknown name"
FIELDS = (
    Field(ANCHOR, one_of(True, False), "true or false", NO_ANCHOR, is_top=True),
    Field(RANK, is_size, "a positive integer", NO_RANK, is_top=True, refusal=UNSUPPORTED),
    Field(HEAD, one_of("vanilla"), "'vanilla'", OTHER_HEAD, is_top=True, refusal=UNSUPPORTED),
)


def _heads(given: CheckInput) -> Iterator[Finding]:
    yield from check_fields(given, FIELDS)
    raw = given.config.raw
    if given.options and raw.get(CONFIDENCE) and not raw.get(WITH_MARKOV):
        yield Finding(WITH_MARKOV, "not true", "", refusal="our confidence head reads both, cannot import it")


class DSparkFormat(BlockFormat):
    """Block drafts with a markov head, whose first slot predicts too."""

    template = method = algorithm = "dspark"
    engine_class = "DSparkSpeculator"
    other_classes = ("DSparkDraftModel", "Qwen3DSparkModel")
    # vLLM reads `sliding_window_non_causal` for other kinds only
    layout = replace(SPECULATORS_LAYOUT, causal="", is_negated=False, is_anchored=True)
    names_target = True
    environment = "VLLM_USE_V2_MODEL_RUNNER=1 "
    own_checks = (_heads,)
    conditional, other_conditional, other_format = "markov", "none", "dflash"

    def specs(self, config: EngineConfig) -> TensorSpecs:
        specs, sizes, rank = super().specs(config), config.sizes, config.size(RANK) or 1
        if not specs:
            return {}
        specs["markov_head.markov_w1.weight"] = TensorSpec((sizes.vocab, rank))
        specs["markov_head.markov_w2.weight"] = TensorSpec((config.size("draft_vocab_size") or sizes.vocab, rank))
        if config.raw.get(CONFIDENCE):
            size = sizes.hidden + (rank if config.raw.get(WITH_MARKOV) else 0)
            specs |= {"confidence_head.proj.weight": TensorSpec((1, size)), "confidence_head.proj.bias": TensorSpec((1,))}
        return specs

    def warnings(self, draft: Any, facts: TargetFacts) -> list[str]:
        needs = "vLLM 0.32 serves DSpark drafts with VLLM_USE_V2_MODEL_RUNNER=1 only, which does not run on a CPU."
        return [*super().warnings(draft, facts), needs]

    def draft_config(self, given: CheckInput, facts: TargetFacts, options: ImportOptions) -> BlockConfig:
        own = super().draft_config(given, facts, options)
        own.conditional_rank = given.config.size(RANK) or 1
        own.confidence = bool(given.config.raw.get(CONFIDENCE))
        return own
