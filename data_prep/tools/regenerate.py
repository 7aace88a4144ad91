"""Regeneration: replaces every answer of a dataset by the target's own answer.

Owns: the answers of a conversation, resuming after an interruption, the division among ranks, the provenance of every row.
Does not own: decoding (sage.generate).

Ref: EAGLE-3, arXiv 2503.01840: drafts are trained on answers that the target generates.

On disk, while it runs: `OUT.part-RANK-of-RANKS.jsonl`, one line per finished conversation. At the end the parts become
`OUT`, in the order of the dataset for any number of ranks, and `OUT.skipped.jsonl` with the conversations without a row.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from data_prep.config import RegenerateConfig
from data_prep.conversation import BadItem, Conversation, Message, check_conversation
from data_prep.files import locked, naming_write_errors, writing
from data_prep.tools.jsonl_writer import MediaFolder, as_line
from sage.inputs.media import open_image, open_video_part
from sage.progress import progress_bar

logger = logging.getLogger(__name__)
NEUTRAL_KEYS = {"draft", "policy"}  # of the provenance: they affect the speed, not the answers


@dataclass(frozen=True)
class Answer:
    """The target's answer to one prompt."""

    text: str
    is_finished: bool  # whether it ended before `max_new_tokens`


Answerer = Callable[[list[Message], int], Answer]  # messages, seed


@dataclass(frozen=True)
class RegenerationResult:
    """Numbers of conversations after a call of `regenerate`.

    Attributes:
        done_before, done_now: answered before this call and by it.
        total: all conversations of the dataset.
        is_merged: whether all ranks' parts are complete and `out` is written.
        num_skipped: conversations without a row, once merged.
    """

    done_before: int
    done_now: int
    total: int
    is_merged: bool
    num_skipped: int


def regenerate(
    dataset: Any,
    answer: Answerer,
    out: Path,
    provenance: dict[str, Any],
    settings: RegenerateConfig,
    rank: int = 0,
    world_size: int = 1,
) -> RegenerationResult:
    """Answers this rank's conversations and, once the parts of all ranks are complete, writes `out`.

    Args:
        dataset: `__len__` and `conversation(i)`, e.g. of `build_dataset` with data.cache=rows.
        answer: see `answerer`.
        provenance: the origin of the rows (target, draft, ...), stored in every row.
        settings: decoding settings, stored in the provenance.

    Raises:
        ValueError: `out` or its parts contain rows with another provenance.
    """
    provenance = {**provenance, **{k: v for k, v in asdict(settings).items() if k != "draft"}}
    done = _read(out, provenance)
    remaining = [i for i in range(rank, len(dataset), world_size) if i not in done]
    media = MediaFolder(out)
    part = part_path(out, rank, world_size)
    part.parent.mkdir(parents=True, exist_ok=True)
    _drop_unfinished_line(part)
    for position in progress_bar(remaining, "answering", len(dataset), len(done), is_shown=rank == 0):
        line = _line(dataset, position, answer, settings.seed, provenance, media)
        with naming_write_errors(part), part.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    is_merged = _merge(out, provenance, len(dataset))
    skipped = skipped_path(out)
    num_skipped = skipped.read_bytes().count(b"\n") if is_merged and skipped.exists() else 0
    return RegenerationResult(len(done), len(remaining), len(dataset), is_merged, num_skipped)


def answerer(target: Any, draft: Any, settings: RegenerateConfig, num_frames: int) -> Answerer:
    """Returns the function that generates the target's answer, with speculative decoding if there is a draft."""
    import sage

    sampling = sage.Sampling.from_attributes(settings)
    policy = settings.policy if draft is not None else "autoregressive"

    def answer(messages: list[Message], seed: int) -> Answer:
        inputs = target.prepare(with_open_media(messages, num_frames))
        out = sage.generate(target, draft, inputs, policy=policy, sampling=sampling, seed=seed)
        return Answer(out.text, bool(len(out.tokens)) and int(out.tokens[-1]) in target.eos_token_ids)

    return answer


def _line(dataset: Any, position: int, answer: Answerer, seed: int, provenance: dict[str, Any], media: MediaFolder) -> str:
    """Returns the row of one conversation; `kept`, its number of answers, is 0 if the first answer did not end."""
    name, reason = None, ""
    try:
        conversation = dataset.conversation(position)
        name = conversation.id
        regenerated = _regenerated(check_conversation(conversation), answer, seed)
    except BadItem as error:
        return json.dumps({"id": name, "position": position, "kept": 0, "reason": str(error), "provenance": provenance})
    kept = sum(message["role"] == "assistant" for message in regenerated.messages)
    if not kept:
        reason = str(conversation.error("no answer ended within max_new_tokens"))
    return as_line(regenerated, media, position=position, kept=kept, reason=reason, provenance=provenance)


