"""Loss masks counted by hand, one token per byte, in the templates the two families publish."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.data_helpers import LLAVA_TEMPLATE, make_processor, picture, says, user
from support.messages import refused

from data_prep.chat import build_example, visual_mask
from data_prep.config import OnLong
from data_prep.conversation import BadItem, BadTemplate, Conversation, TooLong
from sage.inputs.processing import Processor

QWEN, LLAVA = "qwen2_5_vl", "llava_onevision"
# Qwen2.5-VL: <|im_start|>system\nBe kind.<|im_end|>\n is 1+6+1+8+1+1 = 18, <|im_start|>user\n 6, a picture 1+4+1 = 6,
# <|im_end|>\n 2, <|im_start|>assistant\n 11. LLaVA-OneVision: <|im_start|>user and a blank 6, a single picture 4+6 = 10,
# one of several 5, a text's line break 1, <|im_end|> 1, <|im_start|>assistant\n 11.
# Runs are [not supervised, supervised, ...].
SYSTEM = {"role": "system", "content": "Ok"}
CASES: dict[str, tuple[list[dict[str, Any]], list[int], list[int], list[str]]] = {
    "single_turn": (
        [user(picture(), "Hi?"), says("Yes.")],
        [18 + 6 + 6 + 3 + 2 + 11, 5],
        [6 + 10 + 1 + 3 + 1 + 11, 5],
        ["Yes."],
    ),
    "multi_turn": (
        [user("Hi?"), says("Yes."), user("No"), says("ab")],
        [18 + 6 + 3 + 2 + 11, 5, 1 + 6 + 2 + 2 + 11, 3],
        [6 + 1 + 3 + 1 + 11, 5, 6 + 1 + 2 + 1 + 11, 3],
        ["Yes.", "ab"],
    ),
    "picture_in_second_turn": (
        [user("Hi?"), says("Yes."), user("No", picture()), says("ab")],
        [18 + 6 + 3 + 2 + 11, 5, 1 + 6 + 2 + 6 + 2 + 11, 3],
        [6 + 1 + 3 + 1 + 11, 5, 6 + 10 + 1 + 2 + 1 + 11, 3],
        ["Yes.", "ab"],
    ),
    "two_pictures": (
        [user(picture(), picture(colour="blue"), "Hi?"), says("Yes.")],
        [18 + 6 + 6 + 6 + 3 + 2 + 11, 5],
        [6 + 5 + 5 + 1 + 3 + 1 + 11, 5],
        ["Yes."],
    ),
    "video": (
        [user([picture(), picture()], "Hi?"), says("Yes.")],
        [18 + 6 + 6 + 3 + 2 + 11, 5],
        [6 + 3 + 1 + 3 + 1 + 11, 5],
        ["Yes."],
    ),
    "system_prompt": (
        [SYSTEM, user("Hi?"), says("Yes.")],
        [8 + 2 + 2 + 6 + 3 + 2 + 11, 5],
        [8 + 1 + 2 + 1 + 6 + 1 + 3 + 1 + 11, 5],
        ["Yes."],
    ),
    "empty_answer": ([user("Hi?"), says("")], [18 + 6 + 3 + 2 + 11, 1], [6 + 1 + 3 + 1 + 11, 1], [""]),
    "markers_as_text": (
        [user("<|im_end|>"), says("a<|im_end|>\n<|im_start|>user\nb<image>")],
        [18 + 6 + 10 + 2 + 11, 1 + 10 + 1 + 12 + 4 + 1 + 1 + 7 + 1],
        [6 + 1 + 10 + 1 + 11, 1 + 10 + 1 + 12 + 4 + 1 + 1 + 7 + 1],
        ["a<|im_end|>\n<|im_start|>user\nb<image>"],
    ),
    "blanks_around_answer": (
        [user("Hi?"), says("\n Yes. ")],
        [18 + 6 + 3 + 2 + 11, 8],
        [6 + 1 + 3 + 1 + 11, 8],
        ["\n Yes. "],
    ),
}


def runs(mask: torch.Tensor) -> list[int]:
    """Lengths of the runs of equal values."""
    return torch.unique_consecutive(mask, return_counts=True)[1].tolist()


def answers(example: dict[str, Any], processor: Processor) -> list[str]:
    """The text of each supervised run, without the token that ends it."""
    pieces = torch.split(example["input_ids"], runs(example["loss_mask"]))[1::2]
    assert all(piece[-1] == processor.tokenizer.eos_token_id for piece in pieces)
    return [processor.tokenizer.decode(piece[:-1]) for piece in pieces]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("family", [QWEN, LLAVA])
def test_mask_counted_by_hand(family: str, name: str) -> None:
    messages, qwen, llava, said = CASES[name]
    processor = make_processor(family)
    example = build_example(Conversation("c", messages), processor)
    assert not example["loss_mask"][0]
    assert runs(example["loss_mask"]) == (qwen if family == QWEN else llava)
    assert answers(example, processor) == said


@pytest.mark.parametrize("family", [QWEN, LLAVA])
def test_prompt_part_is_what_generation_sees(family: str) -> None:
    """Ids up to the answer equal the ids of the prompt that inference prepares, picture tokens and pixels included."""
    messages = [user(picture(), "Hi?"), says("Yes."), user(picture(colour="blue"), "No"), says("ab")]
    processor = make_processor(family)
    for count in (1, 3):
        example = build_example(Conversation("c", messages[: count + 1]), processor)
        prompt = processor.prepare(messages[:count])
        length = len(example["input_ids"]) - runs(example["loss_mask"])[-1]
        ids = prompt["input_ids"][0]
        if family == QWEN or count == 1:  # a finished LLaVA turn has a blank that its prompt has not
            assert torch.equal(example["input_ids"][:length], ids)
        else:
            assert processor.tokenizer.decode(example["input_ids"][:length]).split() == (
                processor.tokenizer.decode(ids).split()
            )
        assert torch.equal(example["pixel_values"], prompt["pixel_values"])


@pytest.mark.parametrize("family", [QWEN, LLAVA])
@pytest.mark.parametrize("times", [{}, {"fps": 4.0}, {"start": 1.0, "end": 2.5}, {"start": 0.5, "fps": 3.0}, {"end": None}])
def test_clips_are_to_training_what_they_are_to_inference(family: str, times: dict[str, Any], tmp_path: Path) -> None:
    """The same frames at the same rate, of frames, a folder and a file, two clips in one conversation."""
    frames = [picture(16, colour) for colour in ("red", "green", "blue", "yellow", "black", "white", "gray", "pink")]
    for i, frame in enumerate(frames):
        frame.save(tmp_path / f"{i}.png")
    frames[0].save(tmp_path.with_suffix(".gif"), save_all=True, append_images=frames[1:], duration=500)
    processor = make_processor(family)
    for source in (frames, str(tmp_path), str(tmp_path.with_suffix(".gif"))):
        asked = user("What?")
        asked["content"] = [{"type": "video", "video": source, **times}] * 2 + asked["content"]
        example = build_example(Conversation("c", [asked, says("a")]), processor)
        prompt = processor.prepare([asked])
        assert "pixel_values_videos" in prompt
        for key in set(processor.family.pixel_keys) & prompt.keys():
            assert torch.equal(example[key], prompt[key]), key


def test_clip_of_frames_that_are_all_used_is_at_two_frames_per_second() -> None:
    """The pocket's clips: four frames that say nothing of a rate."""
    frames = [picture(16, colour) for colour in ("red", "green", "blue", "yellow")]
    processor = make_processor(QWEN)
    example = build_example(Conversation("c", [user(frames, "Hi?"), says("a")]), processor)
    assert torch.equal(example["second_per_grid_ts"], torch.ones(1))
    stills = processor.image_processor(images=frames, return_tensors="pt")["pixel_values"].view(2, 2, 16, 3, 2, 16)
    assert torch.equal(example["pixel_values_videos"].view(2, 16, 3, 2, 16), stills[..., 0, :].permute(0, 2, 3, 1, 4))
    half = build_example(Conversation("c", [user(frames, "Hi?"), says("a")]), processor, num_frames=2)
    assert half["second_per_grid_ts"].tolist() == [2.0]


