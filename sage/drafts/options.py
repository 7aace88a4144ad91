"""The configuration keys of each kind of draft, under `draft.` in a run and as arguments of `sage.new_draft`.

Nothing here imports torch: command lines read these classes before they load anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

TRAINING_ONLY = {"training_only": True}  # metadata of keys that a run reads and `sage.new_draft` does not take


class ImageInputs(StrEnum):
    """Embeddings of a head at image and video positions: the visual embedding or the placeholder token's."""

    embed = "embed"
    token = "token"


class TrainedPart(StrEnum):
    """Trained part of a smaller target: decoder layers, also embedding and lm_head, or the vision tower as well."""

    layers = "layers"
    text = "text"
    all = "all"


@dataclass(kw_only=True)
class HeadOptions:
    """Sizes that are None follow the target."""

    image_inputs: ImageInputs = ImageInputs.embed
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None


@dataclass(kw_only=True)
class EagleOptions(HeadOptions):
    """`input_norm` normalizes the input of the layer's attention."""

    input_norm: bool = True


@dataclass(kw_only=True)
class Eagle3Options(HeadOptions):
    """`feature_levels` are indices of the target's hidden_states; None selects low, middle and high.

    `draft_vocab_size` restricts the draft vocabulary to the most frequent tokens of the training answers; None keeps all.
    """

    feature_levels: list[int] | None = None
    draft_vocab_size: int | None = field(default=None, metadata=TRAINING_ONLY)


@dataclass(kw_only=True)
class ModelOptions:
    """`num_layers` of the target's own text layers form a fresh draft."""

    num_layers: int | None = None
    train_part: TrainedPart = field(default=TrainedPart.text, metadata=TRAINING_ONLY)
