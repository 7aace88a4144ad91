"""The target's own answers as training data, generated once and kept: `data.answers=target`.

They lie in the cache folder of the data, one file per training source and its images beside it:

    CACHE/answers/KEY/LABEL.jsonl       KEY is a hash of the data, the target's weights and the settings of the answers

A run that was stopped continues with the next conversation, and later runs with the same key read the files. They are never
deleted automatically.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_prep.build import build_dataset
from data_prep.cache import cache_dir
from data_prep.config import Answers, Cache, DataConfig, OnCut, RegenerateConfig
from data_prep.dialog import Drive
from data_prep.sources.kinds import SourceConfig
from data_prep.tools.regenerate import NEUTRAL_KEYS, RegenerationResult, has_answers, regenerate
from sage.drafts.location import find_draft
from sage.inputs.processing import Processor
from sage.io.files import json_digest

NOT_IN_KEY = {*NEUTRAL_KEYS, "target", "served_model"}  # names; `weights` identifies the target
SAMPLE_BYTES = 1 << 16  # read at the start, in the middle and at the end of each weight file, to identify the weights


def answerable_items(config: DataConfig, processor: Processor, split: str) -> Any:
    """Returns the dataset of the conversations to be answered; ValueError for a stream."""
    if any(source.streaming for source in config.sources.values()):
        raise ValueError(
            "data.sources: a stream has no fixed items to answer and resume; write a part of it first (action=convert "
            "data.num_examples=N out=PART.jsonl), then answer that (action=regenerate data=messages data.path=PART.jsonl)"
        )
    return build_dataset(replace(config, cache=Cache.rows), processor, split)


def decoder_origin(target: Any, settings: RegenerateConfig) -> dict[str, Any]:
    """Returns the origin of answers that this project's decoder generates."""
    return {
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "draft": _draft_digest(find_draft(settings.draft)) if settings.draft else None,
        "policy": settings.policy,
        "dtype": str(target.dtype),
    }


def server_origin(target: Any, model: str | None) -> dict[str, Any]:
    """Returns the origin of answers of a server that serves the target as `model`."""
    return {"target": target.name, "target_fingerprint": target.fingerprint, "draft": None, "served_model": model}


def provenance_of(dataset: Any, origin: dict[str, Any], settings: RegenerateConfig) -> dict[str, Any]:
    """Returns the provenance of the rows: target, engine, data and decoding settings."""
    data = {"data": dataset.fingerprint, "num_frames": dataset.config.num_frames, "thinking": str(dataset.config.thinking)}
    return {**origin, **data, **settings.sampling()}


def _draft_digest(folder: Path) -> str:
    return f"{folder.name}:{weights_digest(str(folder), None)[:16]}"


def weights_digest(path: str, commit: str | None) -> str:
    """Returns what identifies the weights of a model: parts of the files of a local folder, else the hub id and its commit."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return f"{path}@{commit}"
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as opened:
            for place in (0, size // 2, max(0, size - SAMPLE_BYTES)):
                opened.seek(place)
                digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()[:32]


class TargetAnswers:
    """The answers of a target to the training split of a configuration.

    Args:
        origin: `decoder_origin` or `server_origin`.
        weights: `weights_digest` of the target.
    """

    def __init__(
        self, config: DataConfig, processor: Processor, origin: dict[str, Any], weights: str, settings: RegenerateConfig
    ) -> None:
        self._config, self._settings = config, settings
        self._dataset = answerable_items(config, processor, "train")
        named = {**origin, "target": Path(origin["target"]).name, "weights": weights}
        self._provenance = provenance_of(self._dataset, named, settings)
        decisive = {key: value for key, value in self._provenance.items() if key not in NOT_IN_KEY}
        self.folder = cache_dir(config.cache_dir) / "answers" / json_digest(decisive)
        self.files = {label: self.folder / f"{label}.jsonl" for label in config.sources}  # by source

    def __len__(self) -> int:
        return len(self._dataset)

    @property
    def is_complete(self) -> bool:
        return all(file.exists() for file in self.files.values())

    @property
    def has_any(self) -> bool:
        return any(has_answers(file) for file in self.files.values())

    def generate(
        self, drive: Drive, rank: int = 0, world_size: int = 1, **origin: Any
    ) -> Iterator[tuple[Path, RegenerationResult]]:
        """Answers this rank's share of every source, and yields the result of each; see `regenerate`.

        Args:
            origin: entries of the provenance that are known only now, such as `served_model`.
        """
        provenance = self._provenance | origin
        for number, file in enumerate(self.files.values()):
            items = self._dataset.index.of_source(number)
            if not file.exists():
                keeps_cut = self._settings.on_cut is OnCut.keep
                yield file, regenerate(items, drive, file, provenance, self._settings.seed, rank, world_size, keeps_cut)

    def data(self) -> DataConfig:
        """Returns the configuration whose training split is the answered conversations.

        Raises:
            ValueError: no conversation of a source was answered.
        """
        config = self._config
        for label, file in self.files.items():
            if not file.stat().st_size:
                raise ValueError(
                    f"data.answers: target; it answered none of the conversations of {label}, see {file}.skipped.jsonl; raise "
                    f"regenerate.max_new_tokens, or repair them and delete {self.folder}"
                )
        sources = {
            label: SourceConfig(kind="messages", path=str(file), weight=config.sources[label].weight)
            for label, file in self.files.items()
        }
        own: dict[str, Any] = {"path": "", "media_root": "", "num_examples": 0, "holdout": 0.0, "test_holdout": 0.0}
        return replace(config, sources=sources, answers=Answers.given, **own)