def _regenerated(conversation: Conversation, answer: Answerer, seed: int) -> Conversation:
    """Replaces the answers in order, each conditioned on the previous ones, up to the first that did not end."""
    messages: list[Message] = []
    for message in conversation.messages:
        if message["role"] != "assistant":
            messages.append(message)
            continue
        found = answer(messages, _seed(seed, conversation.id, len(messages)))
        if not found.is_finished:
            last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
            return replace(conversation, messages=messages[: last + 1])
        messages.append({"role": "assistant", "content": [{"type": "text", "text": found.text}]})
    return replace(conversation, messages=messages)


def _seed(seed: int, name: str, turn: int) -> int:
    """Returns the seed of one answer, which does not depend on the rank."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}/{turn}".encode()).digest()[:4], "big") >> 1


def with_open_media(messages: list[Message], num_frames: int) -> list[Message]:
    """Opens images and videos as training does: the same rotation, the same frames of a video."""

    def opened(part: dict[str, Any]) -> dict[str, Any]:
        if part["type"] == "image":
            return part | {"image": open_image(part["image"])}
        if part["type"] == "video":
            video = open_video_part(part, num_frames)
            return {"type": "video", "video": video.frames, "fps": video.fps}  # without `start` and `end`: already applied
        return part

    return [{**message, "content": [opened(part) for part in message["content"]]} for message in messages]


# -- files ------------------------------------------------------------------------------------------------------------


def part_path(out: Path, rank: int, world_size: int) -> Path:
    """Returns the file to which a rank appends its rows."""
    return out.with_name(f"{out.name}.part-{rank}-of-{world_size}.jsonl")


def skipped_path(out: Path) -> Path:
    """Returns the list of conversations without a row."""
    return out.with_name(f"{out.name}.skipped.jsonl")


def has_answers(out: Path) -> bool:
    """Returns whether a finished answer is saved, in `out` or in a part of it."""
    return any(path.stat().st_size for path in (out, *_parts(out)) if path.exists())


def _parts(out: Path) -> list[Path]:
    return sorted(out.parent.glob(f"{out.name}.part-*.jsonl")) if out.parent.is_dir() else []


def _read(out: Path, provenance: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Returns all finished rows by position, from `out`, the skipped rows and the parts.

    Raises:
        ValueError: rows with another provenance.
    """
    files = [path for path in (out, skipped_path(out)) if path.exists()] + _parts(out)
    return {row["position"]: row for file in files for row in _rows(file, provenance)}


def _rows(file: Path, provenance: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of a file to which another process may be appending: a line without its end is ignored."""
    rows = [json.loads(line) for line in file.read_bytes().split(b"\n")[:-1]]
    for row in rows:
        found = row.get("provenance") or {}
        differs = [key for key in sorted({*found, *provenance} - NEUTRAL_KEYS) if found.get(key) != provenance.get(key)]
        if differs:
            raise ValueError(
                f"{file}: contains rows with other settings ({', '.join(differs)}: {found.get(differs[0])} there, "
                f"{provenance.get(differs[0])} here); give another out, or delete the file"
            )
    return rows


def _drop_unfinished_line(part: Path) -> None:
    data = part.read_bytes() if part.exists() else b""
    complete = data[: data.rfind(b"\n") + 1]
    if complete != data:
        with writing(part) as temporary:
            temporary.write_bytes(complete)


def _merge(out: Path, provenance: dict[str, Any], total: int) -> bool:
    """Writes the rows of all parts in order to `out` if every conversation is answered; returns whether it is."""
    with locked(out):
        rows = _read(out, provenance)
        if len(rows) < total:
            return False
        if _parts(out):
            ordered = [rows[position] for position in sorted(rows)]
            skipped = [row for row in ordered if not row["kept"]]
            if skipped:
                _write(skipped_path(out), skipped)
            _write(out, [row for row in ordered if row["kept"]])
            for part in _parts(out):
                part.unlink()
            logger.info("%s: %d conversations, %d skipped", out, total - len(skipped), len(skipped))
        return True


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    with writing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
