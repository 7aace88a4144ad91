"""Every way an item is known to be broken, from its file to the trainer: named where it stops, listed where it is skipped."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from PIL import Image
from support.data_helpers import make_processor, picture, save_pictures

from data_prep.batching.loader import StepLoader
from data_prep.build import build_dataset
from data_prep.config import Cache, DataConfig, OnBad, SourceConfig
from data_prep.conversation import BadItem
from data_prep.dataset import prepare
from data_prep.dataset.skip_log import count_reasons, read_skipped

FAMILIES = ("qwen2_5_vl", "llava_onevision")
BROKEN_AT = 2  # with whole rows before and after


def said(*values: str, roles: tuple[str, ...] = ("human", "gpt")) -> list[dict[str, str]]:
    return [{"from": roles[i % len(roles)], "value": value} for i, value in enumerate(values)]


def row(image: str | None = None, conversations: Any = None) -> bytes:
    content = {"conversations": conversations or said("<image>What?", "Red.")}
    return json.dumps(content | ({"image": image} if image else {})).encode()


def clip_row(clip: str) -> bytes:
    return json.dumps({"conversations": said("<video>What?", "Red."), "video": clip}).encode()


GOOD = row("good.png")
# (the broken line, a phrase of the reason)
BROKEN: dict[str, tuple[bytes, str]] = {
    "missing picture": (row("gone.png"), r"image .*gone\.png: no such file"),
    "truncated JPEG": (row("cut.jpg"), r"image .*cut\.jpg: corrupt or truncated"),
    "no picture at all": (row("text.png"), r"image .*text\.png: not an image in a known format"),
    "1x1": (row("dot.png"), r"image .*dot\.png: 1x1 pixels, allowed: at least 2 a side"),
    "20000x20": (row("strip.png"), r"image .*strip\.png: 20000x20 pixels, allowed: sides within"),
    "damaged GIF": (clip_row("cut.gif"), r"video .*cut\.gif: not a readable video"),
    "GIF cut inside a header": (clip_row("header.gif"), r"video .*header\.gif: not a readable video"),
    "wrong role": (row(None, said("What?", "Red.", roles=("robot", "gpt"))), "turn 0: from 'robot'; allowed: human"),
    "no question": (row(None, said("Red.", roles=("gpt",))), "message 0: 'assistant' after 'nothing', expected 'user'"),
    "two user turns in a row": (
        row(None, said("What?", "Which?", "Red.", roles=("human", "human", "gpt"))),
        "message 1: 'user' after 'user', expected 'assistant'; turns must alternate",
    ),
    "placeholder without picture": (row(None), "a <image> placeholder without image"),
    "picture without placeholder": (row("good.png", said("What?", "Red.")), r"1 image\(s\) more than placeholders"),
    "not UTF-8": (row(None, said("What?", "Red.")).replace(b"Red.", b"R\xe4d"), "not UTF-8 at byte"),
    "broken JSON line": (GOOD[:30], "not valid JSON"),
}
# What a picture may be all the same: stored in an odd way, or lying on its side.
ODD = ("cmyk.jpg", "deep.png", "animated.gif", "alpha.png", "palette.png", "turned.jpg")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    save_pictures(folder, "good.png")
    Image.effect_noise((64, 64), 90).convert("RGB").save(folder / "cut.jpg")
    (folder / "cut.jpg").write_bytes((folder / "cut.jpg").read_bytes()[:900])
    (folder / "text.png").write_text("no picture")
    picture().save(folder / "clip.gif", save_all=True, append_images=[picture(16, "blue")])
    (folder / "cut.gif").write_bytes((folder / "clip.gif").read_bytes()[:70])  # PIL: IndexError
    (folder / "header.gif").write_bytes((folder / "clip.gif").read_bytes()[:78])  # PIL: struct.error
    picture(1).save(folder / "dot.png")
    Image.new("RGB", (20000, 20)).save(folder / "strip.png")
    Image.new("CMYK", (16, 16), (0, 255, 255, 0)).save(folder / "cmyk.jpg")
    Image.new("I;16", (16, 16), 40000).save(folder / "deep.png")
    picture().save(folder / "animated.gif", save_all=True, append_images=[picture(16, "blue")])
    Image.new("RGBA", (16, 16), (255, 0, 0, 9)).save(folder / "alpha.png")
    picture().quantize(4).save(folder / "palette.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (32, 16), "red").save(folder / "turned.jpg", exif=exif)
    return folder


def config(folder: Path, pictures: Path, lines: list[bytes], **changes: Any) -> DataConfig:
    (folder / "rows.jsonl").write_bytes(b"\n".join(lines))
    source = SourceConfig(kind="llava_json", path=str(folder / "rows.jsonl"), media_root=str(pictures))
    fixed: dict[str, Any] = {"holdout": 0.0, "cache_dir": str(folder / "cache"), "bad_list": str(folder / "bad.jsonl")}
    return DataConfig(sources={"it": source}, **fixed, **changes)


def trained_on(settings: DataConfig, of: int = 4) -> list[str]:
    """The ids of one step of so many examples, as the trainer gets them."""
    processor = make_processor("qwen2_5_vl")
    dataset = build_dataset(settings, processor)
    steps = iter(StepLoader(dataset, processor.collate, of, of))
    found = [name for batch in next(steps) for name in batch["ids"]]
    steps.close()  # type: ignore[attr-defined]
    return sorted(found)


@pytest.mark.parametrize("cache", list(Cache))
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_item_stops_and_is_named(name: str, cache: Cache, pictures: Path, tmp_path: Path) -> None:
    """File, index and reason, whether it shows in the row or only in the pixels."""
    line, reason = BROKEN[name]
    settings = config(tmp_path, pictures, [GOOD, GOOD, line, GOOD], cache=cache)
    assert settings.on_bad == OnBad.error
    with pytest.raises(BadItem, match=rf"^{tmp_path}/rows\.jsonl: item {BROKEN_AT}\b.*: {reason}.*; data\.on_bad=skip leaves"):
        trained_on(settings)


def test_what_is_wrong_with_the_target_is_no_reason_to_skip_items(pictures: Path, tmp_path: Path) -> None:
    processor = make_processor(FAMILIES[0])
    processor.chat_template = None
    with pytest.raises(BadItem, match=r"no chat template; add chat_template\.jinja to the target folder$"):
        build_dataset(config(tmp_path, pictures, [GOOD]), processor)[0]


@pytest.mark.parametrize("cache", list(Cache))
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_item_is_left_out_and_listed(name: str, cache: Cache, pictures: Path, tmp_path: Path) -> None:
    line, reason = BROKEN[name]
    settings = config(tmp_path, pictures, [GOOD, GOOD, line, GOOD, GOOD], cache=cache, on_bad=OnBad.skip)
    assert trained_on(settings) == ["0", "1", "3", "4"]
    (listed,) = read_skipped(tmp_path / "bad.jsonl")
    assert (listed["source"], listed["index"].split()[0]) == (str(tmp_path / "rows.jsonl"), str(BROKEN_AT))
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(listed["reason"])
    assert sum(count_reasons([listed]).values()) == 1


@pytest.mark.parametrize("cache", list(Cache))
@pytest.mark.parametrize("broken", [None, b"no picture"], ids=["missing", "broken"])
def test_a_picture_that_came_back_is_used(
    broken: bytes | None, cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is still broken stays out, and while nothing changes nothing is prepared again."""
    home = tmp_path / "img"
    save_pictures(home, "good.png")
    if broken:
        (home / "late.png").write_bytes(broken)
    rows = [GOOD, row("late.png"), row("gone.png"), GOOD]
    settings = config(tmp_path, home, rows, cache=cache, on_bad=OnBad.skip)
    assert trained_on(settings, of=2) == ["0", "3"]
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "_write_index", None)
        patch.setattr(prepare, "_write_examples", None)
        assert trained_on(settings, of=2) == ["0", "3"]
    save_pictures(home, "late.png")
    for _ in range(2):
        assert trained_on(settings, of=3) == ["0", "1", "3"]
    if not broken:
        listed = build_dataset(replace(settings, cache=Cache.rows), make_processor(FAMILIES[0])).skipped_items()
        assert [item["index"].split()[0] for item in listed] == ["2"]