def test_training_does_not_fetch_pictures() -> None:
    shown: dict[str, Any] = user("Hi?")
    shown["content"].insert(0, {"type": "image", "image": "https://example.com/a.png"})
    with refused("https://example.com/a.png", "download", error=BadItem):
        build_example(Conversation("c", [shown, says("a")]), make_processor(QWEN))


def test_answer_may_quote_what_a_user_may_not() -> None:
    processor = make_processor(LLAVA)
    example = build_example(Conversation("c", [user(picture(), "Hi?"), says("<image>")]), processor)
    assert int(visual_mask(example, processor).sum()) == 10
    with refused("data.json: item 7 (id c): message 0:", "<image>", error=BadItem):
        build_example(Conversation("c", [user("<image> hi"), says("a")], "data.json", meta={"index": 7}), processor)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (("part.text", "part.text | upper"), "rewrites"),
        (("'<|im_end|>'", "'<|endoftext|>'"), "does not end each answer with '<|im_end|>'"),
        (("assistant\\n", "assistant\\n<think>"), "prompt"),
    ],
)
def test_template_that_cannot_be_masked_is_an_error(change: tuple[str, str], fault: str) -> None:
    processor = make_processor(LLAVA)
    processor.chat_template = LLAVA_TEMPLATE.replace(*change)
    with refused("target: its chat template", fault, error=BadTemplate):
        build_example(Conversation("c", [user("Hi?"), says("yes")]), processor)


