"""The kinds of draft, one row each, and their configuration keys, under `draft.` in a run and as arguments of `sage.new_draft`.

The only place that lists them: configuration, training, planning, decoding, export and inspection read the rows. Classes are
named "module:Class" and imported on demand. Nothing here imports torch: command lines read this before they load anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from importlib import import_module
from typing import Annotated, Any, ClassVar

from sage.io.files import import_installed
from sage.io.ranges import NonNegativeInt, PositiveInt, Range

Level = Annotated[int, Range(ge=0, remedy="0 is the embeddings; null gives low, middle and high levels")]
Share = Annotated[float, Range(gt=0, le=1, remedy="P-EAGLE uses 0.7, and at least 0.2")]
LARGE_VOCABULARY, REDUCED_VOCABULARY = 65_536, 32_000  # tokens of a target from which on a trained lm_head has fewer (EAGLE-3)
TRAINING_ONLY = {"training_only": True}  # metadata of keys that a run reads and `sage.new_draft` does not take


class ImageInputs(StrEnum):
    """Embeddings of a head at image and video positions."""

    embed = "embed"
    token = "token"


class TrainedPart(StrEnum):
    """Trained part of a smaller target."""

    layers = "layers"
    text = "text"
    all = "all"


class Conditional(StrEnum):
    """Correction of a block's logits by the tokens before a position."""

    none = "none"
    markov = "markov"
    mlp = "mlp"


@dataclass(kw_only=True)
class HeadSizes:
    """Keys of every draft head.

    Attributes:
        intermediate_size: width of the MLP; null: the target's.
        num_attention_heads: query heads of the attention; null: the target's.
        num_key_value_heads: key and value heads of the attention; null: the target's.
    """

    intermediate_size: PositiveInt | None = None
    num_attention_heads: PositiveInt | None = None
    num_key_value_heads: PositiveInt | None = None


@dataclass(kw_only=True)
class HeadOptions(HeadSizes):
    """Keys of a draft head that reads embeddings of the prompt.

    Attributes:
        image_inputs: embeddings at image and video positions: the visual embedding, or that of the placeholder token.
    """

    image_inputs: ImageInputs = ImageInputs.embed


@dataclass(kw_only=True)
class VocabularyOptions:
    """Keys of a draft head that may have a smaller vocabulary than the target.

    Attributes:
        draft_vocab_size: tokens of the draft vocabulary, the most frequent ones of the training answers; 0: all; null: 32000 if
            the head trains an lm_head for a target with more than 65536 tokens, else all.
    """

    draft_vocab_size: NonNegativeInt | None = field(default=None, metadata=TRAINING_ONLY)
    trains_lm_head: ClassVar[bool] = True

    def vocabulary_size(self, num_tokens: int) -> int:
        """Returns the tokens of the draft vocabulary for a target with `num_tokens` tokens."""
        if self.draft_vocab_size is None and self.trains_lm_head and num_tokens > LARGE_VOCABULARY:
            return REDUCED_VOCABULARY
        return self.draft_vocab_size or num_tokens


@dataclass(kw_only=True)
class EagleOptions(HeadOptions):
    """One decoder layer that predicts the target's next feature (EAGLE, arXiv 2401.15077).

    Attributes:
        input_norm: normalize the input of the layer's attention.
    """

    input_norm: bool = True


@dataclass(kw_only=True)
class Eagle3Options(VocabularyOptions, HeadOptions):
    """One decoder layer that reads features of three of the target's layers (EAGLE-3, arXiv 2503.01840).

    Attributes:
        feature_levels: indices of the target's hidden_states; null: low, middle and high.
        fc_norm: normalize each feature level before they are fused (EAGLE-3.1).
        norm_output: a drafted token's successor reads the normed output (EAGLE-3.1).
    """

    feature_levels: list[Level] | None = None
    fc_norm: bool = False
    norm_output: bool = False


