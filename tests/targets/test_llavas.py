"""LLaVA 1.5, LLaVA-NeXT, LLaVA-OneVision and InternVL."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.data_helpers import assistant
from support.family_passes import paths, tree
from support.family_suite import CLIP, END, IMAGE, VICUNA, VIDEO, FamilySuite, chatml, text
from support.models import LLAVA_IDS, SIGLIP, in_double, llava_config, random_draft
from support.processors import byte_tokenizer_of, image_part, random_image, user
from transformers import (
    CLIPImageProcessorPil,
    GotOcr2ImageProcessorPil,
    InternVLConfig,
    LlamaTokenizer,
    LlavaConfig,
    LlavaNextConfig,
    LlavaNextImageProcessorPil,
    LlavaOnevisionConfig,
    LlavaOnevisionImageProcessorPil,
)

import sage
from data_prep.chat import segments
from data_prep.conversation import Message
from sage.inputs.processing import Processor
from sage.inputs.video import VideoSize
from sage.targets.families import family_of


def two_turns() -> list[Message]:
    return [*user(image_part(8, 8), "What?"), assistant("A dog."), *user("And then?"), assistant("It runs.")]


class TestLlava(FamilySuite):
    template, tokens, has_video = VICUNA, {"<image>": IMAGE}, False
    hf_processor, answer_prefix = "LlavaProcessor", " "

    def config(self, **more: Any) -> LlavaConfig:
        settings: dict[str, Any] = {"text_config": {"model_type": "llama", **text()}, "vision_config": CLIP, **more}
        return LlavaConfig(image_token_index=IMAGE, **settings)

    def image_processor(self) -> Any:
        return CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})

    def hugging_face_settings(self, target: sage.Target) -> dict[str, Any]:
        return {"patch_size": 4, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}

    def test_prompts_are_rendered_as_by_the_published_template(self, target: sage.Target) -> None:
        theirs = target.processor.tokenizer.apply_chat_template
        system: Message = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
        for chat in (two_turns()[:1], [system, *user("a", image_part(8, 8), "b")]):
            expected = theirs(chat, chat_template=VICUNA, tokenize=False, add_generation_prompt=True)
            assert target.processor.render(chat, True) == expected
        plain: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What?"}]
        assert target.processor.render(plain, True) == "Be brief. USER: What? ASSISTANT:"

    def test_a_template_in_a_file_of_the_processor(self, target: sage.Target, tmp_path: Path) -> None:
        target.processor.save_pretrained(tmp_path)
        (tmp_path / "chat_template.jinja").unlink()
        assert Processor.from_pretrained(str(tmp_path), target.family).chat_template is None
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": VICUNA}))
        loaded = Processor.from_pretrained(str(tmp_path), target.family)
        assert loaded.chat_template == target.processor.chat_template != VICUNA

    @pytest.mark.parametrize(
        ("vision", "strategy", "slots"), [(CLIP, "full", 5), (SIGLIP, "full", 4), (SIGLIP, "default", 3)], ids=str
    )
    def test_slots_of_other_towers(self, vision: dict[str, Any], strategy: str, slots: int) -> None:
        target = self.target_of(self.config(vision_config=vision, vision_feature_select_strategy=strategy))
        prompt = target.embed(in_double(target.prepare(user(image_part(16, 8), "?"))))  # raises if the model has others
        assert int(prompt.visual_mask.sum()) == slots

    def test_tokens_of_vicuna(self) -> None:
        """A SentencePiece tokenizer: the tokens of the whole conversation as Vicuna was trained on, `<s>` first."""
        words = ("USER:", "What?", "ASSISTANT:", "A", "dog.", "And", "then?", "It", "runs.")  # no token has a blank within
        tokenizer = LlamaTokenizer(add_bos_token=True).train_new_from_iterator([*words] * 20, 320)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
        family = family_of(self.config())
        processor = Processor(tokenizer, self.image_processor(), family, VICUNA)
        found = processor.encode(segments(two_turns(), processor), [random_image(8, 8)])
        whole = "USER: <image><image><image><image>\nWhat? ASSISTANT: A dog.</s>USER: And then? ASSISTANT: It runs.</s>"
        assert found["input_ids"].tolist() == tokenizer(whole)["input_ids"]
        assert found["input_ids"][0] == tokenizer.bos_token_id
        answers = tokenizer.convert_ids_to_tokens(found["input_ids"][found["loss_mask"]])
        assert "".join(answers) == "▁A▁dog.</s>▁It▁runs.</s>"


NEXT_TILES = [[8, 8], [8, 16], [16, 8], [16, 16]]


class TestLlavaNext(FamilySuite):
    """v1.6-mistral."""

    template = (
        "{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' }}{% for content in message['content'] | "
        "selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}{% for content in message['content'] | "
        "selectattr('type', 'equalto', 'text') %}{{ content['text'] }}{% endfor %}{{ ' [/INST]' }}"
        "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'][0]['text'] + '</s> ' }}{% endif %}{% endfor %}"
    )
    has_video, hf_processor, answer_prefix = False, "LlavaNextProcessor", " "

    def tokenizer(self) -> Any:
        return byte_tokenizer_of({"</s>": END, "<image>": IMAGE}, eos="</s>")

    def config(self) -> LlavaNextConfig:
        sizes = {"model_type": "mistral", **text(), "sliding_window": None}
        return LlavaNextConfig(text_config=sizes, vision_config=CLIP, image_token_index=IMAGE, image_grid_pinpoints=NEXT_TILES)

    def image_processor(self) -> Any:
        sizes = {"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}}
        return LlavaNextImageProcessorPil(image_grid_pinpoints=NEXT_TILES, **sizes)

    def hugging_face_settings(self, target: sage.Target) -> dict[str, Any]:
        return {"patch_size": 4, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}

    def test_tiles_cover_the_image(self, target: sage.Target) -> None:
        """2 x 2 patches per tile: the base tile, and rows of patches that contain pixels with a newline each."""
        images = {(8, 8): 4 + 2 * 3, (16, 8): 4 + 2 * 5, (16, 16): 4 + 4 * 5, (16, 4): 4 + 2 * 5, (4, 16): 4 + 4 * 3}
        for (width, height), slots in images.items():
            inputs = target.prepare(user(image_part(width, height), "?"))
            assert int((inputs["input_ids"] == IMAGE).sum()) == slots, (width, height)


TILES = [[8, 8], [8, 16], [16, 8]]


class TestLlavaOnevision(FamilySuite):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }} {% for p in m.content if p.type == 'image' %}<image>{% endfor %}"
        "{% for p in m.content if p.type == 'video' %}<video>{% endfor %}{% for p in m.content if p.type == 'text' %}\n"
        "{{ p.text }}{% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokens = {"<image>": IMAGE, "<video>": VIDEO}
    hf_processor = "LlavaOnevisionProcessor"

    def config(self) -> LlavaOnevisionConfig:
        return llava_config(text(), LLAVA_IDS, TILES)

    def image_processor(self) -> Any:
        return LlavaOnevisionImageProcessorPil(size={"height": 8, "width": 8}, image_grid_pinpoints=TILES)

    def hugging_face_settings(self, target: sage.Target) -> dict[str, Any]:
        return {"num_image_tokens": 4, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9"}


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}  # as published
FRAMES = [random_image(16, 16, i) for i in range(3)]


class TestInternVL(FamilySuite):
    template = chatml("<IMG_CONTEXT>\n", "<video>\n")
    tokens = {"<IMG_CONTEXT>": IMAGE, "<video>": 61, "<img>": 62, "</img>": 63}
    hf_processor = "InternVLProcessor"

    def config(self, text_type: str = "qwen2") -> InternVLConfig:
        vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        vision |= {"image_size": [16, 16], "patch_size": [4, 4]}
        sizes = {"model_type": text_type, **text(rope_parameters=DYNAMIC)}
        slots = {"image_token_id": IMAGE, "image_seq_length": 4}
        return InternVLConfig(text_config=sizes, vision_config=vision, tie_word_embeddings=False, **slots)

    def image_processor(self) -> Any:
        return GotOcr2ImageProcessorPil(size={"height": 16, "width": 16}, max_patches=4)

    def hugging_face_settings(self, target: sage.Target) -> dict[str, Any]:
        return {"start_image_token": "<img>", "end_image_token": "</img>", "image_seq_length": 4}

    def test_replacement_texts_are_hugging_faces(self, target: sage.Target) -> None:
        """Images of one tile, and of several with a thumbnail; frames are numbered."""
        family, processor, theirs = target.family, target.processor.image_processor, self.hugging_face(target)
        sizes = [(8, 8), (40, 12)]
        found = processor(images=[random_image(*size) for size in sizes], crop_to_patches=True, return_tensors="pt")
        assert found["num_patches"].tolist() == [1, 4]
        assert family.image_texts(processor, sizes) == [theirs.replace_image_token(found, i) for i in range(2)]
        videos = {"pixel_values_videos": [torch.zeros(frames, 3, 16, 16) for frames in (3, 1)]}
        texts = family.video_texts(processor, [VideoSize(3, 16, 16), VideoSize(1, 16, 16)], [1.0, 1.0])
        assert texts == [theirs.replace_video_token(videos, i) for i in range(2)]

    def test_pixels_are_in_reading_order(self, target: sage.Target) -> None:
        """Two videos around an image, also if their frames differ in number."""
        family, processor = target.family, target.processor.image_processor
        image, video = random_image(40, 12, seed=9), {"type": "video", "fps": 1.0}
        parts = [video | {"video": FRAMES}, {"type": "image", "image": image}, video | {"video": FRAMES[1:2]}]
        inputs = target.prepare(user(*parts, "which?"))
        media = [(FRAMES, False), ([image], True), (FRAMES[1:2], False)]
        tiles = [processor(images=images, crop_to_patches=is_cut, return_tensors="pt") for images, is_cut in media]
        expected = torch.cat([torch.as_tensor(each["pixel_values"]) for each in tiles])
        assert torch.equal(inputs["pixel_values"], expected) and len(expected) == 3 + 4 + 1
        sizes = [VideoSize(len(frames), *frames[0].size) for frames in (FRAMES, FRAMES[1:2])]
        first, second = family.video_texts(processor, sizes, [1.0, 1.0])
        rendered = target.processor.tokenizer.decode(inputs["input_ids"][0])
        assert "\n".join((first, *family.image_texts(processor, [image.size]), second)) in rendered

    def test_dynamic_rope_is_unscaled_within_the_context(self, target: sage.Target) -> None:
        """Drafts rotate as Hugging Face's text model does up to the last position that is decoded."""
        positions = torch.tensor([[0, 1, 40, 511]])
        untouched = self.model_of(self.config()).model.language_model.rotary_emb
        assert untouched.rope_type == "dynamic"
        found = [table[:, 0] for table in random_draft(target, "eagle").rope(positions, torch.float32)]
        for theirs in (untouched, target.text_model.rotary_emb):
            expected = theirs(torch.zeros(1, dtype=torch.float32), positions)
            torch.testing.assert_close(found, list(expected), atol=1e-5, rtol=0)
        scaled = untouched(torch.zeros(1, dtype=torch.float32), torch.tensor([[40, 600]]))  # 600 is beyond the context
        assert float((scaled[0][0, 0] - expected[0][0, 2]).abs().max()) > 1e-2

    @pytest.mark.slow
    def test_another_text_model(self) -> None:
        """InternVL 3.5 with the layers of Qwen3."""
        target = self.target_of(self.config("qwen3"))
        inputs = self.longest(target)
        torch.testing.assert_close(tree(target, target.embed(inputs)), paths(target, inputs), atol=1e-11, rtol=0)
