"""Validation of conversations."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from support.data_helpers import assistant, make_image, user
from support.messages import refused

from data_prep.conversation import BadItem, Conversation, TooLong, check_conversation

GOOD = [{"role": "system", "content": "Ok"}, user(make_image(), "Hi?"), assistant("Yes."), user("No"), assistant("Why?")]


def test_contents_become_lists_of_parts() -> None:
    found = check_conversation(Conversation("c", [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]))
    assert found.messages == [user("Hi"), assistant("Yes")]
    assert check_conversation(Conversation("c", GOOD)).messages[1:] == GOOD[1:]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert check_conversation(Conversation("c", [user("Hi"), answer])).messages[1] == assistant("ab")


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
        ([{"role": "tool", "content": "a"}], ["message 0", "'tool' after 'nothing'", "'user'"]),
        ([{"role": "critic", "content": "a"}], ["message 0", "'critic'", "system, user, assistant"]),
        ([{"content": "a"}], ["message 0", "{role, content}"]),
        ([{"role": "user", "content": 3}], ["message 0", "int"]),
        ([{"role": "user", "content": [{"type": "audio"}]}], ["message 0", "'audio'", "text, image, video"]),
        ([{"role": "user", "content": [{"type": "text"}]}], ["message 0", "text"]),
        ([{"role": "user", "content": [{"type": "image"}]}, assistant("a")], ["message 0", "image", "nothing"]),
        ([{"role": "user", "content": [{"type": "video", "video": []}]}, assistant("a")], ["message 0", "video", "frames"]),
        (
            [{"role": "user", "content": [{"type": "video", "video": "a.mp4", "start": "soon"}]}, assistant("a")],
            ["message 0", "video", "start 'soon'"],
        ),
        ([user("  "), assistant("a")], ["message 0", "empty"]),
        (
            [user("a"), {"role": "assistant", "content": [{"type": "image", "image": "x"}]}],
            ["message 1", "image", "'assistant'"],
        ),
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
