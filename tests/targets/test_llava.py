"""LLaVA-1.5."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.data_helpers import assistant
from support.family_suite import CLIP, IMAGE, VICUNA, FamilySuite, text
from support.messages import refused
from support.models import SIGLIP, in_double
from support.processors import image_part, random_image, user
from transformers import CLIPImageProcessorPil, LlamaTokenizer, LlavaConfig

import sage
from data_prep.chat import segments
from data_prep.conversation import Message
from sage.inputs.processing import Processor
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

    def test_other_templates_are_kept(self) -> None:
        for stock in (None, "{{ messages }}", VICUNA.replace("+ ' '}}{% endgen", "+ '</s>'}}{% endgen")):
            assert family_of(self.config()).chat_template(stock) == stock

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

    def test_another_vision_tower(self) -> None:
        with refused("target: ", "llava with a vision tower of model_type 'pixtral'", "clip_vision_model, siglip_vision_model"):
            family_of(self.config(vision_config={"model_type": "pixtral"}))

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
