"""InternVL 3."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.family_suite import IMAGE, FamilySuite, chatml, paths, text, tree
from support.models import random_draft
from support.processors import random_image, user
from transformers import GotOcr2ImageProcessorPil, InternVLConfig

import sage

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
        images = [random_image(8, 8), random_image(40, 12)]
        found = processor(images=images, crop_to_patches=True, return_tensors="pt")
        assert found["num_patches"].tolist() == [1, 4]
        assert family.encode_images(processor, images)[1] == [theirs.replace_image_token(found, i) for i in range(2)]
        videos = {"pixel_values_videos": [torch.zeros(frames, 3, 16, 16) for frames in (3, 1)]}
        _, texts = family.encode_videos(processor, [FRAMES, FRAMES[:1]], [1.0, 1.0])
        assert texts == [theirs.replace_video_token(videos, i) for i in range(2)]

    def test_pixels_are_in_reading_order(self, target: sage.Target) -> None:
        """Two videos around an image, also if their frames differ in number."""
        family, processor = target.family, target.processor.image_processor
        image, video = random_image(40, 12, seed=9), {"type": "video", "fps": 1.0}
        parts = [video | {"video": FRAMES}, {"type": "image", "image": image}, video | {"video": FRAMES[1:2]}]
        inputs = target.prepare(user(*parts, "which?"))
        encoded = [family.encode_videos(processor, [FRAMES], [1.0]), family.encode_images(processor, [image])]
        encoded.append(family.encode_videos(processor, [FRAMES[1:2]], [1.0]))
        expected = torch.cat([pixels["pixel_values"] for pixels, _ in encoded])
        assert torch.equal(inputs["pixel_values"], expected) and len(expected) == 3 + 4 + 1
        rendered = target.processor.tokenizer.decode(inputs["input_ids"][0])
        assert "\n".join(texts[0] for _, texts in encoded) in rendered

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
    def test_other_text_models(self) -> None:
        """InternVL 2.5 with Llama layers, InternVL 3.5 with those of Qwen3."""
        for text_type in ("llama", "qwen3"):
            target = self.target_of(self.config(text_type))
            inputs = self.longest(target)
            torch.testing.assert_close(tree(target, target.embed(inputs)), paths(target, inputs), atol=1e-11, rtol=0)
