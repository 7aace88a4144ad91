"""Images by absolute path, relative to `media_root` and relative to the file, in `messages` and LLaVA's format."""

import json
from pathlib import Path

import pytest
from support.data_helpers import save_images
from support.messages import refused

from data_prep.config import DataConfig, Images
from data_prep.conversation import BadItem
from data_prep.server.chat_request import MediaPolicy
from data_prep.sources import SourceConfig, open_source
from data_prep.splits import Split


def write_row(path: Path, kind: str, image: str) -> SourceConfig:
    question, answer = "<image>What?", "Red."
    if kind == "messages":
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        path.write_text(json.dumps({"messages": turns, "images": [image]}) + "\n")
    else:
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        path.write_text(json.dumps([{"image": image, "conversations": turns}]))
    return SourceConfig(kind=kind, path=str(path))


@pytest.mark.parametrize("kind", ["messages", "llava_json"])
@pytest.mark.parametrize(
    ("place", "has_root"), [("file", False), ("file", True), ("root", True), ("absolute", False), ("absolute", True)]
)
def test_images_are_found(tmp_path: Path, kind: str, place: str, has_root: bool) -> None:
    (tmp_path / "images").mkdir()
    save_images(tmp_path / "images" if place == "root" else tmp_path, "a.png")
    image = str(tmp_path / "a.png") if place == "absolute" else "a.png"
    config = write_row(tmp_path / ("rows.jsonl" if kind == "messages" else "rows.json"), kind, image)
    config.media_root = str(tmp_path / "images") if has_root else ""
    found = open_source("it", config, Split.train, str(tmp_path / "cache")).example(0)
    assert Path(found.messages[0]["content"][0]["image"]).is_file()


@pytest.mark.parametrize("kind", ["messages", "llava_json"])
def test_missing_image_names_what_was_tried(tmp_path: Path, kind: str) -> None:
    config = write_row(tmp_path / ("rows.jsonl" if kind == "messages" else "rows.json"), kind, "gone.png")
    config.media_root = str(tmp_path / "images")
    with refused("gone.png", "images/gone.png", "data.media_root", error=BadItem):
        open_source("it", config, Split.train, str(tmp_path / "cache")).example(0)


def test_roots_are_the_media_roots_of_the_sources(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    rows = tmp_path / "link" / "rows.jsonl"
    sources = {"a": SourceConfig(kind="messages", path=str(rows)), "b": SourceConfig(kind="pocket")}
    assert MediaPolicy.of(DataConfig(sources=sources), Split.train, Images.inline).roots == (tmp_path,)
    sources["c"] = SourceConfig(kind="messages", path=str(rows), media_root="/photos")
    assert MediaPolicy.of(DataConfig(sources=sources), Split.train, Images.inline).roots == (tmp_path, Path("/photos"))
