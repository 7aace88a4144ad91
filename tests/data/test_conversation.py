"""What a conversation may be, and the words in which it is refused."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from support.data_helpers import picture, says, user

from data_prep.conversation import BadItem, Conversation, TooLong, check

GOOD = [{"role": "system", "content": "Ok"}, user(picture(), "Hi?"), says("Yes."), user("No"), says("")]


def test_contents_become_lists_of_parts() -> None:
    found = check(Conversation("c", [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]))
    assert found.messages == [user("Hi"), says("Yes")]
    assert check(Conversation("c", GOOD)).messages[1:] == GOOD[1:]


def test_tags_in_the_middle_of_a_text_are_words() -> None:
    assert check(Conversation("c", [user("How does the <video> tag work?"), says("<video>")]))
    for text in ("<image>\nWhat?", "What? <image>", "<video>"):
        with pytest.raises(BadItem, match="without a picture or video"):
            check(Conversation("c", [user(text), says("a")]))


def test_pieces_of_an_answer_are_one_answer() -> None:
    answer = {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert check(Conversation("c", [user("Hi"), answer])).messages[1] == says("ab")
    empty: dict[str, Any] = {"role": "assistant", "content": []}
    assert check(Conversation("c", [user("Hi"), empty])).messages[1] == says("")


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "no messages"),
        ([user("a")], "ends with 'user'; the last message must be the assistant's"),
        ([says("a")], "'assistant' after 'nothing', expected 'user'"),
        ([user("a"), user("b"), says("c")], "message 1: 'user' after 'user', expected 'assistant'"),
        ([user("a"), says("b"), says("c")], "message 2: 'assistant' after 'assistant', expected 'user'"),
        ([user("a"), {"role": "system", "content": "b"}, says("c")], "message 1: 'system' after 'user'"),
        ([{"role": "tool", "content": "a"}], "message 0: role 'tool'; allowed: system, user, assistant"),
        ([{"content": "a"}], "message 0: not a {role, content} object"),
        ([{"role": "user", "content": 3}], "message 0: content is int"),
        ([{"role": "user", "content": [{"type": "audio"}]}], "part of type 'audio'; allowed: text, image, video"),
        ([{"role": "user", "content": ["a"]}], "part of type None"),
        ([{"role": "user", "content": [{"type": "text"}]}], "a text part without text"),
        ([{"role": "user", "content": [{"type": "image"}]}, says("a")], "an image part with nothing"),
        ([{"role": "user", "content": [{"type": "video", "video": []}]}, says("a")], "a video part without frames"),
        (
            [{"role": "user", "content": [{"type": "video", "video": "a.mp4", "start": "soon"}]}, says("a")],
            "message 0: video: start 'soon', allowed: a number",
        ),
        ([user("  "), says("a")], "message 0: an empty user message"),
        ([user("a"), {"role": "assistant", "content": [{"type": "image", "image": "x"}]}], "in a assistant message"),
        ([user("<image>\nWhat?"), says("a")], "placeholder <image> without a picture"),
        ([user("a\ud800"), says("b")], "text is not valid Unicode at character 1"),
    ],
)
def test_reason_is_named(messages: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(BadItem) as caught:
        check(Conversation("c9", messages, "chat.jsonl", meta={"index": 4}))
    assert str(caught.value).startswith("chat.jsonl: item 4 (id c9): ")
    assert reason in str(caught.value)


def test_prompt_ends_before_the_last_answer() -> None:
    prompt = Conversation("c", GOOD[:3]).prompt()
    assert prompt.messages == GOOD[:2]
    assert prompt.meta["answer"] == "Yes."
    assert check(prompt, need_answer=False).messages[1] == GOOD[1]
    with pytest.raises(BadItem, match="the last message must be the user's"):
        check(Conversation("c", GOOD[:3]), need_answer=False)


def test_errors_travel_between_processes() -> None:
    for kind in (BadItem, TooLong):
        error = pickle.loads(pickle.dumps(kind("file", 3, "why")))
        assert type(error) is kind
        assert str(error) == "file: item 3: why"
