"""Every kind of source from a fixture in its published layout; wrong paths and formats."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from support.data_helpers import (
    assistant,
    make_image,
    make_processor,
    png,
    save_images,
    save_onevision,
    share_turns,
    user,
)
from support.messages import refused

from data_prep.build import build_dataset
from data_prep.config import DataConfig, check_paths
from data_prep.conversation import BadItem, Conversation
from data_prep.sources import KINDS, SourceConfig, check_path
from data_prep.sources.base import Split, as_prompt, open_source


def llava_json(folder: Path) -> SourceConfig:
    save_images(folder / "images", "coco/a.jpg", "gqa/b.png")
    rows = [
        {"id": "000", "image": "coco/a.jpg", "conversations": share_turns("<image>\nWhat?", "Red — ä.", "Sure?", "Yes.")},
        {"id": "001", "image": ["coco/a.jpg", "gqa/b.png"], "conversations": share_turns("<image>\n<image>\nBoth?", "Two.")},
        {"id": "002", "conversations": share_turns("Only text?", "Yes.")},
    ]
    (folder / "mix.json").write_text(json.dumps(rows, ensure_ascii=False, indent=1), encoding="utf-8")
    return SourceConfig(kind="llava_json", path=str(folder / "mix.json"), media_root=str(folder / "images"))


def messages(folder: Path) -> SourceConfig:
    save_images(folder, "a.png", "frames/1.png", "frames/2.png")
    question = {"type": "text", "text": "What?"}
    answer = {"role": "assistant", "content": "Red."}
    media: list[dict[str, Any]] = [
        {"type": "image", "image": "a.png"},
        {"type": "image_url", "image_url": {"url": "a.png"}},
        {"type": "image", "path": "a.png"},
        {"type": "video", "video": "frames", "start": None, "end": None},
        {"type": "video", "video": ["frames/1.png", "frames/2.png"], "fps": 1},
    ]
    rows: list[dict[str, Any]] = [{"messages": [{"role": "user", "content": [part, question]}, answer]} for part in media]
    rows.append({"messages": [{"role": "user", "content": [{"type": "image"}, question]}, answer], "images": ["a.png"]})
    rows.append({"messages": [{"role": "user", "content": "<image>What?"}, answer], "images": ["a.png"]})
    (folder / "chat.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return SourceConfig(kind="messages", path=str(folder / "chat.jsonl"))


def llava_onevision(folder: Path) -> SourceConfig:
    save_onevision(
        folder / "subset" / "train-00000-of-00001.parquet",
        id=["a", "b", "c"],
        image=[{"bytes": png(), "path": None}, {"bytes": png("blue"), "path": "b.png"}, None],
        conversations=[share_turns("<image>\nWhat?", "Red."), share_turns("What?", "Blue."), share_turns("Text?", "Yes.")],
        data_source=["ai2d", "ai2d", "text"],
    )
    return SourceConfig(kind="llava_onevision", path=str(folder / "subset"))


def hub(folder: Path) -> SourceConfig:
    table = {"q": ["What?", "Which <image> one?"], "a": [["Red.", "red"], ["Blue."]], "pics": [[png()], [png("blue")]]}
    features = datasets.Features(
        {"q": datasets.Value("string"), "a": datasets.List(datasets.Value("string")), "pics": datasets.List(datasets.Image())}
    )
    table["pics"] = [[{"bytes": data, "path": None} for data in row] for row in table["pics"]]
    datasets.Dataset.from_dict(table, features).save_to_disk(folder / "disk")
    return SourceConfig(kind="hub", path=str(folder / "disk"), columns={"question": "q", "answer": "a", "images": "pics"})


def opened(config: SourceConfig, cache: Path) -> list[Conversation]:
    source = open_source("it", config, Split.train, str(cache))
    return [source.example(i) for i in range(len(source))]


def test_llava_rows(tmp_path: Path) -> None:
    found = opened(llava_json(tmp_path), tmp_path / "cache")
    root = f"{tmp_path}/images"
    assert found[0].id == "000"
    assert found[0].messages == [user("What?") | {"content": [
        {"type": "image", "image": f"{root}/coco/a.jpg"}, {"type": "text", "text": "What?"}]},
        assistant("Red — ä."), user("Sure?"), assistant("Yes.")]  # fmt: skip
    assert [part["type"] for part in found[1].messages[0]["content"]] == ["image", "image", "text"]
    assert found[2].messages == [user("Only text?"), assistant("Yes.")]


def test_message_rows(tmp_path: Path) -> None:
    found = opened(messages(tmp_path), tmp_path / "cache")
    media = [item.messages[0]["content"][0] for item in found]
    assert [part.get("image") for part in media[:3] + media[5:]] == [f"{tmp_path}/a.png"] * 5
    assert media[3] == {"type": "video", "video": f"{tmp_path}/frames"}
    assert media[4] == {"type": "video", "video": [f"{tmp_path}/frames/1.png", f"{tmp_path}/frames/2.png"], "fps": 1.0}
    assert all(item.messages[0]["content"][1:] == [{"type": "text", "text": "What?"}] for item in found)


def test_table_rows(tmp_path: Path) -> None:
    found = opened(llava_onevision(tmp_path), tmp_path / "cache")
    assert [(item.id, item.family) for item in found] == [("a", "ai2d"), ("b", "ai2d"), ("c", "text")]
    assert found[0].messages[0]["content"][0]["image"] == png()
    assert [part["type"] for part in found[1].messages[0]["content"]] == ["image", "text"]  # added without a placeholder
    assert found[2].messages[0]["content"] == [{"type": "text", "text": "Text?"}]
    (tmp_path / "hub").mkdir()
    mapped = opened(hub(tmp_path / "hub"), tmp_path / "cache")
    assert [part.get("text", "") for part in mapped[1].messages[0]["content"]] == ["Which ", "", " one?"]
    assert mapped[0].messages[1] == assistant("Red.")


def test_folder_rows(tmp_path: Path) -> None:
    """An image, a video as a folder of frames and one as a file, each with its text."""
    save_images(tmp_path, "cat.png", "clip_1/1.png", "clip_1/2.png")
    make_image().save(tmp_path / "clip_2.gif", save_all=True, append_images=[make_image(16, "blue")])
    for name in ("cat", "clip_1", "clip_2"):
        (tmp_path / f"{name}.txt").write_text(f"A {name}.\n")
    source = SourceConfig(kind="folder", path=str(tmp_path), prompt="Say what it is.")
    config = DataConfig(sources={"it": source}, holdout=0.0, cache_dir=str(tmp_path / "cache"), num_frames=2)
    dataset = build_dataset(config, make_processor("qwen2_5_vl"))
    found = [dataset.conversation(i).messages for i in range(3)]
    assert [question["content"][0]["type"] for question, _ in found] == ["image", "video", "video"]
    assert [answer for _, answer in found] == [assistant(f"A {name}.") for name in ("cat", "clip_1", "clip_2")]
    assert all("Say what it is." in str(question) and dataset[i] for i, (question, _) in enumerate(found))


def test_unknown_columns_are_refused(tmp_path: Path) -> None:
    config = hub(tmp_path)
    config.columns["question"] = "query"
    with refused("'query'", "q, a, pics", error=BadItem):
        opened(config, tmp_path / "cache")
    config.columns["colour"] = "q"
    with refused("data.sources.it.columns", "'colour'", "id, family"):
        opened(config, tmp_path / "cache")


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ({"id": "x"}, ["(id x):", "keys of the row: id", "'messages'"]),
        ({"conversations": [{"from": "human"}]}, ["message 0", "{from, value}"]),
        ({"messages": [user("What?"), assistant("a")], "images": ["a.png"]}, ["1 image(s)"]),
    ],
)
def test_rows_of_another_layout(row: Any, parts: list[str], tmp_path: Path) -> None:
    path = tmp_path / "mix.json"
    save_images(tmp_path, "a.png")
    path.write_text(json.dumps([{"conversations": share_turns("a", "b")}, row]))
    source = open_source("it", SourceConfig(kind="llava_json", path=str(path)), Split.train, str(tmp_path / "cache"))
    assert source.example(0).messages[1] == assistant("b")
    with refused(f"{path}: item 1", *parts, error=BadItem):
        source.example(1)


def test_file_that_is_not_an_array_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mix.json"
    config = SourceConfig(kind="llava_json", path=str(path))
    with refused("mix.json", "data.path"):
        opened(config, tmp_path / "cache")
    faults = {'[{"a": 1},\n{"b": 2': "line 2, after 1", '[{"a": 1} {"b": 2}]': "',' or ']'", "[": "line 1, after 0"}
    for text, part in faults.items():
        path.write_text(text)
        with refused("mix.json", "JSON array", part):
            opened(config, tmp_path / "cache")


def test_positions_of_rows_are_cached(tmp_path: Path) -> None:
    """Escapes, nested brackets and characters of several bytes do not shift the rows; a changed file is read again."""
    path = tmp_path / "mix.json"
    config = SourceConfig(kind="llava_json", path=str(path))
    for answer in ('}],[{"', "ä€\\u00e4\\\\", "plain"):
        rows = [{"conversations": share_turns("q", answer)}, {"conversations": share_turns("q", "last")}]
        path.write_text(" \n" + json.dumps(rows, ensure_ascii=False, indent=2), encoding="utf-8")
        for _ in range(2):
            assert [item.messages[1] for item in opened(config, tmp_path / "cache")] == [assistant(answer), assistant("last")]
    assert len(list((tmp_path / "cache" / "rows").glob("*.npy"))) == 3


def test_missing_path_is_refused_with_its_key() -> None:
    for kind in sorted(set(KINDS) - {"pocket"}):
        with refused("data.sources.it.path", "data.path"):
            open_source("it", SourceConfig(kind=kind), Split.train)
    with refused("data.sources.it.families", "'sonnets'", "caption"):
        open_source("it", SourceConfig(families=["sonnets"]), Split.train)


CHAT = {"messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "Red."}]}
LLAVA = {"image": "a.png", "conversations": [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "Red."}]}


def put(path: Path, content: object) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return str(path)


WRONG: dict[str, tuple[str, Callable[[Path], str], tuple[str, ...]]] = {  # kind, makes the path, parts of the message
    "missing": ("messages", lambda at: str(at / "chat.jsonl"), ("chat.jsonl: no such file", "data.path")),
    "misspelt": ("messages", lambda at: put(at / "chats.jsonl", CHAT)[:-7] + ".jsonl", ("did you mean", "chats.jsonl")),
    "missing table": ("hub", lambda at: str(at / "t.parquet"), ("t.parquet: no such file",)),
    "no file of the pattern": ("auto", lambda at: str(at / "*.jsonl"), ("no file of this pattern",)),
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
    source = SourceConfig(kind="hub", path="owner/name", media_root=str(tmp_path / "nowhere"))
    with refused("data.media_root", "nowhere"):
        check_paths(DataConfig(sources={"it": source}))


def test_source_without_valid_rows_is_refused(tmp_path: Path) -> None:
    source = SourceConfig(kind="messages", path=put(tmp_path / "r.json", [{"text": "What?", "label": 1}] * 3))
    config = DataConfig(sources={"it": source}, cache_dir=str(tmp_path / "cache"))
    with refused("r.json: item 0", "text, label", "all of the first 3 items", error=BadItem) as caught:
        build_dataset(config, make_processor("qwen2_5_vl"))
    assert "on_bad" not in str(caught.value)  # skipping all of them does not help


def test_folders_of_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without texts, which gives prompts only, with texts of other names, and with the images one folder further down."""
    save_images(tmp_path / "d", "a.png", "images/a.png", "images/b.png")
    (tmp_path / "d" / "cat.txt").write_text("A cat.")
    source = open_source("it", SourceConfig(kind="folder", path=str(tmp_path / "d")), Split.train)
    assert as_prompt(source.conversation(0)).messages[0]["content"][1]["text"] == "Describe it in detail."
    with refused("a.png", "a.txt", error=BadItem):
        source.example(0)
    with refused("images.txt", "data.path=", "separate images", error=BadItem):
        source.example(1)
    assert "cat.txt" in caplog.text
    (tmp_path / "d" / "a.txt").write_bytes(b"R\xe4d")
    with refused("a.txt: not UTF-8", error=BadItem):
        source.example(0)
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
