"""The last proof of an export: loaded from its own files, it computes what the trained draft computes.

A fixed batch of seeded noise goes through both. With the trained draft's weights rounded to the export's dtype the two must
agree bit for bit, since it is the same arithmetic on the same numbers; what the rounding itself costs is reported.

Shapes: B batch, T tokens, D hidden, A feature levels, U draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from checkpoints.export.facts import TargetFacts
from checkpoints.export.folder import Weights, read_config
from checkpoints.export.formats.eagle import from_eagle_tensors
from checkpoints.export.formats.layout import Format, Head
from checkpoints.export.importing import read_eagle3
from checkpoints.export.validator.findings import BadExport
from sage.drafts import DraftHead, Eagle3Draft, EagleConfig, EagleDraft

BATCH, TOKENS, SEED = 2, 7, 0


@dataclass(frozen=True)
class Reload:
    """What the comparison found.

    Attributes:
        largest: largest |difference| between the trained draft's outputs and the export's, by rounding alone.
        same_choice: share of positions where both would draft the same token (for `eagle`: the cosine of both features).
    """

    largest: float
    same_choice: float


@torch.no_grad()
def compare_reload(folder: Path, trained: DraftHead, facts: TargetFacts) -> Reload:
    """Reloads an export and compares it with the draft it was made from, which is rounded to the export's dtype in place.

    Raises:
        BadExport: the export computes something else.
    """
    head = Head(read_config(folder))
    exported = _read_eagle(folder, head, trained) if head.format == Format.eagle else read_eagle3(folder, facts)
    original = outputs(trained)
    rounded, found = outputs(trained.to(exported.dtype)), outputs(exported)
    if not torch.equal(rounded, found):
        gap = float((rounded.float() - found.float()).abs().max())
        raise BadExport(f"{folder}: reloaded, it computes something else than the trained draft (by up to {gap:.3g})")
    wide, narrow = original.float(), found.float()
    if isinstance(trained, EagleDraft):
        agreement = torch.nn.functional.cosine_similarity(wide, narrow, dim=-1).mean()
    else:
        agreement = (wide.argmax(-1) == narrow.argmax(-1)).float().mean()
    return Reload(float((wide - narrow).abs().max()), float(agreement))


def outputs(draft: DraftHead) -> Tensor:
    """Logits [B, T, U] of an EAGLE-3 head on the fixed batch, predicted features [B, T, D] of an EAGLE head."""
    embeds, levels, positions = fixed_batch(draft)
    if isinstance(draft, Eagle3Draft):
        hidden = draft(embeds, draft.fc(levels), positions)
        return draft.lm_head(draft.norm(hidden))
    return draft(embeds, levels[..., : draft.config.hidden_size], positions)


def fixed_batch(draft: DraftHead) -> tuple[Tensor, Tensor, Tensor]:
    """Embeddings [B, T, D], features [B, T, A * D] and positions, the same for every call; on three axes for M-RoPE."""
    generator = torch.Generator().manual_seed(SEED)
    size = draft.config.hidden_size
    embeds = torch.randn(BATCH, TOKENS, size, generator=generator)
    levels = torch.randn(BATCH, TOKENS, 3 * size, generator=generator)
    shape = (3, BATCH, TOKENS) if draft.config.mrope_section else (BATCH, TOKENS)
    positions = torch.randint(0, 64, shape, generator=generator)
    return embeds.to(draft.dtype), levels.to(draft.dtype), positions


def _read_eagle(folder: Path, head: Head, trained: DraftHead) -> EagleDraft:
    """An exported `eagle` as our head, from the export's own config; only names of ours are taken from the trained draft."""
    rope = head.rope
    config = EagleConfig(
        **{key: head.get(key) for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")},
        **{key: head.get(key) for key in ("vocab_size", "max_position_embeddings", "rms_norm_eps", "hidden_act")},
        head_dim=head.head_dim or 0,
        rope_theta=rope.theta,
        mrope_section=rope.section,
        scaled_rope=rope.scaled,
        input_norm=False,
        target=trained.config.target,
    )
    tensors = from_eagle_tensors(dict(Weights(folder).items()))
    draft = EagleDraft(config).to(tensors["fc.weight"].dtype)
    draft.load_state_dict(tensors)
    return draft.eval()