@dataclass(kw_only=True)
class SlotOptions(VocabularyOptions):
    """Keys of a head with slots, which drafts all levels of a round in one pass.

    Attributes:
        num_layers: decoder layers.
        mask_token: token whose embedding fills the slots (of peagle in exports); null: one that the target does not use.
        down_sample_ratio: share of the anchors that training keeps from one level of a block to the next; null: 0.5 where slots
            are causal, else 1.
        down_sample_ratio_min: share of the anchors that training keeps at every level.
    """

    feature_levels: list[Level] | None = None
    block_size: Annotated[int, Range(ge=2, remedy="a block of one token drafts what draft=eagle3 does")] = 8
    num_layers: Annotated[int, Range(ge=1, le=5, remedy="1 is the usual value")] = 1
    mask_token: NonNegativeInt | None = None
    down_sample_ratio: Share | None = field(default=None, metadata=TRAINING_ONLY)
    down_sample_ratio_min: Share = field(default=0.1, metadata=TRAINING_ONLY)

    @property
    def is_causal(self) -> bool:
        return True

    def kept_shares(self, num_levels: int) -> list[float]:
        """Returns the share of the anchors from which training drafts each level."""
        ratio = self.down_sample_ratio or (0.5 if self.is_causal else 1.0)
        return [max(ratio**level, self.down_sample_ratio_min) for level in range(num_levels)]


@dataclass(kw_only=True)
class BlockOptions(SlotOptions, HeadSizes):
    """A few layers that predict all levels of a round in one pass (DFlash, arXiv 2602.06036; DSpark, arXiv 2607.05147).

    `feed=false conditional=none` is DFlash, `feed=false conditional=markov` is DSpark.

    Attributes:
        feature_levels: indices of the target's hidden_states; null: with `feed` the embeddings and the last, else low, middle,
            high and last.
        block_size: slots of a block; each predicts a token, except the first slot of DFlash.
        conditional: correction of a slot: none, of its logits by the last token (markov), or of its hidden state by that state
            and the last two tokens (mlp).
        conditional_rank: rank of the correction.
        feed: compute the slots from the last fused feature and the last token's embedding, instead of a mask's embedding.
        causal: a slot attends to the slots before it, instead of all slots; null: with `feed`.
        confidence: train a head that predicts the acceptance of each slot, for engines.
    """

    trains_lm_head: ClassVar[bool] = False  # it takes the target's, of which engines have all rows
    conditional: Conditional = Conditional.mlp
    conditional_rank: PositiveInt = 128
    feed: bool = True
    causal: bool | None = None
    confidence: bool = False

    @property
    def is_causal(self) -> bool:
        return self.feed if self.causal is None else self.causal


@dataclass(kw_only=True)
class PEagleOptions(SlotOptions, HeadOptions):
    """EAGLE-3's layer with masked inputs, so that one pass drafts all levels of a round (P-EAGLE, arXiv 2602.01469).

    Attributes:
        feature_levels: indices of the target's hidden_states; null: low, middle and high.
        block_size: tokens that a pass drafts.
        down_sample_ratio: share of the anchors that training keeps from one level of a block to the next.
    """

    num_layers: Annotated[int, Range(ge=1, le=4, remedy="1 is the usual value")] = 1
    down_sample_ratio: Share = field(default=0.7, metadata=TRAINING_ONLY)
    down_sample_ratio_min: Share = field(default=0.2, metadata=TRAINING_ONLY)


@dataclass(kw_only=True)
class ModelOptions:
    """A smaller target as the draft: some of the target's own layers, or any model of its family.

    Attributes:
        num_layers: number of the target's text layers that form a fresh draft; null: give draft.path.
        train_part: trained part: decoder layers, also embedding and lm_head (text), or the vision tower as well (all).
    """

    num_layers: PositiveInt | None = None
    train_part: TrainedPart = field(default=TrainedPart.text, metadata=TRAINING_ONLY)


OPERATORS: dict[str, Any] = {"ratio": PositiveInt, "conv_ratio": PositiveInt, "queries": PositiveInt}
# The visual compressors of a draft head's input (see `sage.drafts.compressor`) and their keys.
COMPRESSORS: dict[str, dict[str, Any]] = {
    "prune": {"ratio": PositiveInt},
    "pool": {"ratio": PositiveInt},
    "conv": {"ratio": PositiveInt},
    "resampler": {"queries": PositiveInt},
    "text_only": {},
    "weighted": {"ratio": PositiveInt},
    "concat": OPERATORS,
    "select": {**OPERATORS, "temperature": Annotated[float, Range(gt=0, remedy="1.0 is the usual value")]},
}
MODEL_TYPE_PREFIX = "sage_"  # of `model_type` in the config.json of a draft head