@pytest.mark.parametrize("family", FAMILIES)
def test_odd_pictures_are_examples_like_any(family: str, pictures: Path, tmp_path: Path) -> None:
    """CMYK, 16 bits, an animation, transparency, a palette, a turned camera: as many visual tokens as a plain picture."""
    processor = make_processor(family)
    dataset = build_dataset(config(tmp_path, pictures, [row(name) for name in ("good.png", *ODD)]), processor)
    plain, *odd = [dataset[i] for i in range(len(dataset))]
    assert len(odd) == len(ODD)
    for name, example in zip(ODD, odd, strict=True):
        if name != "turned.jpg":  # of another shape
            assert torch.equal(example["input_ids"], plain["input_ids"]), name
            assert torch.equal(example["loss_mask"], plain["loss_mask"]), name
        assert torch.isfinite(example["pixel_values"]).all()
    for name in ("animated.gif", "palette.png"):  # the same red
        assert torch.allclose(odd[ODD.index(name)]["pixel_values"], plain["pixel_values"], atol=0.02)


# -- the other layouts: what only they can get wrong ---------------------------------------------------------------------


def jpeg(share: float) -> bytes:
    stream = io.BytesIO()
    Image.effect_noise((64, 64), 90).convert("RGB").save(stream, "JPEG")
    return stream.getvalue()[: int(len(stream.getvalue()) * share)]


