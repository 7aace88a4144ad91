"""The pocket targets: tokenizer, template, training, and the shipped folders."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from support.messages import refused
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.auto.image_processing_auto import AutoImageProcessor

import data_prep.pocket
from data_prep.chat import build_example
from data_prep.pocket import architecture, batches, build, folder, probe, training, world
from data_prep.pocket.score import KINDS, pad_left, summary
from sage.files import write_json
from sage.targets import load_target

SHIPPED = Path(data_prep.pocket.__file__).parent / "targets"
families = pytest.mark.parametrize("family", architecture.FAMILIES)


@pytest.fixture(scope="module")
def tokenizers():
    texts = training.world_texts(60)
    return {family: architecture.new_tokenizer(family, texts) for family in architecture.FAMILIES}


def shipped(family):
    return SHIPPED / f"pocket_{family}"


@families
@pytest.mark.parametrize("text", ["A red circle.", "Ünïcödé 日本語 \U0001f600", " two  spaces\n\n\tand 1234", "<|im_end|> x"])
def test_tokenizer_round_trip_of_any_text(tokenizers, family, text):
    tokenizer = tokenizers[family]
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(ids) < len(tokenizer)


@families
def test_template_renders_parts_and_plain_text(tokenizers, family):
    image = architecture.MEDIA_TEXT[family]["image"].replace("\\n", "\n")
    parts = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hi."}]}]
    rendered = tokenizers[family].apply_chat_template(parts, tokenize=False, add_generation_prompt=True)
    assert rendered == f"<|im_start|>user\n{image}Hi.<|im_end|>\n<|im_start|>assistant\n"
    plain = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Ho."}]
    rendered = tokenizers[family].apply_chat_template(plain, tokenize=False)
    assert rendered == "<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\nHo.<|im_end|>\n"


@families
def test_pixels_equal_those_of_the_image_processor(family, tmp_path):
    write_json(tmp_path / "preprocessor_config.json", architecture.preprocessor_config(family))
    processor = AutoImageProcessor.from_pretrained(tmp_path)
    image = world.sample("train", 0, ["caption"]).messages[0]["content"][0]["image"]
    theirs = processor(images=[image], return_tensors="pt")["pixel_values"]
    ours = batches.pixels([image])
    twice = np.repeat(ours, 2, 0)
    ours = batches.patches(twice) if family == "qwen2_5_vl" else twice[None]
    assert torch.equal(theirs, torch.from_numpy(ours))


@families
def test_inserted_layers_do_not_change_the_output(tokenizers, family):
    shallow = architecture.new_model(family, tokenizers[family], 1, 0).eval()
    deep = architecture.deepen(shallow, family, tokenizers[family], 3, 0).eval()
    ids = torch.arange(20, 30)[None]
    with torch.no_grad():
        before, after = shallow(input_ids=ids).logits, deep(input_ids=ids).logits
    assert len(deep.model.language_model.layers) == 3
    torch.testing.assert_close(before, after)


@families
def test_supervision_covers_the_answers_and_their_end(tokenizers, family):
    conversation = world.sample("train", 4, ["question"])
    example = batches.Encoder(tokenizers[family], family)(conversation)
    kept = [token for token, on in zip(example["ids"], example["mask"], strict=True) if on]
    answers = [message["content"][0]["text"] for message in conversation.messages if message["role"] == "assistant"]
    assert tokenizers[family].decode(kept) == "".join(f"{answer}<|im_end|>" for answer in answers)


def test_probe_labels_are_within_range():
    import random

    rng = random.Random(0)
    for _ in range(30):
        _, labels = probe.draw_labelled(rng)
        assert {name: len(row) for name, row in labels.items()} == {name: n for name, (n, _) in probe.QUESTIONS.items()}
        assert all(0 <= label < probe.QUESTIONS[name][1] for name, row in labels.items() for label in row)
        assert any(label for row in labels.values() for label in row)


def test_unknown_family_is_refused(tokenizers):
    with refused("family", "'phi'", "qwen2_5_vl"):
        architecture.new_model("phi", tokenizers["qwen2_5_vl"], 1, 0)


@families
def test_shipped_score_belongs_to_the_shipped_weights(family):
    weights = shipped(family) / folder.WEIGHTS
    score = json.loads((shipped(family) / "score.json").read_text())
    assert folder.sha256(weights) == score["sha256"]
    assert weights.stat().st_size == score["bytes"] <= folder.MAX_WEIGHT_BYTES


@families
def test_shipped_targets_describe_images(family):
    score = json.loads((shipped(family) / "score.json").read_text())
    assert score["finished"] == 1.0
    assert {kind: score["right"][kind] for kind in KINDS if score["right"][kind] < 0.95} == {}
    assert all(score["words"][kind] > 50 for kind in KINDS)


@families
def test_shipped_folders_load_with_the_auto_classes(family):
    path = shipped(family)
    config, tokenizer = AutoConfig.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    assert AutoImageProcessor.from_pretrained(path)
    assert config.model_type == family == model.config.model_type
    assert len(tokenizer) == config.get_text_config().vocab_size
    assert tokenizer.chat_template == architecture.chat_template(family)
    assert tokenizer.eos_token_id in model.generation_config.eos_token_id
    assert tokenizer.decode(tokenizer("日本 42 é")["input_ids"]) == "日本 42 é"


@families
@pytest.mark.parametrize("task", world.FAMILIES)
def test_training_and_inference_encode_equally(family, task):
    processor = load_target(shipped(family), dtype=torch.float32).processor
    conversation = world.sample("train", 2, [task])
    encoded, trained = build_example(conversation, processor), batches.Encoder(processor.tokenizer, family)(conversation)
    count = len(encoded["input_ids"])  # the training example also contains the line break after the last answer
    assert encoded["input_ids"].tolist() == trained["ids"][:count] and len(trained["ids"]) == count + 1
    assert encoded["loss_mask"].tolist() == trained["mask"][:count]
    batch = batches.collate([trained], family, processor.tokenizer)
    for key in ("pixel_values", "pixel_values_videos", "second_per_grid_ts"):
        assert (key in encoded) == (key in batch)
        if key in encoded and (key != "pixel_values" or family != "llava_onevision" or task != "compare"):
            torch.testing.assert_close(encoded[key], batch[key])


def test_padding_moves_to_the_left():
    batch = {"input_ids": torch.tensor([[5, 6, 0], [7, 8, 9]]), "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}
    moved = pad_left(batch)
    assert moved["input_ids"].tolist() == [[0, 5, 6], [7, 8, 9]]
    assert moved["attention_mask"].tolist() == [[0, 1, 1], [1, 1, 1]]


def test_score_is_summed_over_families():
    parts = {
        "sign": {"score": Counter({("sign", True): 3, ("sign", False): 1}), "tokens": 5.0, "finished": 1, "count": 2},
        "clip": {"score": Counter({("colour", True): 2}), "tokens": 7.0, "finished": 2, "count": 2},
    }
    result = summary(parts)
    assert result["right"] == {"colour": 1.0, "sign": 0.75} and result["words"] == {"colour": 2, "sign": 4}
    assert result["finished"] == 0.75
    assert result["families"]["sign"]["wrong"] == {"sign": 1}


@pytest.mark.slow
@families
def test_small_recipe_builds_a_loadable_folder(family, tmp_path):
    stages = (
        training.Stage("language", 1, 1, 1e-3, training.NAMING_MIXTURE),
        training.Stage("deep", 2, 1, 1e-3, training.FULL_MIXTURE),
    )
    recipe = training.Recipe(
        probe_steps=1, stages=stages, has_positions=False, num_texts=60, probe_batch_size=2, batch_size=2, num_pooled=1
    )
    model, tokenizer = build.train(family, 0, recipe)
    folder.save(model, tokenizer, family, tmp_path / "target")
    target = load_target(tmp_path / "target", dtype=torch.float32)
    assert target.num_layers == 2 and target.model.config.model_type == family
    again, _ = build.train(family, 0, recipe)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.slow
@families
def test_shipped_targets_describe_a_held_out_image(family):
    from data_prep.pocket.grammar import score_answer
    from data_prep.pocket.score import answers

    target = load_target(shipped(family), dtype=torch.float32)
    conversation = world.sample("test", 1, ["caption"])
    [(text, _, ended)] = answers(target, [conversation.messages[:1]])
    score = score_answer(text, conversation.meta["truth"], [])
    assert ended
    assert sum(n for (_, right), n in score.items() if right) >= 8
