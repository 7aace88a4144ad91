"""The pocket targets: tokenizer, template, training, and the shipped folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.auto.image_processing_auto import AutoImageProcessor

import data_prep.pocket
from data_prep.chat import build_example
from data_prep.pocket import architecture, build, probe, training, world
from data_prep.pocket.families import FAMILIES, WIDTH, pocket_family
from data_prep.pocket.score import KINDS, score_target
from sage.io.manifest import sha256
from sage.targets import load_target

SHIPPED = Path(data_prep.pocket.__file__).parent / "targets"
families = pytest.mark.parametrize("family", FAMILIES)
LEARNED = {"qwen3_vl": ("colour", "shape", "size")}  # of KINDS; the pocket README gives the others


@pytest.fixture(scope="module")
def tokenizers():
    texts = training.world_texts(60)
    return {family: architecture.new_tokenizer(family, texts) for family in FAMILIES}


def shipped(family):
    return SHIPPED / f"pocket_{family}"


def encode(task, family, processor):
    batch = training.padded(processor.collate([build_example(world.sample("train", 2, [task]), processor)]))
    del batch["loss_mask"]
    return batch


@families
def test_tokenizer_and_template(tokenizers, family):
    tokenizer = tokenizers[family]
    for text in ("A red circle.", "Ünïcödé 日本語 \U0001f600", " two  spaces\n\n\tand 1234", "<|im_end|> x"):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text and max(ids) < len(tokenizer)
    image = pocket_family(family).media_text["image"].replace("\\n", "\n")
    chat = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hi."}]},
        {"role": "assistant", "content": "Ho."},
    ]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        f"<|im_start|>user\n{image}Hi.<|im_end|>\n<|im_start|>assistant\nHo.<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.slow
@families
def test_inserted_layers_do_not_change_the_output(tokenizers, family):
    tokenizer = tokenizers[family]
    shallow = architecture.new_model(family, tokenizer, 3, 0).eval()
    deep = architecture.deepen(shallow, family, tokenizer, 7, 0).eval()
    processor = architecture.new_processor(family, tokenizer)
    batch = encode("caption", family, processor)
    with torch.no_grad():
        before, after = (model.model(**batch).last_hidden_state for model in (shallow, deep))
    assert len(deep.model.language_model.layers) == 7
    torch.testing.assert_close(before, after)


@families
def test_supervision_covers_the_answers_and_their_end(tokenizers, family):
    conversation = world.sample("train", 4, ["question"])
    example = build_example(conversation, architecture.new_processor(family, tokenizers[family]))
    kept = example["input_ids"][example["loss_mask"]]
    answers = [message["content"][0]["text"] for message in conversation.messages if message["role"] == "assistant"]
    assert tokenizers[family].decode(kept) == "".join(f"{answer}<|im_end|>" for answer in answers)


def test_clips_of_qwen3_vl_have_timestamps(tokenizers):
    processor = architecture.new_processor("qwen3_vl", tokenizers["qwen3_vl"])
    text = processor.tokenizer.decode(build_example(world.sample("train", 0, ["clip"]), processor)["input_ids"])
    pads = "<|vision_start|>" + "<|video_pad|>" * probe.NUM_TOKENS + "<|vision_end|>"
    assert f"<|vision_start|><0.2 seconds>{pads}<1.2 seconds>{pads}<|vision_end|>" in text


@pytest.mark.slow
@families
def test_visual_tokens_are_what_the_text_layers_read(tokenizers, family):
    """Those of an image alone, the deepstack features included."""
    processor = architecture.new_processor(family, tokenizers[family])
    model = architecture.new_model(family, tokenizers[family], 2, 0)
    images = [world.sample("train", k, ["caption"]).messages[0]["content"][0]["image"] for k in range(2)]
    both = probe.visual_tokens(model, processor, images)
    assert both.shape == (2, probe.NUM_TOKENS, WIDTH)
    torch.testing.assert_close(both[1:], probe.visual_tokens(model, processor, images[1:]))
    both.square().sum().backward()
    unused = [parameter for parameter in training.vision_parameters(model) if parameter.grad is None]
    assert len(unused) == (2 if family == "llava_onevision" else 0)  # the final norm, which this family does not use


@pytest.mark.slow
@families
def test_small_recipe_builds_a_loadable_folder(family, tmp_path):
    stages = (
        training.Stage("language", 3, 1, 1e-3, training.NAMING_MIXTURE),
        training.Stage("deep", 4, 1, 1e-3, training.FULL_MIXTURE),
    )
    recipe = training.Recipe(
        probe_steps=1, stages=stages, has_positions=False, num_texts=60, probe_batch_size=2, batch_size=2, num_pooled=1
    )
    model, tokenizer = build.train(family, 0, recipe)
    architecture.save(model, tokenizer, family, tmp_path / "target")
    target = load_target(tmp_path / "target", dtype=torch.float32)
    assert target.num_layers == 4 and target.model.config.model_type == family
    again, _ = build.train(family, 0, recipe)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@families
def test_shipped_folder(family):
    """It has the scores in its score.json, loads with the Auto classes, and its inputs are those that it was trained with."""
    path = shipped(family)
    score, weights = json.loads((path / "score.json").read_text()), path / architecture.WEIGHTS
    assert sha256(weights) == score["sha256"]
    assert weights.stat().st_size == score["bytes"] <= architecture.MAX_WEIGHT_BYTES
    assert score["finished"] == 1.0 and all(score["words"][kind] > 50 for kind in KINDS)
    assert {kind: score["right"][kind] for kind in LEARNED.get(family, KINDS) if score["right"][kind] < 0.95} == {}
    config, tokenizer = AutoConfig.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    assert AutoImageProcessor.from_pretrained(path)
    assert config.model_type == family == model.config.model_type
    assert len(tokenizer) == config.get_text_config().vocab_size
    assert tokenizer.chat_template == architecture.chat_template(family)
    assert tokenizer.eos_token_id in model.generation_config.eos_token_id
    processor = load_target(path, dtype=torch.float32).processor
    for task in world.FAMILIES:
        saved, trained = (encode(task, family, p) for p in (processor, architecture.new_processor(family, tokenizer)))
        assert saved.keys() == trained.keys() and all(torch.equal(saved[key], trained[key]) for key in saved), task


@pytest.mark.slow
@families
def test_shipped_targets_describe_held_out_images(family):
    """`qwen3_vl` has not learned to read signs and bars."""
    found = score_target(load_target(shipped(family), dtype=torch.float32), 1)
    right = sum(found["right"][kind] * number for kind, number in found["words"].items())
    assert right / sum(found["words"].values()) > (0.6 if family == "qwen3_vl" else 0.9) and found["finished"] == 1
