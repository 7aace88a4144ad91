"""Regeneration: replaces every answer of a dataset by the target's own answer.

Ref: EAGLE-3, arXiv 2503.01840: drafts are trained on answers that the target generates.

On disk, while it runs: `OUT.part-RANK-of-RANKS.jsonl`, one line per finished conversation. At the end the parts become
`OUT`, in the order of the dataset for any number of ranks, and `OUT.skipped.jsonl` with the conversations without a row.

Rows are `messages` rows. Images and videos that are files stay in place; others are written once, named by content, to a folder
beside the rows. For `data.answers=target` the rows lie in the cache folder of the data, one file per training source:

    CACHE/answers/KEY/LABEL.jsonl       KEY is a hash of the data, the target's weights and the settings of the answers

A run that was stopped continues with the next conversation. Files are never deleted automatically.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image

from data_prep.build import build_dataset
from data_prep.cache import cache_dir
from data_prep.config import Answers, Cache, DataConfig, RegenerateConfig
from data_prep.conversation import Conversation, Part, extras_of
from data_prep.dialog import Dialog, Drive, Outcome
from data_prep.sources.files import SourceConfig
from sage.drafts.location import find_draft
from sage.inputs.media import LIMIT_KEYS, open_image
from sage.inputs.processing import Processor
from sage.inputs.video import TIME_KEYS
from sage.io.files import json_digest, locked, naming_write_errors, writing
from sage.io.progress import progress_bar

logger = logging.getLogger(__name__)
NEUTRAL_KEYS = {"draft", "policy"}  # keys of the provenance that affect the speed, not the answers
NOT_IN_KEY = {*NEUTRAL_KEYS, "target", "served_model"}  # names; `weights` identifies the target
SAMPLE_BYTES = 1 << 16  # read at the start, in the middle and at the end of each weight file, to identify the weights
LOG_INTERVAL_S = 60.0  # between two log lines of the progress if stderr is not a terminal


@dataclass(frozen=True)
class RegenerationResult:
    """Numbers of conversations after a call of `regenerate`."""

    done_before: int
    done_now: int  # finished by this call
    total: int
    is_merged: bool  # all ranks' parts are complete and `out` is written
    outcomes: Counter[str]  # of the finished ones
    num_skipped: int  # without a row, once merged

    def as_text(self, out: Path) -> str:
        counts = ", ".join(f"{self.outcomes[outcome]} {outcome}" for outcome in Outcome if self.outcomes[outcome])
        lost = f"; {self.num_skipped} without a row, see {skipped_path(out)}" if self.num_skipped else ""
        return f"{self.total} conversations ({self.done_now} now): {counts or 'none'}: {out}{lost}"


def regenerate(
    dataset: Any,
    drive: Drive,
    out: Path,
    provenance: dict[str, Any],
    settings: RegenerateConfig,
    rank: int = 0,
    world_size: int = 1,
) -> RegenerationResult:
    """Answers this rank's conversations and, once the parts of all ranks are complete, writes `out`.

    Args:
        dataset: `__len__` and `conversation(i)`, e.g. of `build_dataset` with data.cache=rows.
        drive: the source of the answers, `data_prep.dialog.own_answers` or that of a server.
        provenance: the origin of the rows, stored in each; ValueError if `out` or its parts have rows with another one.
    """
    done = _read(out, provenance)
    remaining = [i for i in range(rank, len(dataset), world_size) if i not in done]
    part = part_path(out, rank, world_size)
    part.parent.mkdir(parents=True, exist_ok=True)
    written = part.read_bytes() if part.exists() else b""
    complete = written[: written.rfind(b"\n") + 1]
    if complete != written:  # stopped within a line
        with writing(part) as temporary:
            temporary.write_bytes(complete)
    dialogs = (Dialog.open(dataset, position, settings) for position in remaining)
    for dialog in _with_progress(drive(dialogs), len(done), len(remaining), rank, world_size):
        row = {"position": dialog.position, "kept": dialog.kept, "outcome": dialog.outcome, "reason": dialog.reason}
        line = as_line(dialog.answered(), out, **row, provenance=provenance)
        with naming_write_errors(part), part.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    rows = _merge(out, provenance, len(dataset))
    is_merged = len(rows) == len(dataset)
    num_skipped = sum(not row["kept"] for row in rows.values()) if is_merged else 0
    outcomes = Counter(row["outcome"] for row in rows.values())
    return RegenerationResult(len(done), len(remaining), len(dataset), is_merged, outcomes, num_skipped)


def _with_progress(
    dialogs: Iterable[Dialog], num_before: int, num_remaining: int, rank: int, world_size: int
) -> Iterator[Dialog]:
    """Reports rank 0's progress, rate and remaining time: as a bar on a terminal, elsewhere in the log."""
    start = last = time.monotonic()
    total, share, is_shown = num_before + num_remaining, f" of rank 0 of {world_size}" if world_size > 1 else "", rank == 0
    bar = progress_bar(dialogs, f"answering{share}", total, num_before, is_shown)
    for count, dialog in enumerate(bar, 1):
        yield dialog
        now = time.monotonic()
        if is_shown and not sys.stderr.isatty() and now - last >= LOG_INTERVAL_S:
            last, rate = now, count / (now - start)
            left_s = (num_remaining - count) / rate
            logger.info("%d of %d conversations%s, %.2f/s, %.0f min left", num_before + count, total, share, rate, left_s / 60)


