"""Invalid items of every kind, from the file to the trainer: refused with file, index and reason, or skipped and listed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.data_helpers import make_image, make_noise, make_processor, save_images, share_turns
from support.messages import refused

from data_prep.build import build_dataset
from data_prep.config import Cache, DataConfig, OnBad
from data_prep.conversation import BadItem
from data_prep.dataset import index, prepare
from data_prep.dataset.index import count_reasons, read_skipped
from data_prep.loader import StepLoader
from data_prep.sources import SourceConfig

INVALID_INDEX = 2  # valid rows precede and follow it


def row(image: Any = None, conversations: Any = None) -> bytes:
    content = {"conversations": conversations or share_turns("<image>What?", "Red.")}
    return json.dumps(content | ({"image": image} if image else {})).encode()


def part_row(**part: str) -> bytes:
    question = {"role": "user", "content": [part, {"type": "text", "text": "What?"}]}
    return json.dumps({"messages": [question, {"role": "assistant", "content": "Red."}]}).encode()


GOOD = row("good.png")
# name -> the invalid line, parts of the reason
INVALID: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "missing image": (row("gone.png"), ("gone.png",)),
    "truncated JPEG": (row("cut.jpg"), ("cut.jpg", "truncated")),
    "corrupt GIF": (part_row(type="video", video="cut.gif"), ("cut.gif",)),
    "corrupt frame": (part_row(type="video", video="frames"), ("2.png",)),
    "not base64": (part_row(type="image", base64="@@"), ("base64",)),
    "no answer": (b'{"question": "What?"}', ("'user'",)),
    "wrong role": (row(None, share_turns("What?", "Red.", roles=("robot", "gpt"))), ("message 0", "'robot'", "human")),
    "not UTF-8": (row(None, share_turns("What?", "Red.")).replace(b"Red.", b"R\xe4d"), ("UTF-8",)),
    "invalid JSON line": (GOOD[:30], ("JSON",)),
}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    save_images(folder, "good.png", "frames/1.png")
    (folder / "frames" / "2.png").write_bytes(b"corrupt")
    make_noise().save(folder / "cut.jpg")
    (folder / "cut.jpg").write_bytes((folder / "cut.jpg").read_bytes()[:900])
    make_image().save(folder / "clip.gif", save_all=True, append_images=[make_image(16, "blue")])
    (folder / "cut.gif").write_bytes((folder / "clip.gif").read_bytes()[:70])  # PIL: IndexError
    return folder


def config(folder: Path, images: Path, lines: list[bytes], **changes: Any) -> DataConfig:
    (folder / "rows.jsonl").write_bytes(b"\n".join(lines))
    source = SourceConfig(kind="llava_json", path=str(folder / "rows.jsonl"), media_root=str(images))
    fixed: dict[str, Any] = {"holdout": 0.0, "cache_dir": str(folder / "cache"), "bad_list": str(folder / "bad.jsonl")}
    return DataConfig(sources={"it": source}, **fixed, **changes)


def trained_on(settings: DataConfig, of: int = 4) -> list[str]:
    """Returns the ids of one step of `of` examples, from the loader."""
    processor = make_processor("qwen2_5_vl")
    dataset = build_dataset(settings, processor)
    steps = iter(StepLoader(dataset, processor.collate, of, of))
    found = [name for batch in next(steps) for name in batch["ids"]]
    steps.close()  # type: ignore[attr-defined]
    return sorted(found)


def test_fault_of_the_chat_template_does_not_suggest_skipping(images: Path, tmp_path: Path) -> None:
    processor = make_processor("qwen2_5_vl")
    processor.chat_template = None
    with refused("chat_template.jinja", error=BadItem) as caught:
        build_dataset(config(tmp_path, images, [GOOD]), processor)[0]
    assert "on_bad" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "cache"),
    [(name, Cache.rows) for name in INVALID] + [(name, Cache.examples) for name in ("truncated JPEG", "wrong role")],
)
def test_invalid_item_is_refused_with_file_index_and_reason_or_skipped_and_listed(name, cache, images, tmp_path, caplog):
    """Both if the row and if only the pixels are invalid."""
    line, parts = INVALID[name]
    settings = config(tmp_path, images, [GOOD, GOOD, line, GOOD, GOOD], cache=cache)
    assert settings.on_bad == OnBad.error
    with refused(f"{tmp_path}/rows.jsonl: item {INVALID_INDEX}", *parts, "data.on_bad=skip", error=BadItem):
        trained_on(settings, of=5)
    settings.on_bad = OnBad.skip
    assert trained_on(settings) == ["0", "1", "3", "4"]
    (listed,) = read_skipped(tmp_path / "bad.jsonl")
    assert (listed["source"], listed["index"].split()[0]) == (str(tmp_path / "rows.jsonl"), str(INVALID_INDEX))
    assert all(part in listed["reason"] for part in parts)
    assert sum(count_reasons([listed]).values()) == 1
    assert cache is Cache.rows or ("skipped" in caplog.text and "bad.jsonl" in caplog.text)


def never(*args: Any) -> None:
    raise AssertionError("prepared again")


@pytest.mark.parametrize("cache", list(Cache))
@pytest.mark.parametrize("broken", [None, b"not an image"], ids=["missing", "broken"])
def test_restored_image_is_used(broken: bytes | None, cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items that are still invalid stay skipped, and without a change nothing is prepared again."""
    home = tmp_path / "img"
    save_images(home, "good.png")
    if broken:
        (home / "late.png").write_bytes(broken)
    rows = [GOOD, row("late.png"), row("gone.png"), GOOD]
    settings = config(tmp_path, home, rows, cache=cache, on_bad=OnBad.skip)
    assert trained_on(settings, of=2) == ["0", "3"]
    with monkeypatch.context() as patch:
        patch.setattr(index, "_write_index", never)
        patch.setattr(prepare, "_write_examples", never)
        assert trained_on(settings, of=2) == ["0", "3"]
    save_images(home, "late.png")
    for _ in range(2):
        assert trained_on(settings, of=3) == ["0", "1", "3"]
    if not broken:
        listed = build_dataset(replace(settings, cache=Cache.rows), make_processor("qwen2_5_vl")).skipped_items()
        assert [item["index"].split()[0] for item in listed] == ["2"]
