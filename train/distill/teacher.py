"""The frozen target as a teacher, and micro-batches on their way to it: prepared in the loader's thread, copied ahead.

The teacher's features of complete conversations are computed in the step that trains the draft.

Shapes: D hidden size, U draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sage import Target
from sage.drafts.compressor.spans import ends_of_turn
from sage.targets.family import Prompt
from train.distill.compiled_layers import CompiledLayers
from train.distill.pairs import Pairs, make_pairs

PIXELS = "pixel_values"  # prefix of the inputs that hold pixels; others, such as the seconds per grid, keep their dtype


@dataclass(frozen=True)
class Staging:
    """Adds rope positions, converts pixels to `dtype`, and for a GPU copies all tensors to pinned memory.

    Models convert pixels to their own dtype first, so that nothing is lost as long as `dtype` is not narrower than theirs. A
    copy from pinned memory overlaps with computation.

    Attributes:
        device: of the target.
        dtype: of target and draft, the wider one.
    """

    target: Target
    device: torch.device
    dtype: torch.dtype

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        placed = self.target.family.with_positions(self.target.model, batch)
        staged = {key: value.to(self.dtype) if key.startswith(PIXELS) else value for key, value in placed.items()}
        if self.device.type == "cpu":
            return staged
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # of this thread; pinning would create a context on another GPU
        return {key: value.pin_memory() if isinstance(value, Tensor) else value for key, value in staged.items()}


class DeviceCopies:
    """Copies the micro-batches of a step to the device of this rank, each on a stream of its own while the one before is used.

    Between two steps, the host waits for the device (gradients are checked), so that the first copy of a step overlaps with
    nothing; neither do copies from memory that is not pinned. On a CPU, micro-batches are used as they are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream: Any = None if self._module is None else self._module.Stream(device)

    def ahead(self, batches: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yields each micro-batch on the device; the copy of the next one is issued before."""
        if self._stream is None:
            yield from batches
            return
        copies = map(self._issue, batches)
        current = next(copies, None)
        while current is not None:
            following = next(copies, None)
            yield self._received(*current)
            current = following

    def _issue(self, batch: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """Starts the copy of a micro-batch; returns it and the event that ends the copy."""
        with self._module.stream(self._stream):
            copied = {
                key: value.to(self.device, non_blocking=True) if isinstance(value, Tensor) else value
                for key, value in batch.items()
            }
            return copied, self._stream.record_event()

    def _received(self, batch: dict[str, Any], copied: Any) -> dict[str, Any]:
        """Makes the current stream wait for a copy, and its memory be kept until that stream has used it."""
        current = self._module.current_stream(self.device)
        current.wait_event(copied)
        for value in batch.values():
            if isinstance(value, Tensor):
                value.record_stream(current)
        return batch


class Teacher:
    """Turns micro-batches into `Pairs`.

    Args:
        target: frozen, on the device of this rank.
        image_inputs: embedding of visual positions in the draft's input; `embed` takes the visual embedding, `token` that of
            the placeholder token.
        levels: indices k of hidden_states[k] that the draft reads beside the last feature.
        token_map: LongTensor [U], target ids of the draft vocabulary; None = the target's vocabulary.
        layers: of the target, compiled for its passes; None for none.

    Attributes:
        lm_head: [U, D], frozen lm_head rows of the draft vocabulary.

    Raises:
        ValueError: the lm_head of the target has a bias.
    """

    def __init__(
        self,
        target: Target,
        image_inputs: str = "embed",
        levels: Sequence[int] = (),
        token_map: Tensor | None = None,
        layers: CompiledLayers | None = None,
    ) -> None:
        if getattr(target.lm_head, "bias", None) is not None:
            raise ValueError(f"target: {target.name} has an lm_head with a bias, which is not supported")
        self.target = target
        self.image_inputs = image_inputs
        self.levels = tuple(levels)
        self.layers = layers or CompiledLayers()
        weight: Tensor = target.lm_head_weight
        self.lm_head = weight if token_map is None else weight[token_map.to(weight.device)]

    def __call__(self, batch: dict[str, Any]) -> Pairs:
        """Runs the target on a micro-batch (see `data_prep.loader`) and returns its pairs."""
        return self.pairs(self.embed(batch))

    def embed(self, batch: dict[str, Any]) -> Prompt:
        """Runs embedding and vision tower on a micro-batch."""
        with self.layers.installed():
            return self.target.embed(batch)

    @torch.no_grad()
    def pairs(self, prompt: Prompt) -> Pairs:
        """Runs the text layers on an embedded micro-batch and returns its pairs."""
        with self.layers.installed():
            features = self.target.features(prompt, self.levels)
        embeds = prompt.embeds if self.image_inputs == "embed" else self.target.embed_tokens(prompt.input_ids)
        moved = prompt.inputs
        ends = ends_of_turn(prompt.input_ids, self.target.eos_token_ids)
        return make_pairs(embeds, features, prompt.position_ids, moved["loss_mask"], prompt.visual_mask, ends, moved)