@pytest.mark.parametrize(("value", "share"), [(False, "no"), (True, "every")])
def test_mask_of_none_or_all_is_an_error(value: bool, share: str, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = make_processor(QWEN)
    encode = processor.encode

    def broken(*args: Any) -> dict[str, Any]:
        example = encode(*args)
        return example | {"loss_mask": torch.full_like(example["loss_mask"], value)}

    monkeypatch.setattr(processor, "encode", broken)
    with refused("pocket: item 3 (id me)", "loss mask", share, error=BadItem):
        build_example(Conversation("me", [user("Hi?"), says("a")], "pocket", meta={"index": 3}), processor)


MULTI = [user(picture(), "Hi?"), says("Yes."), user(picture(colour="blue"), "No"), says("ab")]


@pytest.mark.parametrize("family", [QWEN, LLAVA])
def test_long_example_keeps_whole_turns(family: str) -> None:
    processor = make_processor(family)
    whole = build_example(Conversation("c", MULTI), processor)
    first = build_example(Conversation("c", MULTI[:2]), processor)
    for limit in range(len(first["input_ids"]), len(whole["input_ids"])):
        short = build_example(Conversation("c", MULTI), processor, limit)
        assert {key: str(value) for key, value in short.items()} == {key: str(value) for key, value in first.items()}
    exact = build_example(Conversation("c", MULTI), processor, len(whole["input_ids"]))
    assert torch.equal(exact["input_ids"], whole["input_ids"])


def test_long_example_that_cannot_be_shortened_is_dropped() -> None:
    processor = make_processor(QWEN)
    with refused("item 4 (id c)", "data.max_length=50", "data.on_long=turn", "51 tokens", error=TooLong):
        build_example(Conversation("c", MULTI[:2], meta={"index": 4}), processor, 50)
    with refused("data.on_long=drop", error=TooLong):
        build_example(Conversation("c", MULTI), processor, 60, OnLong.drop)


def test_cut_shortens_the_answer_and_never_a_picture() -> None:
    processor = make_processor(QWEN)
    whole = build_example(Conversation("c", MULTI[:2]), processor)
    cut = build_example(Conversation("c", MULTI), processor, 49, OnLong.cut)
    assert torch.equal(cut["input_ids"], whole["input_ids"][:49])
    assert torch.equal(cut["loss_mask"], whole["loss_mask"][:49])
    assert len(cut["mm_token_type_ids"]) == 49
    assert torch.equal(cut["pixel_values"], whole["pixel_values"])
    with pytest.raises(TooLong):  # the answer starts at 46: nothing supervised would be left
        build_example(Conversation("c", MULTI), processor, 46, OnLong.cut)
