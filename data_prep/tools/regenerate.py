"""The target answers its own prompts: data whose answers are what the target would say.

Owns: replacing every answer of a conversation, resuming after any interruption, sharing the work between ranks, where each
row comes from. Does not own: decoding (sage.generate).

Ref: EAGLE-3, arXiv 2503.01840, and its peers: drafts are trained on answers the target gives itself.

On disk, while it runs: `OUT.part-RANK-of-RANKS.jsonl`, one line per finished conversation. At the end the parts become
`OUT`, in the order of the data whatever the number of ranks, and `OUT.skipped.jsonl` where answers did not come to an end.
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
from data_prep.conversation import BadItem, Conversation, Message, check
from data_prep.files import atomic_path, blaming, locked
from data_prep.tools.jsonl_writer import MediaFolder, as_line
from sage.inputs.media import open_clip_part, open_picture

logger = logging.getLogger(__name__)
Progress = Callable[[int, int], None]
FREE = {"draft", "policy"}  # they change how fast an answer comes, not which


@dataclass(frozen=True)
class Answer:
    """What the target says to one prompt; `finished` unless it ran into `max_new_tokens`."""

    text: str
    finished: bool


Answerer = Callable[[list[Message], int], Answer]  # messages, seed


@dataclass(frozen=True)
class Outcome:
    """What a call of `regenerate` found and did; `skipped` conversations gave no row, once all are merged."""

    done_before: int
    done_now: int
    total: int
    merged: bool
    skipped: int


def regenerate(
    dataset: Any,
    answer: Answerer,
    out: Path,
    provenance: dict[str, Any],
    settings: RegenerateConfig,
    rank: int = 0,
    world_size: int = 1,
    progress: Progress | None = None,
) -> Outcome:
    """Answers this rank's share of the conversations and, when all ranks' shares are there, writes `out`.

    Args:
        dataset: `__len__` and `conversation(i)`, e.g. what `build_dataset` returns with data.cache=rows.
        answer: see `answerer`.
        provenance: what made the rows (target, draft, ...); part of every row.
        settings: decoding settings; part of every row's provenance.

    Raises:
        ValueError: `out` or its parts hold rows that were made otherwise.
    """
    provenance = {**provenance, **{k: v for k, v in asdict(settings).items() if k != "draft"}}
    done = _read(out, provenance)
    mine = [i for i in range(rank, len(dataset), world_size) if i not in done]
    media = MediaFolder(out)
    part = part_path(out, rank, world_size)
    part.parent.mkdir(parents=True, exist_ok=True)
    _drop_unfinished_line(part)
    for number, position in enumerate(mine, 1):
        line = _line(dataset, position, answer, settings.seed, provenance, media)
        with blaming(part), part.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        if progress is not None:
            progress(len(done) + number, len(dataset))
    merged = _merge(out, provenance, len(dataset))
    skipped = skipped_path(out)
    lost = skipped.read_bytes().count(b"\n") if merged and skipped.exists() else 0
    return Outcome(len(done), len(mine), len(dataset), merged, lost)


def answerer(target: Any, draft: Any, settings: RegenerateConfig, num_frames: int) -> Answerer:
    """The target itself, sped up by a draft if there is one."""
    import sage

    sampling = sage.Sampling.from_attributes(settings)
    policy = settings.policy if draft is not None else "autoregressive"

    def say(messages: list[Message], seed: int) -> Answer:
        inputs = target.prepare(with_open_media(messages, num_frames))
        out = sage.generate(target, draft, inputs, policy=policy, sampling=sampling, seed=seed)
        return Answer(out.text, bool(len(out.tokens)) and int(out.tokens[-1]) in target.eos_token_ids)

    return say


def _line(dataset: Any, position: int, answer: Answerer, seed: int, provenance: dict[str, Any], media: MediaFolder) -> str:
    """The row of one conversation; `kept` is 0 where not even the first answer came to an end."""
    try:
        conversation = check(dataset.conversation(position))
        told, reason = _retell(conversation, answer, seed), ""
    except BadItem as error:
        return json.dumps({"position": position, "kept": 0, "reason": str(error), "provenance": provenance})
    kept = sum(message["role"] == "assistant" for message in told.messages)
    if not kept:
        reason = f"{conversation.source}: {conversation.id}: no answer ended within max_new_tokens"
    return as_line(told, media, position=position, kept=kept, reason=reason, provenance=provenance)


def _retell(conversation: Conversation, answer: Answerer, seed: int) -> Conversation:
    """Every answer replaced by the target's, each given what was said before; up to the first that did not end."""
    messages: list[Message] = []
    for message in conversation.messages:
        if message["role"] != "assistant":
            messages.append(message)
            continue
        said = answer(messages, _seed(seed, conversation.id, len(messages)))
        if not said.finished:
            last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
            return replace(conversation, messages=messages[: last + 1])
        messages.append({"role": "assistant", "content": [{"type": "text", "text": said.text}]})
    return replace(conversation, messages=messages)


def _seed(seed: int, name: str, turn: int) -> int:
    """A seed per answer, the same whichever rank gives it."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}/{turn}".encode()).digest()[:4], "big") >> 1


def with_open_media(messages: list[Message], num_frames: int) -> list[Message]:
    """The messages with pictures as training sees them: same rotation, same frames of a clip."""

    def opened(part: dict[str, Any]) -> dict[str, Any]:
        if part["type"] == "image":
            return part | {"image": open_picture(part["image"])}
        if part["type"] == "video":
            clip = open_clip_part(part, num_frames)
            return {"type": "video", "video": clip.frames, "fps": clip.fps}  # the segment is cut out already
        return part

    return [{**message, "content": [opened(part) for part in message["content"]]} for message in messages]


# -- files ------------------------------------------------------------------------------------------------------------


def part_path(out: Path, rank: int, world_size: int) -> Path:
    """Where a rank appends its rows while it works."""
    return out.with_name(f"{out.name}.part-{rank}-of-{world_size}.jsonl")


def skipped_path(out: Path) -> Path:
    """Where the conversations are listed that gave no row."""
    return out.with_name(f"{out.name}.skipped.jsonl")


def _parts(out: Path) -> list[Path]:
    return sorted(out.parent.glob(f"{out.name}.part-*.jsonl")) if out.parent.is_dir() else []


def _read(out: Path, provenance: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """All finished rows by position, wherever they are.

    Raises:
        ValueError: rows that were made otherwise.
    """
    files = [path for path in (out, skipped_path(out)) if path.exists()] + _parts(out)
    return {row["position"]: row for file in files for row in _rows(file, provenance)}


def _rows(file: Path, provenance: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of a file somebody may be appending to: a line without its end does not count."""
    rows = [json.loads(line) for line in file.read_bytes().split(b"\n")[:-1]]
    for row in rows:
        found = row.get("provenance") or {}
        differs = [key for key in sorted({*found, *provenance} - FREE) if found.get(key) != provenance.get(key)]
        if differs:
            raise ValueError(
                f"{file}: holds rows made otherwise ({', '.join(differs)}: {found.get(differs[0])} there, "
                f"{provenance.get(differs[0])} here); give another out, or delete the file"
            )
    return rows


def _drop_unfinished_line(part: Path) -> None:
    data = part.read_bytes() if part.exists() else b""
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        with atomic_path(part) as temporary:
            temporary.write_bytes(whole)


def _merge(out: Path, provenance: dict[str, Any], total: int) -> bool:
    """Once every position is answered: the parts in order, as one file. The last rank to finish does it."""
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
            logger.info("%s: %d conversations; %d gave no row", out, total - len(skipped), len(skipped))
        return True


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
