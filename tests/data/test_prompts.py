"""Held-out prompts: benchmark layouts, long answers, follow-up questions, and splits that share no image."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
from support.data_helpers import make_image, make_processor, save_images, user
from support.messages import refused

from data_prep.build import build_dataset, prompts
from data_prep.config import DataConfig, OnBad
from data_prep.conversation import BadItem, Conversation, Message, expand_follow_ups
from data_prep.sources import SourceConfig
from data_prep.sources.base import Split, split_group
from data_prep.sources.prompt_sets import EXPLAIN, ONE_LETTER, ONE_WORD
from sage.inputs.messages import text_of

CHOICES = {f"choice_{letter}": word for letter, word in zip("abcd", ("One", "Two", "Three", "Four"), strict=True)}
SEED: dict[str, Any] = {"question": "How many?", "answer": "A", "question_type_id": 5, **CHOICES}
CLIP = {"video": "ep1", "question": "What next?", "candidates": ["Runs.", "Sits."], "answer": "Sits."}
# kind -> images, file, content; question, answer, family of the first row
LAYOUTS: dict[str, tuple[tuple[str, ...], str, Any, str, str, str]] = {
    "textvqa": (("train_images/0054.jpg",), "TextVQA_0.5.1_val.json",
                {"data": [{"question": "what brand?", "image_id": "0054", "answers": ["a", "b", "b"], "question_id": 34602}]},
                f"what brand?\n{ONE_WORD}", "b", "text_vqa"),
    "gqa": (("images/2405722.jpg",), "val_balanced_questions.json",
            {"05451384": {"imageId": "2405722", "question": "Is it red?", "answer": "yes", "fullAnswer": "Yes, it is."}},
            f"Is it red?\n{ONE_WORD}", "yes", "general_vqa"),
    "chartqa": (("png/4169.png",), "test_human.json", [{"imgname": "4169.png", "query": "How many bars?", "label": "14"}],
                f"How many bars?\n{ONE_WORD}", "14", "chart_vqa"),
    "seed_bench": (("SEED-Bench-image/1454426_2591111986", "videos/12/1.png", "videos/12/2.png", "videos/12/3.png"),
                   "SEED-Bench.json",
                   {"questions": [{"data_id": "1454426_2591111986", "data_type": "image", "question_id": "101669", **SEED},
                                  {"data_id": "12", "data_type": "video", "question_id": "2", "segment": [0.5, 1.0], **SEED}]},
                   f"How many?\nA. One\nB. Two\nC. Three\nD. Four\n{ONE_LETTER}", "A", "image"),
    "mvbench": (("video/tvqa/ep1/1.png", "video/tvqa/ep1/2.png"), "json/action.json", [CLIP, CLIP | {"start": 0.0, "end": 0.3}],
                f"What next?\nA. Runs.\nB. Sits.\n{ONE_LETTER}", "B", "video_choice"),
    "video_detail_caption": (("Test_Videos/v_1/1.png",), "data/test-00000-of-00001.parquet",
                             {"video_name": "v_1", "question": "Describe the video in detail.", "answer": "A man."},
                             "Describe the video in detail.", "A man.", "video_caption"),
    "mmspec": (("images/mmspec_001.jpg",), "mmspec.jsonl",
               {"id": "mmspec_001", "image": "mmspec_001.jpg", "turns": ["What is it?", "Why?"], "topic": "general vqa"},
               "What is it?", "", "general vqa"),
}  # fmt: skip


def made(kind: str, folder: Path) -> Path:
    """Writes images and annotations of a benchmark; returns the file of the latter."""
    images, name, content, *_ = LAYOUTS[kind]
    for image in images:
        (folder / image).parent.mkdir(parents=True, exist_ok=True)
        make_image().save(folder / image, "PNG")
    if not name.endswith(".parquet"):
        return write(folder / name, content)
    (folder / name).parent.mkdir()
    datasets.Dataset.from_list([content]).to_parquet(folder / name)
    return folder / name


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("kind", LAYOUTS)
def test_layout(kind: str, tmp_path: Path) -> None:
    *_, question, answer, family = LAYOUTS[kind]
    source = SourceConfig(kind=kind, path=str(made(kind, tmp_path)), media_root=str(tmp_path))
    config = DataConfig(validation={"it": source}, cache_dir=str(tmp_path / "cache"))
    found = prompts(config, "validation", 8)
    assert found[0].messages[-1]["content"][-1]["text"] == question
    assert found[0].meta.get("answer", "") == answer
    assert found[0].family == family
    processor = make_processor("qwen2_5_vl")
    for prompt in found:
        inputs = processor.prepare(prompt.messages)
        assert len(inputs["image_grid_thw"] if "image_grid_thw" in inputs else inputs["video_grid_thw"]) == 1
    if kind in ("seed_bench", "mvbench"):  # the second row is a segment of a video
        video = found[1].messages[0]["content"][0]
        assert video["video"] == str(tmp_path / ("videos/12" if kind == "seed_bench" else "video/tvqa/ep1"))
        assert (video["start"], video["end"]) == ((0.5, 1.0) if kind == "seed_bench" else (0.0, 0.3))
    source.long_answers = True
    text = prompts(config)[0].messages[-1]["content"][-1]["text"]
    assert text == "\n".join([line for line in question.split("\n") if line not in (ONE_WORD, ONE_LETTER)] + [EXPLAIN])


@pytest.mark.parametrize("kind", ["textvqa", "chartqa", "seed_bench"])
def test_parquet_versions_have_embedded_images(kind: str, tmp_path: Path) -> None:
    _, _, content, question, answer, _ = copy.deepcopy(LAYOUTS[kind])
    row = content[0] if isinstance(content, list) else (content.get("data") or content["questions"])[0]
    make_image().save(tmp_path / "a.png")
    row["image"] = {"bytes": (tmp_path / "a.png").read_bytes(), "path": None}
    if kind == "chartqa":
        row["label"] = [row["label"]]
    path = tmp_path / "test-0.parquet"
    datasets.Dataset.from_list([row]).to_parquet(path)
    config = DataConfig(validation={"it": SourceConfig(kind=kind, path=str(path))}, cache_dir=str(tmp_path / "cache"))
    (found,) = prompts(config)
    assert found.messages[0]["content"][0] == {"type": "image", "image": row["image"]["bytes"]}
    assert found.messages[0]["content"][1]["text"] == question
    assert found.meta["answer"] == answer
    with refused("x.json", "'val'"):
        source = SourceConfig(kind=kind, path=str(write(tmp_path / "x.json", [])), split="val")
        prompts(DataConfig(validation={"it": source}))


def test_file_of_another_layout_is_refused(tmp_path: Path) -> None:
    path = made("chartqa", tmp_path)
    config = DataConfig(validation={"it": SourceConfig(kind="textvqa", path=str(path))}, cache_dir=str(tmp_path))
    with refused("test_human.json"):
        prompts(config)
    config.validation["it"].kind = "mvbench"
    with refused("test_human.json: item 0:", "'question'", error=BadItem):
        prompts(config)


def test_follow_ups_come_after_the_targets_own_answers(tmp_path: Path) -> None:
    source = SourceConfig(kind="mmspec", path=str(made("mmspec", tmp_path)), media_root=str(tmp_path), long_answers=True)
    (found,) = prompts(DataConfig(validation={"it": source}, cache_dir=str(tmp_path / "cache")))
    lengths: list[int] = []

    def answer(messages: list[Message]) -> str:
        lengths.append(len(messages))
        return "A dog."

    first, second, other = expand_follow_ups([found, "no conversation"], answer)
    assert (first, other, lengths) == (found, "no conversation", [1])
    assert (second.id, second.family) == ("mmspec_001-turn-2", "general vqa")
    assert [text_of(message) for message in second.messages] == [f"What is it?\n{EXPLAIN}", "A dog.", f"Why?\n{EXPLAIN}"]
    assert second.messages[0]["content"][0]["type"] == "image"
    assert list(expand_follow_ups([second], answer)) == [second]
    assert "input_ids" in make_processor("llava_onevision").prepare(second.messages)


def test_held_out_items_share_no_image_with_training(tmp_path: Path) -> None:
    save_images(tmp_path, *(f"{i}.png" for i in range(40)))
    turns = [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "Red."}]
    rows = [{"id": f"{i}-{j}", "image": f"{i}.png", "conversations": turns} for j in range(2) for i in range(40)]
    path = write(tmp_path / "rows.json", rows)
    source = SourceConfig(kind="llava_json", path=str(path))
    config = DataConfig(sources={"it": source}, holdout=0.2, test_holdout=0.2, cache_dir=str(tmp_path / "cache"))
    processor = make_processor("qwen2_5_vl")
    images = []
    for split in Split:
        dataset = build_dataset(config, processor, str(split))
        images.append({dataset.conversation(i).messages[0]["content"][0]["image"] for i in range(len(dataset))})
        assert len(dataset) == 2 * len(images[-1])  # both questions about an image are in the same split
    assert sum(map(len, images)) == len(set.union(*images)) == 40
    held_out = prompts(config, "validation", 100)
    assert {item.messages[0]["content"][0]["image"] for item in held_out} == images[1]
    assert len(build_dataset(replace(config, holdout=0.0, test_holdout=0.0), processor)) == 80
    embedded = [Conversation(name, [user(b"png")]) for name in ("a", "b")]
    assert split_group(embedded[0]) == split_group(embedded[1])


@pytest.mark.parametrize("streaming", [False, True])
def test_training_items_are_refused_as_prompts(tmp_path: Path, streaming: bool) -> None:
    datasets.Dataset.from_dict({"question": ["q"], "answer": ["a"]}).to_parquet(tmp_path / "t.parquet")
    source = SourceConfig(kind="hub", path=str(tmp_path / "t.parquet"), streaming=streaming)
    config = DataConfig(sources={"it": source}, holdout=0.0, cache_dir=str(tmp_path / "cache"))
    with refused("data.holdout: 0.0", "source it", "data/validation=NAME"):
        prompts(config)
    assert len(prompts(replace(config, validation={"it": source}))) == 1
    pocket = {"a": SourceConfig(), "b": SourceConfig(families=["clip"])}  # has splits of its own
    found = prompts(DataConfig(sources=pocket, holdout=0.0), "validation", 5)
    assert [item.id for item in found] == ["validation-0", "validation-0", "validation-1", "validation-1", "validation-2"]
    assert [item.family for item in found[1::2]] == ["clip", "clip"]


@pytest.mark.parametrize(("number", "expected"), [(2, 1), (24, 4), (300, 16)])
def test_small_data_hold_out_enough_prompts(tmp_path: Path, number: int, expected: int) -> None:
    """At most a fifth, and the same ones in any order of the rows."""
    path = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path.write_text("".join(json.dumps({"id": f"row-{i}", "messages": turns}) + "\n" for i in range(number)))
    source = SourceConfig(kind="messages", path=str(path))
    config = DataConfig(sources={"it": source}, cache_dir=str(tmp_path / "cache"))
    processor = make_processor("qwen2_5_vl")
    dataset = build_dataset(config, processor)
    trained = {dataset.conversation(i).id for i in range(len(dataset))}
    held_out = {item.id for item in prompts(config, "validation", 100)}
    assert len(held_out) == expected
    assert held_out | trained == {f"row-{i}" for i in range(number)}
    assert not held_out & trained
    assert len(build_dataset(config, processor, "validation")) == len(held_out)
    with refused("data.test_holdout: 0.0", "source it"):
        build_dataset(config, processor, "test")
    path.write_text("".join(sorted(path.read_text().splitlines(keepends=True), reverse=True)))
    assert {item.id for item in prompts(config, "validation", 100)} == held_out


def test_invalid_prompts(tmp_path: Path) -> None:
    path = made("textvqa", tmp_path)
    rows = json.loads(path.read_text())
    rows["data"].insert(0, rows["data"][0] | {"image_id": "gone"})
    path.write_text(json.dumps(rows))
    config = DataConfig(validation={"it": SourceConfig(kind="textvqa", path=str(path))})
    with refused("item 0 (id 34602): image", "gone.jpg", error=BadItem):
        prompts(config)
    skipping = replace(config, on_bad=OnBad.skip, bad_list=str(tmp_path / "bad.jsonl"))
    assert [item.meta["index"] for item in prompts(skipping)] == [1]
    assert "gone.jpg" in (tmp_path / "bad.jsonl").read_text()
    rows["data"].pop()
    path.write_text(json.dumps(rows))
    with refused("data.validation", "split validation", "data.holdout"):
        prompts(skipping)