@dataclass(frozen=True, kw_only=True)
class DraftKind:
    """A row of the registry.

    Attributes:
        name: the choice `draft=NAME`, and the second argument of `sage.new_draft`.
        options: dataclass of the kind's configuration keys.
        draft: "module:Class" that implements `sage.drafts.draft.Draft`.
        session: "module:Class" that implements `DraftSession`, called with draft, target and capacity.
        student: "module:Class" that trains the kind, a `train.distill.student.Student`; resolved by `train` alone.
        is_target: whether such a draft is itself a model of a target's family, with the files of one.
        predicts_features: whether the output is trained to equal the target's next feature.
        is_parallel: whether one pass drafts all levels of a round.
        takes_compressor: whether a visual compressor can shorten its input.
        export_formats: formats of serving engines that express it.
    """

    name: str
    options: type
    draft: str
    session: str
    student: str
    is_target: bool = False
    predicts_features: bool = False
    is_parallel: bool = False
    takes_compressor: bool = True
    export_formats: tuple[str, ...] = ()

    @property
    def model_type(self) -> str:
        return MODEL_TYPE_PREFIX + self.name

    @property
    def keys(self) -> tuple[str, ...]:
        """Options that `sage.new_draft` takes."""
        return tuple(option.name for option in fields(self.options) if not option.metadata.get("training_only"))

    @property
    def has_vocabulary(self) -> bool:
        """Whether the draft can have a vocabulary of its own, smaller than the target's."""
        return issubclass(self.options, VocabularyOptions)


KINDS: dict[str, DraftKind] = {
    kind.name: kind
    for kind in (
        DraftKind(
            name="eagle",
            options=EagleOptions,
            draft="sage.drafts.eagle:EagleDraft",
            session="sage.drafts.head_session:HeadSession",
            student="train.distill.student:HeadStudent",
            predicts_features=True,
            export_formats=("eagle",),
        ),
        DraftKind(
            name="eagle3",
            options=Eagle3Options,
            draft="sage.drafts.eagle:Eagle3Draft",
            session="sage.drafts.head_session:HeadSession",
            student="train.distill.student:HeadStudent",
            export_formats=("eagle3", "speculators", "gguf"),
        ),
        DraftKind(
            name="peagle",
            options=PEagleOptions,
            draft="sage.drafts.eagle:PEagleDraft",
            session="sage.drafts.head_session:SlotSession",
            student="train.distill.student:SlotStudent",
            is_parallel=True,
            export_formats=("peagle",),
        ),
        DraftKind(
            name="block",
            options=BlockOptions,
            draft="sage.drafts.block:BlockDraft",
            session="sage.drafts.head_session:SlotSession",
            student="train.distill.student:SlotStudent",
            is_parallel=True,
            takes_compressor=False,
            export_formats=("dflash", "dspark", "gguf"),
        ),
        DraftKind(
            name="model",
            options=ModelOptions,
            draft="sage.drafts.model:ModelDraft",
            session="sage.drafts.model:ModelSession",
            student="train.distill.student:ModelStudent",
            is_target=True,
            takes_compressor=False,
        ),
    )
}


def draft_kind(name: str) -> DraftKind:
    """The row of a kind. Raises ValueError for an unknown name."""
    if name not in KINDS:
        raise ValueError(f"draft: {name!r} is unknown; choose one of {', '.join(KINDS)}")
    return KINDS[name]


def head_kind(model_type: Any) -> DraftKind | None:
    """The row of the draft head with this `model_type` in its config.json; None for anything else."""
    return next((kind for kind in KINDS.values() if kind.model_type == model_type and not kind.is_target), None)


def importer() -> Any:
    """Imports the reader of exports and third-party drafts, with `is_export(folder)` and `load_export(folder, target)`."""
    import_installed("checkpoints")
    return import_module("checkpoints.export.importer")


def resolve(path: str) -> Any:
    """Imports a class named "module:Class"."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