def folder_of(folder: Path, name: str, content: bytes, text: bytes = b"Red.") -> SourceConfig:
    save_pictures(folder, "a.png", "c.png")
    for item in ("a", "c"):
        (folder / f"{item}.txt").write_text("Red.")
    (folder / name).write_bytes(content)
    (folder / name).with_suffix(".txt").write_bytes(text)
    return SourceConfig(kind="folder", path=str(folder))


def messages_of(folder: Path, part: dict[str, Any]) -> SourceConfig:
    save_pictures(folder, "a.png", "clip/1.png", "clip/2.png")
    (folder / "clip" / "2.png").write_bytes(b"torn")
    (folder / "empty").mkdir()
    parts = [{"type": "image", "image": "a.png"}, part, {"type": "image", "image": "a.png"}]
    question, answer = {"type": "text", "text": "What?"}, {"role": "assistant", "content": "Red."}
    rows = [{"messages": [{"role": "user", "content": [part, question]}, answer]} for part in parts]
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return SourceConfig(kind="messages", path=str(folder / "rows.jsonl"))


def onevision_of(folder: Path, image: Any, value: Any = "<image>What?") -> SourceConfig:
    whole = {"bytes": jpeg(1.0), "path": None}
    asked = ("<image>What?", value, "<image>What?")
    table = {
        "id": ["a", "b", "c"],
        "image": [whole, image, whole],
        "conversations": [[{"from": "human", "value": q}, {"from": "gpt", "value": "Red."}] for q in asked],
    }
    features = datasets.Features(
        {
            "id": datasets.Value("string"),
            "image": datasets.Image(),
            "conversations": [{"from": datasets.Value("string"), "value": datasets.Value("string")}],
        }
    )
    (folder / "subset").mkdir()
    datasets.Dataset.from_dict(table, features).to_parquet(folder / "subset" / "train-00000-of-00001.parquet")
    return SourceConfig(kind="llava_onevision", path=str(folder / "subset"))


def hub_of(folder: Path, answer: str | None) -> SourceConfig:
    table = {"question": ["What?"] * 3, "answer": ["Red.", answer, "Red."]}
    datasets.Dataset.from_dict(table).save_to_disk(folder / "disk")
    return SourceConfig(kind="hub", path=str(folder / "disk"))


ELSEWHERE: dict[str, tuple[Callable[[Path], SourceConfig], str]] = {
    "folder, text not UTF-8": (lambda folder: folder_of(folder, "b.png", jpeg(1.0), b"R\xe4d"), r"b\.txt: not UTF-8"),
    "folder, torn picture": (lambda folder: folder_of(folder, "b.jpg", jpeg(0.5)), r"b\.jpg: corrupt or truncated"),
    "folder, no video": (lambda folder: folder_of(folder, "b.gif", b"GIF89a, no more"), r"b\.gif: not a readable video"),
    "messages, torn frame": (
        lambda folder: messages_of(folder, {"type": "video", "video": "clip"}),
        r"clip.*2\.png: not an image",
    ),
    "messages, no frames": (lambda folder: messages_of(folder, {"type": "video", "video": "empty"}), r"video .*empty: "),
    "messages, no clip": (lambda folder: messages_of(folder, {"type": "video", "video": "gone.mp4"}), r"gone\.mp4: no such"),
    "messages, no picture": (
        lambda folder: messages_of(folder, {"type": "image", "image": "data:image/png;base64,@@"}),
        "not valid base64",
    ),
    "onevision, torn picture": (
        lambda folder: onevision_of(folder, {"bytes": jpeg(0.5), "path": None}),
        "corrupt or truncated",
    ),
    "onevision, no picture": (lambda folder: onevision_of(folder, None), "a <image> placeholder without image"),
    "onevision, no text": (lambda folder: onevision_of(folder, None, value=None), "turn 0: not a {from, value} object"),
    "hub, no answer": (lambda folder: hub_of(folder, None), "ends with 'user'; the last message must be the assistant's"),
}


@pytest.mark.parametrize(
    ("name", "streaming"),
    [(name, False) for name in ELSEWHERE] + [(name, True) for name in ELSEWHERE if name.startswith("onevision")],
)
def test_other_layouts_name_and_skip_theirs_too(name: str, streaming: bool, tmp_path: Path) -> None:
    make, reason = ELSEWHERE[name]
    (tmp_path / "data").mkdir()
    source, listed = replace(make(tmp_path / "data"), streaming=streaming), tmp_path / "bad.jsonl"
    fixed: dict[str, Any] = {"holdout": 0.0, "cache_dir": str(tmp_path / "cache"), "bad_list": str(listed), "shuffle_block": 3}
    settings = DataConfig(sources={"it": source}, **fixed)
    with pytest.raises(BadItem, match=rf"^{source.path}.*: item 1\b.*{reason}"):
        trained_on(settings, of=3)
    settings.on_bad = OnBad.skip
    assert len(trained_on(settings, of=2)) == 2
    (row,) = read_skipped(listed)
    assert row["index"].split()[0] == "1"
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(row["reason"])