# -- files ------------------------------------------------------------------------------------------------------------


def part_path(out: Path, rank: int, world_size: int) -> Path:
    return out.with_name(f"{out.name}.part-{rank}-of-{world_size}.jsonl")


def skipped_path(out: Path) -> Path:
    return out.with_name(f"{out.name}.skipped.jsonl")


def has_answers(out: Path) -> bool:
    """Returns whether a finished answer is saved, in `out` or in a part of it."""
    return any(path.stat().st_size for path in (out, *_parts(out)) if path.exists())


def finished_provenance(out: Path) -> dict[str, Any] | None:
    """Returns the provenance of the rows of `out`; None if it is not written yet."""
    for path in (out, skipped_path(out)) if out.exists() else ():
        if path.exists() and path.stat().st_size:
            with path.open(encoding="utf-8") as file:
                provenance: dict[str, Any] = json.loads(file.readline()).get("provenance") or {}
                return provenance
    return None


def _parts(out: Path) -> list[Path]:
    return sorted(out.parent.glob(f"{out.name}.part-*.jsonl")) if out.parent.is_dir() else []


def _read(out: Path, provenance: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Returns all finished rows by position, from `out`, the skipped rows and the parts.

    Another process may be appending to a part: a line without its end is ignored.
    """
    rows = {}
    for file in [path for path in (out, skipped_path(out)) if path.exists()] + _parts(out):
        for row in map(json.loads, file.read_bytes().split(b"\n")[:-1]):
            there = row.get("provenance") or {}
            if differs := [
                key for key in sorted({*there, *provenance} - NEUTRAL_KEYS) if there.get(key) != provenance.get(key)
            ]:
                raise ValueError(
                    f"{file}: contains rows with other settings ({', '.join(differs)}: {there.get(differs[0])} there, "
                    f"{provenance.get(differs[0])} here); give another out, or delete the file"
                )
            rows[row["position"]] = row
    return rows


def _merge(out: Path, provenance: dict[str, Any], total: int) -> dict[int, dict[str, Any]]:
    """Writes the rows of all parts in order to `out` if every conversation is finished; returns the rows by position."""
    with locked(out):
        rows = _read(out, provenance)
        if len(rows) == total and _parts(out):
            ordered = [rows[position] for position in sorted(rows)]
            if skipped := [row for row in ordered if not row["kept"]]:
                _write(skipped_path(out), skipped)
            _write(out, [row for row in ordered if row["kept"]])
            for part in _parts(out):
                part.unlink()
        return rows


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    with writing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def as_line(conversation: Conversation, row_file: Path, **extra: Any) -> str:
    """Returns one line of `row_file`, without its end, after its images are stored; `extra` are further fields of the row."""
    messages = [
        {
            "role": message["role"],
            "content": [part if part["type"] == "text" else _stored(part, row_file) for part in message["content"]],
            **extras_of(message),
        }
        for message in conversation.messages
    ]
    row = {"id": conversation.id, "source": conversation.source, "family": conversation.family, "messages": messages}
    return json.dumps(row | extra, ensure_ascii=False)


def _stored(part: Part, row_file: Path) -> Part:
    kind = part["type"]
    settings = {key: part[key] for key in (*TIME_KEYS, *LIMIT_KEYS) if key in part}
    return {"type": kind, kind: stored_media(part[kind], row_file), **settings}


def stored_media(value: Any, row_file: Path) -> Any:
    """Stores an image, or the frames of a video, beside `rows.jsonl` in `rows_media/`, unless they are files.

    Returns the path (of a list of frames: their paths), absolute, or relative to the row file if stored here.
    """
    if isinstance(value, (list, tuple)):
        return [stored_media(frame, row_file) for frame in value]
    if isinstance(value, (str, Path)) and not str(value).startswith("data:"):
        return str(Path(value).absolute())
    data, suffix = value, ".bin"
    if not isinstance(value, bytes):
        image = value if isinstance(value, Image.Image) and value.mode == "RGB" else open_image(value)
        image.save(stream := io.BytesIO(), "PNG")
        data, suffix = stream.getvalue(), ".png"
    path = row_file.parent / f"{row_file.stem}_media" / (hashlib.sha256(data).hexdigest()[:32] + suffix)
    if not path.exists():
        with writing(path) as temporary:
            temporary.write_bytes(data)
    return f"{path.parent.name}/{path.name}"


# -- answers kept for training -------------------------------------------------------------------------------------------


def answerable_items(config: DataConfig, processor: Processor, split: str) -> Any:
    """Returns the dataset of the conversations to be answered; ValueError for a stream."""
    if config.is_streamed():
        raise ValueError(
            "data.sources: a stream has no fixed items to answer and resume; write a part of it first (action=convert "
            "data.num_examples=N out=PART.jsonl), then answer that (action=regenerate data=messages data.path=PART.jsonl)"
        )
    return build_dataset(replace(config, cache=Cache.rows), processor, split)


def origin_of(target: Any, settings: RegenerateConfig, model: str | None = None) -> dict[str, Any]:
    """Returns the origin of answers: this project's decoder, or a server that serves the target as `model`."""
    draft = find_draft(settings.draft) if settings.draft and not settings.server else None
    origin = {
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "draft": f"{draft.name}:{weights_digest(str(draft), None)[:16]}" if draft else None,
    }
    served = {"served_model": model} if settings.server else {"policy": settings.policy, "dtype": str(target.dtype)}
    return origin | served


def provenance_of(dataset: Any, origin: dict[str, Any], settings: RegenerateConfig) -> dict[str, Any]:
    """Returns the provenance of the rows: target, engine, data and decoding settings."""
    data = {"data": dataset.fingerprint, "num_frames": dataset.config.num_frames, "thinking": str(dataset.config.thinking)}
    return {**origin, **data, **settings.sampling()}


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
            for position in (0, size // 2, max(0, size - SAMPLE_BYTES)):
                opened.seek(position)
                digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()[:32]


class TargetAnswers:
    """The answers of a target to the training split, given their `origin_of` and the `weights_digest` of the target."""

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

        `origin` are entries of the provenance that are known only now, such as `served_model`.
        """
        provenance = self._provenance | origin
        for number, file in enumerate(self.files.values()):
            items = self._dataset.index.of_source(number)
            if not file.exists():
                yield file, regenerate(items, drive, file, provenance, self._settings, rank, world_size)

    def data(self) -> DataConfig:
        """Returns the configuration of the answered conversations; ValueError if none of a source was answered."""
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
