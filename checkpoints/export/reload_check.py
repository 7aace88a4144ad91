"""The last check of an export: reloaded from its files, it computes what the trained draft computes.

A fixed batch of seeded noise is passed through both. With the trained draft's weights rounded to the export's dtype, the
outputs must be bit-identical; the rounding error itself is reported.

Shapes: B batch, T tokens, D hidden, A feature levels, U draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from checkpoints.export.formats.eagle import from_eagle_tensors
from checkpoints.export.formats.layout import FEATURE_LEVELS, EngineConfig, Format
from checkpoints.export.importer import ImportOptions, read_eagle3
from checkpoints.export.target_facts import TargetFacts
from checkpoints.export.validator.findings import InvalidExport
from checkpoints.export.weight_files import Weights
from sage.drafts.eagle import EagleConfig, EagleDraft
from sage.drafts.eagle3 import Eagle3Draft
from sage.drafts.head import DraftHead
from sage.io.model_files import read_config

BATCH, TOKENS, SEED = 2, 7, 0


@dataclass(frozen=True)
class RoundingError:
    """Effect of rounding the weights to the export's dtype.

    Attributes:
        max_abs_difference: largest absolute difference between the outputs of the trained and the exported draft.
        agreement: fraction of positions with the same top-1 token (for `eagle`: mean cosine similarity of the features).
    """

    max_abs_difference: float
    agreement: float


@torch.no_grad()
def check_reload(folder: Path, trained: DraftHead, facts: TargetFacts) -> RoundingError:
    """Reloads an export and compares it with the trained draft, which is rounded to the export's dtype in place.

    Raises:
        InvalidExport: the outputs differ.
    """
    exported = read_export(folder, trained, facts)
    original = outputs(trained)
    rounded, reloaded = outputs(trained.to(exported.dtype)), outputs(exported)
    if not torch.equal(rounded, reloaded):
        gap = float((rounded.float() - reloaded.float()).abs().max())
        raise InvalidExport(f"{folder}: reloaded, its outputs differ from the trained draft's by up to {gap:.3g}")
    before, after = original.float(), reloaded.float()
    if isinstance(trained, EagleDraft):
        agreement = torch.nn.functional.cosine_similarity(before, after, dim=-1).mean()
    else:
        agreement = (before.argmax(-1) == after.argmax(-1)).float().mean()
    return RoundingError(float((before - after).abs().max()), float(agreement))


def read_export(folder: Path, trained: DraftHead, facts: TargetFacts) -> DraftHead:
    """Reads an export of `trained` from its files as a draft of this package, in the dtype of its file.

    Of `trained`, only what engines' configs have no field for is taken: its target and its inputs at image positions.

    Raises:
        ValueError: names what cannot be read.
    """
    config = EngineConfig(read_config(folder))
    if config.format == Format.eagle:
        return _read_eagle(folder, config, trained)
    return read_eagle3(folder, facts, ImportOptions(image_inputs=trained.config.image_inputs))


def outputs(draft: DraftHead) -> Tensor:
    """Runs the fixed batch: logits [B, T, U] of an EAGLE-3 head, predicted features [B, T, D] of an EAGLE head."""
    embeds, levels, positions = fixed_batch(draft)
    if isinstance(draft, Eagle3Draft):
        hidden = draft(embeds, draft.fc(levels), positions)
        return draft.lm_head(draft.norm(hidden))
    return draft(embeds, levels[..., : draft.config.hidden_size], positions)


def fixed_batch(draft: DraftHead) -> tuple[Tensor, Tensor, Tensor]:
    """Returns embeddings [B, T, D], features [B, T, A * D] and positions ([3, B, T] for M-RoPE), the same in every call."""
    generator = torch.Generator().manual_seed(SEED)
    size = draft.config.hidden_size
    embeds = torch.randn(BATCH, TOKENS, size, generator=generator)
    levels = torch.randn(BATCH, TOKENS, FEATURE_LEVELS * size, generator=generator)
    shape = (3, BATCH, TOKENS) if draft.config.mrope_section else (BATCH, TOKENS)
    positions = torch.randint(0, 64, shape, generator=generator)
    return embeds.to(draft.dtype), levels.to(draft.dtype), positions


def _read_eagle(folder: Path, config: EngineConfig, trained: DraftHead) -> EagleDraft:
    """Reads an `eagle` export as `EagleDraft`, from its own config.json."""
    rope = config.rope
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    own_config = EagleConfig(
        **{key: config.get(key) for key in (*sizes, "max_position_embeddings", "rms_norm_eps", "hidden_act")},
        head_dim=config.head_dim or 0,
        **rope.fields,
        input_norm=False,
        image_inputs=trained.config.image_inputs,
        target=trained.config.target,
    )
    tensors = from_eagle_tensors(dict(Weights(folder).items()))
    draft = EagleDraft(own_config).to(tensors["fc.weight"].dtype)
    draft.load_state_dict(tensors)
    return draft.eval()
