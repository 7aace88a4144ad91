"""The kinds of draft, one row each: the only place that lists them.

Configuration, training, planning, decoding, export and inspection read the rows. Classes are named "module:Class" and imported
on demand, so that a command line can list the kinds without importing torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

from sage.drafts.options import BlockOptions, Eagle3Options, EagleOptions, ModelOptions, PEagleOptions, VocabularyOptions
from sage.io.files import import_installed

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

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules of the draft and its session."""
        return tuple(path.partition(":")[0] for path in (self.draft, self.session))


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
            export_formats=("dflash", "dspark"),
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
