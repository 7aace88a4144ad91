"""Where images are looked for; wrong paths and formats, refused in a line that names the path and what to give instead."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.data_helpers import make_processor, save_images
from support.messages import refused

from data_prep.build import build_dataset
from data_prep.config import DataConfig, check_paths
from data_prep.conversation import BadItem
from data_prep.sources import SourceConfig, check_path
from data_prep.sources.base import open_source
from data_prep.splits import Split

CHAT = {"messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "Red."}]}
LLAVA = {"image": "a.png", "conversations": [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "Red."}]}


def put(path: Path, content: object) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return str(path)


WRONG: dict[str, tuple[str, Callable[[Path], str], tuple[str, ...]]] = {  # kind, makes the path, parts of the message
    "missing": ("messages", lambda at: str(at / "chat.jsonl"), ("chat.jsonl: no such file", "data.path")),
    "misspelt": ("messages", lambda at: put(at / "chats.jsonl", CHAT)[:-7] + ".jsonl", ("did you mean", "chats.jsonl")),
    "missing folder": ("folder", lambda at: str(at / "no" / "such"), ("no folder", "no")),
    "missing table": ("hub", lambda at: str(at / "t.parquet"), ("t.parquet: no such file",)),
    "no file of the pattern": ("auto", lambda at: str(at / "*.jsonl"), ("no file of this pattern",)),
    "file for a folder": ("folder", lambda at: put(at / "r.jsonl", LLAVA), ("not a folder", "choose data=auto")),
    "image for a folder": ("folder", lambda at: put(at / "a.png", b"x"), ("not a folder", "give the folder")),
    "empty": ("messages", lambda at: put(at / "r.jsonl", b" \n"), ("empty",)),
    "zip": ("messages", lambda at: put(at / "r.zip", b"PK\3\4"), ("zip", "unpack")),
    "CSV": ("llava_json", lambda at: put(at / "r.csv", b"id,image\n1,a.png"), ("'id,image'",)),
    "one object": ("messages", lambda at: put(at / "r.json", b'{\n  "messages": []\n}'), ("several lines", "array")),
    "cut gzip": ("auto", lambda at: put(at / "r.jsonl.gz", b"\x1f\x8b\x08"), ("gzip",)),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_paths_are_refused(name: str, tmp_path: Path) -> None:
    kind, make, parts = WRONG[name]
    source = SourceConfig(kind=kind, path=make(tmp_path))
    with refused(str(tmp_path), *parts):
        check_paths(DataConfig(sources={"it": source}))
    with pytest.raises(ValueError, match=str(tmp_path)):
        open_source("it", source, Split.train, str(tmp_path / "cache"))


def test_what_may_be_on_the_hub_passes(tmp_path: Path) -> None:
    for kind in ("hub", "llava_onevision", "textvqa"):
        check_path(kind, "owner/name")
    with refused("data.media_root", "nowhere"):
        check_paths(
            DataConfig(sources={"it": SourceConfig(kind="hub", path="owner/name", media_root=str(tmp_path / "nowhere"))})
        )


def test_source_without_valid_rows_is_refused(tmp_path: Path) -> None:
    source = SourceConfig(kind="messages", path=put(tmp_path / "r.json", [{"text": "What?", "label": 1}] * 3))
    config = DataConfig(sources={"it": source}, cache_dir=str(tmp_path / "cache"))
    with refused("r.json: item 0", "text, label", "all of the first 3 items", error=BadItem) as caught:
        build_dataset(config, make_processor("qwen2_5_vl"))
    assert "on_bad" not in str(caught.value)  # skipping all of them does not help


def test_folders_of_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without texts, with texts of other names, and with the images one folder further down."""
    save_images(tmp_path / "d", "images/a.png", "images/b.png")
    (tmp_path / "d" / "cat.txt").write_text("A cat.")
    source = SourceConfig(kind="folder", path=str(tmp_path / "d"))
    with refused("images.txt", "data.path=", "separate images", error=BadItem):
        open_source("it", source, Split.train).example(0)
    assert "cat.txt" in caplog.text
    put(tmp_path / "rows" / "r.jsonl", CHAT)
    with refused("no image", "data=auto", "rows"):
        open_source("it", SourceConfig(kind="folder", path=str(tmp_path / "rows")), Split.train)


@pytest.mark.parametrize(("place", "has_root"), [("file", False), ("file", True), ("root", True), ("absolute", True)])
def test_images_are_found(tmp_path: Path, place: str, has_root: bool) -> None:
    (tmp_path / "images").mkdir()
    save_images(tmp_path / "images" if place == "root" else tmp_path, "a.png")
    row = LLAVA | {"image": str(tmp_path / "a.png") if place == "absolute" else "a.png"}
    config = SourceConfig(kind="llava_json", path=put(tmp_path / "rows.json", [row]))
    config.media_root = str(tmp_path / "images") if has_root else ""
    example = open_source("it", config, Split.train, str(tmp_path / "cache")).example(0)
    assert Path(example.messages[0]["content"][0]["image"]).is_file()
