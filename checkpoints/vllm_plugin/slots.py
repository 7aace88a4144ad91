"""The correction of where vLLM 0.32 stores the draft's keys and values, for targets with M-RoPE."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from checkpoints.vllm_plugin.facts import PLUGIN, logger


class UpdateByLength:
    """vLLM's update before a drafted token, with the index of the token from the sequence length.

    vLLM takes the temporal rope position of a drafted token for its index. After an image the position is smaller than the
    index: keys of the prompt are overwritten, and others are missing. With text alone both are equal.
    Ref: vllm-project/vllm issue 54498.
    """

    def __init__(self, released: Callable[..., None]) -> None:
        self.released, self.is_logged = released, False

    def __call__(self, *, positions_1d: Any, seq_lens: Any, out_clamped_positions: Any, **others: Any) -> None:
        if not self.is_logged:
            logger.info("%s: slots of drafted tokens after images are corrected (vllm-project/vllm issue 54498)", PLUGIN)
            self.is_logged = True
        next_positions = positions_1d + 1
        last_indices = (seq_lens - 1).to(positions_1d.dtype)
        self.released(positions_1d=last_indices, seq_lens=seq_lens, out_clamped_positions=out_clamped_positions, **others)
        out_clamped_positions.copy_(next_positions)


def correct_draft_slots() -> None:
    """Puts `UpdateByLength` in place of the update; a second call changes nothing."""
    from vllm.v1.spec_decode import llm_base_proposer as proposer

    update = proposer.eagle_step_update_slot_mapping_and_metadata
    if not isinstance(update, UpdateByLength):
        proposer.eagle_step_update_slot_mapping_and_metadata = UpdateByLength(update)
