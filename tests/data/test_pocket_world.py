"""The pocket world: deterministic, with disjoint splits, and answers that match the images."""

from __future__ import annotations

import random

import pytest
from support.messages import refused

from data_prep.pocket import grammar, palette, world
from data_prep.pocket.phrases import Phraser, statement
from data_prep.sources import SourceConfig
from data_prep.sources.base import open_source
from data_prep.splits import Split


def images(conversation):
    parts = [part for message in conversation.messages for part in message["content"]]
    frames = [frame for part in parts if part["type"] == "video" for frame in part["video"]]
    return [part["image"] for part in parts if part["type"] == "image"] + frames


def texts(conversation):
    return [part["text"] for m in conversation.messages for part in m["content"] if part["type"] == "text"]


@pytest.mark.parametrize("family", world.FAMILIES)
def test_each_family_generates_a_conversation(family):
    conversation = world.sample("train", 3, [family])
    assert conversation.family == family and conversation.source == "pocket"
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * (len(conversation.messages) // 2)
    assert all(text.strip() == text and text for text in texts(conversation))
    assert all(text[-1] in '."' for text in texts(conversation)[1::2])
    assert bool(images(conversation)) == (family != "text")
    assert all(image.size == (palette.SIDE, palette.SIDE) for image in images(conversation))
    assert len(conversation.meta["expect"]) == len(conversation.messages) // 2


def test_the_same_index_gives_the_same_conversation():
    first, again = (world.sample("validation", 11) for _ in range(2))
    assert texts(first) == texts(again)
    assert [p.tobytes() for p in images(first)] == [p.tobytes() for p in images(again)]
    assert texts(first) != texts(world.sample("validation", 12))


def test_conversations_are_joined_into_one_of_several_turns():
    source = open_source("pocket", SourceConfig(num_examples=10, joined=3), Split.train)
    parts = [world.sample("train", index) for index in (6, 7, 8)]
    assert texts(source.conversation(2)) == [text for part in parts for text in texts(part)]
    alone = open_source("pocket", SourceConfig(num_examples=10), Split.train)
    assert source.fingerprint() != alone.fingerprint() and texts(alone.conversation(7)) == texts(parts[1])


def test_splits_share_no_image():
    """The pixel in the corner, a background colour, belongs to one split."""
    for split, residues in palette.SPLITS.items():
        found = [image.getpixel((0, 0)) for index in range(60) for image in images(world.sample(split, index))]
        assert {(red + 3 * green + 7 * blue) % 10 for red, green, blue in found} == set(residues)


def test_wording_varies_but_facts_do_not():
    rng = random.Random(5)
    obj = palette.SceneObject("small", "red", "circle", 0)
    statements = {statement(Phraser(rng), obj) for _ in range(60)}
    assert len(statements) > 40
    assert all("red circle" in text for text in statements)
    for text in statements:
        score = grammar.score_answer(text, {"scenes": [[vars(obj)]]}, [])
        assert {kind for kind, right in score if right} == {"colour", "shape", "size", "position"}
        assert not any(count for (_, right), count in score.items() if not right)


@pytest.mark.parametrize("family", [name for name in world.FAMILIES if name != "text"])
def test_grammar_scores_generated_answers_as_right(family):
    for index in range(40):
        conversation = world.sample("test", index, [family])
        for turn, expected in enumerate(conversation.meta["expect"]):
            text = conversation.messages[2 * turn + 1]["content"][0]["text"]
            score = grammar.score_answer(text, conversation.meta["truth"], expected)
            assert score and not [kind for kind, right in score if not right], text


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("A tiny blue circle sits in the top left.", "colour"),
        ("A tiny red star sits in the top left.", "shape"),
        ("A huge red circle sits in the top left.", "size"),
        ("In the lower right area sits a tiny red circle.", "position"),
    ],
)
def test_grammar_finds_a_wrong_fact(text, kind):
    obj = vars(palette.SceneObject("small", "red", "circle", 0))
    score = grammar.score_answer(text, {"scenes": [[obj]]}, [])
    assert score[kind, False] == 1 and sum(n for (_, right), n in score.items() if not right) == 1


def test_grammar_finds_a_wrong_sign_bar_and_answer():
    assert grammar.score_answer('It says "STOP" over "12".', {"sign": ["STOP", "13"]}, []) == {
        ("sign", True): 1,
        ("sign", False): 1,
    }
    score = grammar.score_answer("The red bar reaches 3, while the blue one is at 5.", {"bars": {"red": 3, "blue": 4}}, [])
    assert score == {("height", True): 1, ("height", False): 1}
    assert grammar.score_answer("No, it is not.", {}, [("answer", "yes")]) == {("answer", False): 1}


@pytest.mark.parametrize(
    ("split", "families", "message"), [("dev", None, "split: 'dev'"), ("train", ["poem"], "poem"), ("train", [], "families")]
)
def test_unknown_names_are_refused(split, families, message):
    with refused(message):
        world.sample(split, 0, families)
