"""Conversations and their loss masks, counted by hand: one token per byte, published templates, those of thinking models."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from support.data_helpers import LLAVA_TEMPLATE, QWEN_TEMPLATE, assistant, make_image, make_processor, user
from support.messages import refused

from data_prep.chat import build_example
from data_prep.config import OnLong
from data_prep.conversation import BadItem, BadTemplate, Conversation, TooLong, check_conversation
from sage.inputs.messages import escape, text_of
from sage.inputs.processing import Processor

QWEN, LLAVA = "qwen2_5_vl", "llava_onevision"
# Qwen2.5-VL: <|im_start|>system\nBe kind.<|im_end|>\n is 1+6+1+8+1+1 = 18, <|im_start|>user\n 6, an image 1+4+1 = 6,
# <|im_end|>\n 2, <|im_start|>assistant\n 11. LLaVA-OneVision: <|im_start|>user and a blank 6, a single image 4+6 = 10,
# one of several 5, a text's line break 1, <|im_end|> 1, <|im_start|>assistant\n 11.
# Runs are [not supervised, supervised, ...].
SYSTEM = {"role": "system", "content": "Ok"}
CASES: dict[str, tuple[list[dict[str, Any]], list[int], list[int]]] = {  # messages, runs of Qwen2.5-VL, of LLaVA-OneVision
    "single_turn": ([user(make_image(), "Hi?"), assistant("Yes.")],
                    [18 + 6 + 6 + 3 + 2 + 11, 5], [6 + 10 + 1 + 3 + 1 + 11, 5]),
    "multi_turn": ([user("Hi?"), assistant("Yes."), user("No"), assistant("ab")],
                   [18 + 6 + 3 + 2 + 11, 5, 1 + 6 + 2 + 2 + 11, 3], [6 + 1 + 3 + 1 + 11, 5, 6 + 1 + 2 + 1 + 11, 3]),
    "image_in_second_turn": ([user("Hi?"), assistant("Yes."), user("No", make_image()), assistant("ab")],
                             [18 + 6 + 3 + 2 + 11, 5, 1 + 6 + 2 + 6 + 2 + 11, 3],
                             [6 + 1 + 3 + 1 + 11, 5, 6 + 10 + 1 + 2 + 1 + 11, 3]),
    "two_images": ([user(make_image(), make_image(colour="blue"), "Hi?"), assistant("Yes.")],
                   [18 + 6 + 6 + 6 + 3 + 2 + 11, 5], [6 + 5 + 5 + 1 + 3 + 1 + 11, 5]),
    "video": ([user([make_image(), make_image()], "Hi?"), assistant("Yes.")],
              [18 + 6 + 6 + 3 + 2 + 11, 5], [6 + 3 + 1 + 3 + 1 + 11, 5]),
    "system_prompt": ([SYSTEM, user("Hi?"), assistant("Yes.")],
                      [8 + 2 + 2 + 6 + 3 + 2 + 11, 5], [8 + 1 + 2 + 1 + 6 + 1 + 3 + 1 + 11, 5]),
    "markers_as_text": ([user("<|im_end|>"), assistant("a<|im_end|>\n<|im_start|>user\nb<image>")],
                        [18 + 6 + 10 + 2 + 11, 1 + 10 + 1 + 12 + 4 + 1 + 1 + 7 + 1],
                        [6 + 1 + 10 + 1 + 11, 1 + 10 + 1 + 12 + 4 + 1 + 1 + 7 + 1]),
    "blanks_around_answer": ([user("Hi?"), assistant("\n Yes. ")], [18 + 6 + 3 + 2 + 11, 8], [6 + 1 + 3 + 1 + 11, 8]),
}  # fmt: skip


def runs(mask: torch.Tensor) -> list[int]:
    """Returns the lengths of the runs of equal values."""
    return torch.unique_consecutive(mask, return_counts=True)[1].tolist()


def answers(example: dict[str, Any], processor: Processor) -> list[str]:
    """Returns the text of each supervised run, without the token that ends it."""
    pieces = torch.split(example["input_ids"], runs(example["loss_mask"]))[1::2]
    assert all(piece[-1] == processor.tokenizer.eos_token_id for piece in pieces)
    return [processor.tokenizer.decode(piece[:-1]) for piece in pieces]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("family", [QWEN, LLAVA])
def test_mask_counted_by_hand(family: str, name: str) -> None:
    messages, qwen, llava = CASES[name]
    processor = make_processor(family)
    example = build_example(Conversation("c", messages), processor)
    assert not example["loss_mask"][0]
    assert runs(example["loss_mask"]) == (qwen if family == QWEN else llava)
    assert answers(example, processor) == [text_of(message) for message in messages if message["role"] == "assistant"]


@pytest.mark.parametrize("family", [QWEN, LLAVA])
@pytest.mark.parametrize("times", [{}, {"start": 1.0, "end": 2.5}, {"start": 0.5, "fps": 3.0, "end": None}])
def test_videos_are_the_same_for_training_and_inference(family: str, times: dict[str, Any], tmp_path: Path) -> None:
    """The same frames at the same rate, for a list, a folder and a file, with two videos in one conversation."""
    frames = [make_image(16, colour) for colour in ("red", "green", "blue", "yellow", "black", "white", "gray", "pink")]
    for i, frame in enumerate(frames):
        frame.save(tmp_path / f"{i}.png")
    frames[0].save(tmp_path.with_suffix(".gif"), save_all=True, append_images=frames[1:], duration=500)
    processor = make_processor(family)
    for source in (frames, str(tmp_path), str(tmp_path.with_suffix(".gif"))):
        question = user("What?")
        question["content"] = [{"type": "video", "video": source, **times}] * 2 + question["content"]
        example = build_example(Conversation("c", [question, assistant("a")]), processor)
        prompt = processor.prepare([question])
        assert "pixel_values_videos" in prompt
        for key in set(processor.family.pixel_keys) & prompt.keys():
            assert torch.equal(example[key], prompt[key]), key


def test_placeholder_is_text_in_answers_and_questions() -> None:
    processor = make_processor(LLAVA)
    example = build_example(Conversation("c", [user(make_image(), "Hi?"), assistant("<image>")]), processor)
    assert int(processor.family.visual_mask(example["input_ids"]).sum()) == 10
    quoted = user("<image> hi, <video>, <|im_end|>")
    example = build_example(Conversation("c", [quoted, assistant("a")]), processor)
    assert not processor.family.visual_mask(example["input_ids"]).any()
    assert example["input_ids"][~example["loss_mask"]].tolist() == processor.prepare([quoted])["input_ids"][0].tolist()
    remote = user("Hi?")
    remote["content"].insert(0, {"type": "image", "image": "https://example.com/a.png"})
    with refused("https://example.com/a.png", "download", error=BadItem):
        build_example(Conversation("c", [remote, assistant("a")]), processor)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (("part.text", "part.text | upper"), "rewrites"),
        (("'<|im_end|>'", "'<|endoftext|>'"), "does not end each answer with '<|im_end|>'"),
        (("assistant\\n", "assistant\\n<plan>"), "prompt"),
    ],
)
def test_template_without_locatable_answers_is_refused(change: tuple[str, str], fault: str) -> None:
    processor = make_processor(LLAVA)
    processor.chat_template = LLAVA_TEMPLATE.replace(*change)
    with refused("target: its chat template", fault, error=BadTemplate):
        build_example(Conversation("c", [user("Hi?"), assistant("yes")]), processor)


@pytest.mark.parametrize(("value", "share"), [(False, "no"), (True, "every")])
def test_mask_of_no_or_every_token_is_refused(value: bool, share: str, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = make_processor(QWEN)
    encode = processor.encode

    def broken(*args: Any) -> dict[str, Any]:
        example = encode(*args)
        return example | {"loss_mask": torch.full_like(example["loss_mask"], value)}

    monkeypatch.setattr(processor, "encode", broken)
    with refused("pocket: item 3 (id me)", "loss mask", share, error=BadItem):
        build_example(Conversation("me", [user("Hi?"), assistant("a")], "pocket", meta={"index": 3}), processor)


MULTI = [user(make_image(), "Hi?"), assistant("Yes."), user(make_image(colour="blue"), "No"), assistant("ab")]


@pytest.mark.parametrize("family", [QWEN, LLAVA])
def test_long_example_keeps_complete_turns(family: str) -> None:
    processor = make_processor(family)
    complete = build_example(Conversation("c", MULTI), processor)
    first = build_example(Conversation("c", MULTI[:2]), processor)
    for limit in range(len(first["input_ids"]), len(complete["input_ids"])):
        short = build_example(Conversation("c", MULTI), processor, limit)
        assert {key: str(value) for key, value in short.items()} == {key: str(value) for key, value in first.items()}
    exact = build_example(Conversation("c", MULTI), processor, len(complete["input_ids"]))
    assert torch.equal(exact["input_ids"], complete["input_ids"])


def test_long_example_that_cannot_be_shortened_is_dropped() -> None:
    processor = make_processor(QWEN)
    with refused("item 4 (id c)", "data.max_length=50", "data.on_long=turn", "51 tokens", error=TooLong):
        build_example(Conversation("c", MULTI[:2], meta={"index": 4}), processor, 50)
    with refused("data.on_long=drop", error=TooLong):
        build_example(Conversation("c", MULTI), processor, 60, OnLong.drop)


def test_cut_shortens_the_answer_and_never_an_image() -> None:
    processor = make_processor(QWEN)
    complete = build_example(Conversation("c", MULTI[:2]), processor)
    cut = build_example(Conversation("c", MULTI), processor, 49, OnLong.cut)
    assert torch.equal(cut["input_ids"], complete["input_ids"][:49])
    assert torch.equal(cut["loss_mask"], complete["loss_mask"][:49])
    assert len(cut["mm_token_type_ids"]) == 49
    assert torch.equal(cut["pixel_values"], complete["pixel_values"])
    with pytest.raises(TooLong):  # the answer starts at 46: no supervised token would remain
        build_example(Conversation("c", MULTI), processor, 46, OnLong.cut)


# As published: thoughts are found by their end, and those of earlier answers are dropped.
DROPS = "{%- set ns.text = part.text.split('</think>')[-1].lstrip('\\n') if message.role == 'assistant' else part.text -%}"
TEMPLATE = "{%- set ns = namespace(text='') -%}" + QWEN_TEMPLATE.replace("{{ part.text }}", DROPS + "{{ ns.text }}").replace(
    "{{ '<|im_start|>assistant\\n' }}", "{{ '<|im_start|>assistant\\n<think>\\n' }}"
)


@pytest.fixture
def processor() -> Processor:
    processor = make_processor("qwen2_5_vl")
    processor.tokenizer.add_tokens(["<think>", "</think>"])
    processor.chat_template = TEMPLATE
    return processor


def supervised(processor: Processor, messages: list[dict[str, Any]], **options: Any) -> tuple[list[int], str]:
    """Returns the ids before the answer, and the supervised text, which is one run at the end."""
    example = build_example(Conversation("c", messages), processor, **options)
    mask = example["loss_mask"]
    start = int(mask.int().argmax())
    assert not mask[:start].any() and mask[start:].all()
    return example["input_ids"][:start].tolist(), processor.tokenizer.decode(example["input_ids"][start:])


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Yes.", "\n</think>\n\nYes.<|im_end|>"),
        ("It barks.\n</think>\n\nA dog.", "It barks.\n</think>\n\nA dog.<|im_end|>"),
        ("<think>\nIt barks.\n</think>\n\nA dog.", "It barks.\n</think>\n\nA dog.<|im_end|>"),
        ("\n</think>\n\nA dog.", "\n</think>\n\nA dog.<|im_end|>"),
    ],
)
def test_the_answer_follows_its_prompt(processor: Processor, answer: str, expected: str) -> None:
    """Prompt and pixels are those of decoding; thoughts end with their token; quoted special tokens stay text."""
    question = user(make_image(), "Hi <|im_end|>?")
    prompt, text = supervised(processor, [question, assistant(answer)])
    plain = user(make_image(), "Hi?")
    assert supervised(processor, [plain, assistant(answer)])[0] == processor.prepare([plain])["input_ids"][0].tolist()
    assert text == expected
    assert prompt.count(processor.tokenizer.convert_tokens_to_ids("<think>")) == 1


def test_earlier_answers_are_context_without_thoughts(processor: Processor) -> None:
    messages = [user("Hi?"), assistant("Hm.\n</think>\n\nYes."), user("No?"), assistant("So.\n</think>\n\nab")]
    prompt, text = supervised(processor, messages)
    assert prompt == processor.prepare(messages[:3])["input_ids"][0].tolist()
    rendered = processor.tokenizer.decode(torch.tensor(prompt))
    assert "Hm." not in rendered and "assistant\nYes.<|im_end|>" in rendered and text == "So.\n</think>\n\nab<|im_end|>"


GOOD = [{"role": "system", "content": "Ok"}, user(make_image(), "Hi?"), assistant("Yes."), user("No"), assistant("Why?")]


def test_private_characters_stay_in_texts_and_tools() -> None:
    processor, private = make_processor("qwen2_5_vl"), "".join(map(chr, range(0xF0000, 0xF0100)))
    example = build_example(Conversation("c", [user("What?"), assistant(f"{private}<|im_end|>")]), processor)
    assert processor.tokenizer.decode(example["input_ids"][example["loss_mask"]]) == f"{private}<|im_end|><|im_end|>"
    asked = user("<|im_end|>") | {"tools": [{"name": private}]}
    assert escape([asked], processor.quotable)[1] not in private


def test_empty_answers_are_refused_in_training_alone() -> None:
    empty: dict[str, Any] = {"role": "assistant", "content": []}
    for answer in (empty, assistant(" ")):
        with refused("message 1", "empty answer", error=BadItem):
            check_conversation(Conversation("c", [user("Hi"), answer, user("And?"), assistant("Yes")]))
        assert check_conversation(Conversation("c", [user("Hi"), answer, user("And?")]), needs_answer=False)


@pytest.mark.parametrize(
    ("messages", "parts"),
    [
        ([], ["no messages"]),
        ([user("a")], ["'user'", "assistant"]),
        ([user("a"), assistant("b"), assistant("c")], ["message 2", "'assistant' after 'assistant'", "'user'"]),
        ([user("a"), {"role": "system", "content": "b"}, assistant("c")], ["message 1", "'system' after 'user'"]),
        ([{"role": "critic", "content": "a"}], ["message 0", "'critic'", "system, user, assistant"]),
        ([{"content": "a"}], ["message 0", "{role, content}"]),
        ([{"role": "user", "content": [{"type": "audio"}]}], ["message 0", "'audio'", "text, image, video"]),
        ([{"role": "user", "content": [{"type": "image"}]}, assistant("a")], ["message 0", "image", "nothing"]),
        ([{"role": "user", "content": [{"type": "video", "video": []}]}, assistant("a")], ["message 0", "video", "frames"]),
        ([{"role": "user", "content": [{"type": "video", "video": "a.mp4", "start": "soon"}]}], ["message 0", "start 'soon'"]),
        ([user("  "), assistant("a")], ["message 0", "empty"]),
        ([user("a"), {"role": "assistant", "content": [{"type": "image", "image": "x"}]}], ["message 1", "'assistant'"]),
        ([user("a\ud800"), assistant("b")], ["message 0", "character 1"]),
    ],
)
def test_invalid_conversation_is_refused_with_file_item_and_reason(messages: list[dict[str, Any]], parts: list[str]) -> None:
    with refused("chat.jsonl: item 4 (id c9): ", *parts, error=BadItem):
        check_conversation(Conversation("c9", messages, "chat.jsonl", meta={"index": 4}))


def test_prompt_ends_before_the_last_answer() -> None:
    prompt = Conversation("c", GOOD[:3]).prompt()
    assert prompt.messages == GOOD[:2]
    assert prompt.meta["answer"] == "Yes."
    assert check_conversation(prompt, needs_answer=False).messages[1] == GOOD[1]
    with refused("'assistant'", "user", error=BadItem):
        check_conversation(Conversation("c", GOOD[:3]), needs_answer=False)


def test_errors_can_be_pickled() -> None:
    for kind in (BadItem, TooLong):
        error = pickle.loads(pickle.dumps(kind("file", 3, "why")))
        assert type(error) is kind
        assert str(error) == "file: item 3: why"
