"""The tests that every target family passes, against Hugging Face's own model and processor; a family subclasses `FamilySuite`.

Models are random, eight layers of width 32 in float64: EAGLE-3's default levels need seven, and three deepstack layers eight.
"""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from support.data_helpers import assistant, train_step
from support.family_passes import TREE, between_media, hidden_states, paths, tree, use_cuda_layouts
from support.models import OracleSession, greedy_text, in_double, random_draft, text_sizes
from support.pass_helpers import call_again
from support.processors import byte_tokenizer_of, image_part, random_image, user
from support.toy_helpers import make_policy
from transformers import PreTrainedConfig
from transformers.video_utils import VideoMetadata

import sage
from checkpoints.export.exporter import ExportOptions, export
from data_prep.chat import segments
from data_prep.conversation import Message
from sage.decoding import generation
from sage.inputs.format import Inputs
from sage.inputs.processing import Processor
from sage.inputs.video import VideoSize
from sage.runtime.captured import Captured
from sage.targets.families import FAMILIES, family_of
from sage.targets.loading import meta_target
from train.plan.memory import count

IMAGE, VIDEO, END = 60, 61, 1  # ids of the slots and of the token that ends an answer
EXACT = {"atol": 1e-11, "rtol": 0}
NEW_TOKENS, STEPS = 8, 3
SIZES = [(8, 8), (16, 8), (9, 31), (40, 12), (3, 90)]  # of images
POLICY = ("eagle2", {"total": 24, "depth": 6, "top_k": 5})  # wide trees; those of other policies are passes like theirs
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% elif p.type == 'image' %}IMAGE{% else %}VIDEO{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chatml(image: str = "", video: str = "") -> str:
    """Returns a ChatML template that writes these texts for an image and for a video."""
    return CHATML.replace("IMAGE", image).replace("VIDEO", video)


def text(**more: Any) -> dict[str, Any]:
    return text_sizes(num_hidden_layers=8, **more)


QWEN_TOKENS = {"<|image_pad|>": IMAGE, "<|video_pad|>": VIDEO, "<|vision_start|>": 62, "<|vision_end|>": 63}
QWEN_TEMPLATE = chatml("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>")

CLIP = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
CLIP |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4, "projection_dim": 16}
VICUNA = (  # the chat template of llava-hf/llava-1.5-7b-hf, in which nothing ends an answer
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}"
    "{# Render all images first #}{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\n' }}{% endfor %}{# Render all text next #}{% if message['role'] != 'assistant' %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}{% endfor %}"
    "{% else %}{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{% generation %}"
    "{{ content['text'] + ' '}}{% endgeneration %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def qwen_images() -> Any:
    """Returns an image processor of patches of 4 x 4 pixels, 2 x 2 of which are merged."""
    return transformers.Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 1024})


class FamilySuite:
    """The tests of one family. A subclass implements `config`, and for a family with images `image_processor`.

    Attributes:
        template: the stock chat template, as published.
        tokens: further special tokens and their ids, up to 63; `<|im_start|>` and `<|im_end|>` are 2 and 1.
        hf_processor: name of Hugging Face's processor class.
        has_video: whether the family takes videos.
        answer_prefix: what the template writes between the prompt and an answer.
        atol: tolerance of comparisons.
    """

    template: ClassVar[str]
    tokens: ClassVar[dict[str, int]] = {}
    hf_processor: ClassVar[str] = ""
    has_video: ClassVar[bool] = True
    answer_prefix: ClassVar[str] = ""

    def config(self) -> PreTrainedConfig:
        """Returns the configuration of a tiny random model, with `text()` for the text layers."""
        raise NotImplementedError

    def image_processor(self) -> Any:
        """Returns a small image processor of the family; None for a family without images."""
        return None

    def model(self) -> Any:
        """Returns the random model; no slot is ever generated, as in a trained one, because its row of lm_head is zero."""
        return self.model_of(self.config())

    def model_of(self, config: PreTrainedConfig) -> Any:
        torch.manual_seed(0)
        model = getattr(transformers, FAMILIES[config.model_type].model_types[config.model_type])(config)
        model.lm_head.weight.data[:END] = 0
        model.lm_head.weight.data[END + 1 : 64] = 0
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = END, 0
        self.prepare_float64(model)
        return model

    def prepare_float64(self, model: Any) -> None:
        """Changes what a model needs to run in float64; nothing by default."""

    def tokenizer(self) -> Any:
        """Returns a tokenizer with a token per byte; ids below 64 are special tokens."""
        return byte_tokenizer_of({"<|im_end|>": END, "<|im_start|>": 2, **self.tokens}, eos="<|im_end|>")

    # -- fixtures --------------------------------------------------------------------------------------------------------------

    @pytest.fixture(scope="class")
    @classmethod
    def target(cls) -> sage.Target:
        """The target of all tests of a family, which leave it as it is."""
        suite = cls()
        return suite.target_of(suite.config())

    def target_of(self, config: PreTrainedConfig, template: str | None = None) -> sage.Target:
        """Returns a random target of this configuration in float64, with another stock template if given."""
        model = self.model_of(config).double()
        template = self.template if template is None else template
        return sage.Target(model, Processor(self.tokenizer(), self.image_processor(), family_of(config), template, [END]))

    @property
    def has_images(self) -> bool:
        return self.image_processor() is not None

    def prompts(self, target: sage.Target) -> dict[str, Inputs]:
        """Returns prompts by name: text alone, and all that the family takes."""
        frames = {"type": "video", "video": [random_image(16, 16, i) for i in range(4)], "fps": 2}
        parts: dict[str, list[Any]] = {"short": ["hi"], "text": ["what is it?"]}
        if self.has_images:
            parts["image"] = [image_part(16, 8), "what?"]
            parts["two images"] = ["a", image_part(8, 8), "and", image_part(30, 11), "compare"]
        if self.has_images and self.has_video:
            parts["video"] = [frames, "what happens?"]
            parts["video and image"] = [frames, "then", image_part(8, 8), "both"]
        return {name: in_double(target.prepare(user(*part))) for name, part in parts.items()}

    def longest(self, target: sage.Target) -> Inputs:
        return list(self.prompts(target).values())[-1]

    # -- the model -------------------------------------------------------------------------------------------------------------

    def test_features_through_lm_head_are_the_models_logits(self, target: sage.Target) -> None:
        for name, inputs in self.prompts(target).items():
            prompt = target.embed(inputs)
            with torch.no_grad():
                expected = target.model(**inputs).logits
            for features in (target.features(prompt), target.prefill(prompt, target.new_cache(256))):
                torch.testing.assert_close(target.logits(features.last), expected, **EXACT, msg=lambda m, n=name: f"{n}: {m}")

    def test_levels_are_hugging_faces_hidden_states(self, target: sage.Target) -> None:
        """Also below the deepstack layers: the input of a layer contains the features added after the layer before."""
        inputs, levels = self.longest(target), range(target.num_layers + 1)
        states = hidden_states(target, inputs)
        found = target.features(target.embed(inputs), list(levels)).levels
        for level, state in zip(levels, found, strict=True):
            torch.testing.assert_close(state, states[level], **EXACT, msg=lambda m, n=level: f"level {n}: {m}")

    def test_padding_changes_nothing(self, target: sage.Target) -> None:
        short, *_, long = self.prompts(target).values()
        rows = [{k: v[0] if v.shape == i["input_ids"].shape else v for k, v in i.items()} for i in (long, short)]
        for row in rows:
            del row["attention_mask"]
        prompt = target.embed(target.processor.collate(rows))
        features = target.features(prompt).last
        for row, inputs in enumerate((long, short)):
            alone, length = target.embed(inputs), inputs["input_ids"].shape[1]
            torch.testing.assert_close(features[row, :length], target.features(alone).last[0], **EXACT)
            assert prompt.next_position[row] == alone.next_position[0]

    def test_a_tree_pass_is_its_paths(self, target: sage.Target) -> None:
        """Also one node alone, and after a reused prefix that ends between the images."""
        prompts = self.prompts(target)
        for name in prompts.keys() - {"short", "image", "video"}:
            expected, prompt = paths(target, prompts[name]), target.embed(prompts[name])
            for known in {0, between_media(prompt)}:
                for nodes in (len(TREE), 1):
                    found, case = tree(target, prompt, known, nodes), f"{name}, {known} tokens reused, {nodes} nodes"
                    torch.testing.assert_close(found, expected[:nodes], **EXACT, msg=lambda m, n=case: f"{n}: {m}")
        for nodes in (len(TREE), 1):  # with keys in two parts, and padding
            found = tree(target, prompt, nodes=nodes, executor=Captured(call_again))
            torch.testing.assert_close(found, expected[:nodes], **EXACT)

    def test_a_lost_mask_is_an_error(self, target: sage.Target, monkeypatch: pytest.MonkeyPatch) -> None:
        """Negative control: a dict of masks by layer type, which some text models drop, fails or changes nothing."""
        prompt = target.embed(self.longest(target))
        expected, mask = tree(target, prompt), target.family.tree_mask
        if target.family.window:
            return
        monkeypatch.setattr(target.family, "tree_mask", lambda *args: {"full_attention": mask(*args), "linear_attention": None})
        try:
            found = tree(target, prompt)
        except RuntimeError as error:
            assert "lost the mask" in str(error)
        else:
            torch.testing.assert_close(found, expected, **EXACT)

    def test_attention_to_visual_tokens_is_recorded(self, target: sage.Target) -> None:
        prompt = target.embed(self.longest(target))
        attention = target.prefill(prompt, target.new_cache(256), wants_attention=True).attention
        assert attention is not None and len(attention) == int(prompt.visual_mask.sum())
        assert bool((attention > 0).all()) and float(attention.sum()) <= 1

    # -- text and pixels -------------------------------------------------------------------------------------------------------

    def test_placeholders_match_the_vision_tower_at_any_resolution(self, target: sage.Target) -> None:
        if not self.has_images:
            with pytest.raises(ValueError, match=f"image: {target.family.model_type} takes no images"):
                target.prepare(user(image_part(8, 8), "what?"))
            return
        for width, height in SIZES:
            prompt = target.embed(in_double(target.prepare(user(image_part(width, height), "?"))))  # raises if they differ
            assert int(prompt.visual_mask.sum()) > 0

    def test_replacement_texts_are_hugging_faces(self, target: sage.Target) -> None:
        if not self.has_images:
            return
        family, processor = target.family, target.processor
        for sizes in ([(16, 8)], [(8, 8), (30, 11)]):
            images = [random_image(*size) for size in sizes]
            texts = family.image_texts(processor.image_processor, sizes)
            pixels, theirs = self.hugging_face_pixels(target, images), self.hugging_face(target)
            assert texts == [theirs.replace_image_token(pixels, i) for i in range(len(sizes))]
        if not self.has_video:
            with pytest.raises(ValueError, match=f"video: {family.model_type} takes no videos"):
                family.video_texts(processor.image_processor, [VideoSize(1, 8, 8)], [1.0])
            return
        for frames in (2, 3, 4):
            pixels = family.encode_videos(processor.image_processor, [[random_image(16, 16, i) for i in range(frames)]], [2.0])
            texts = family.video_texts(processor.image_processor, [VideoSize(frames, 16, 16)], [2.0])
            metadata = [VideoMetadata(total_num_frames=frames, fps=2.0, frames_indices=list(range(frames)))]
            assert texts == [self.hugging_face(target).replace_video_token({**pixels, "video_metadata": metadata}, 0)]

    def hugging_face(self, target: sage.Target) -> Any:
        """Returns Hugging Face's processor, built without its video processor, which needs torchvision."""
        theirs: Any = object.__new__(getattr(transformers, self.hf_processor))
        images = target.processor.image_processor
        parts = {"image_processor": images, "video_processor": images, "tokenizer": target.processor.tokenizer}
        tokens = {f"{kind}_token": token for kind, token in target.family.placeholders.items()}
        for name, value in {**parts, **tokens, **self.hugging_face_settings(target)}.items():
            setattr(theirs, name, value)
        return theirs

    def hugging_face_settings(self, target: sage.Target) -> dict[str, Any]:
        return {}

    def hugging_face_pixels(self, target: sage.Target, images: list[Any]) -> Any:
        """Returns what Hugging Face's processor reads to compute the texts of images."""
        return target.family.encode_images(target.processor.image_processor, images)

    def test_two_turn_chats_split_into_the_tokens_of_the_whole(self, target: sage.Target) -> None:
        """Supervised are the answers and the tokens that end them; together the pieces are the rendered chat."""
        first: list[Any] = [image_part(8, 8), "What?"] if self.has_images else ["What?"]
        chat: list[Message] = [*user(*first), assistant("A dog."), *user("And then?"), assistant("It runs.")]
        rendered = target.processor.tokens_of(target.processor.render(chat[:1], True))
        assert target.processor.prompt_ids(chat[:1]) == rendered  # a single placeholder for the image
        found = segments(chat, target.processor)
        end = target.processor.tokenizer.convert_ids_to_tokens(END)
        answers = [f"{self.answer_prefix}{answer}{end}" for answer in ("A dog.", "It runs.")]
        assert [piece for piece, is_supervised in found if is_supervised] == answers
        whole = "".join(piece for piece, _ in found)
        assert "".join(target.processor.render(chat, False).split()).startswith("".join(whole.split()))
        alone = "".join(piece for piece, _ in segments(chat[:2], target.processor))
        assert alone.startswith(target.processor.render(chat[:1], True))
        assert target.processor.render([{"role": "user", "content": "hi"}], True) == target.processor.render(user("hi"), True)
        images = [random_image(8, 8)] if self.has_images else []
        pieces, joined = (target.processor.encode(cut, images)["input_ids"].tolist() for cut in (found, [(whole, False)]))
        assert pieces == joined

    def test_lengths_from_sizes_are_those_of_the_example(self, target: sage.Target) -> None:
        """Also where images and videos are mixed, and for an example of a batch that is tokenized together."""
        if not self.has_images:
            return
        media = [[random_image(*size)] for size in [*SIZES, (90, 3), (33, 70), (64, 64)]]
        media += [[random_image(30, 11), random_image(9, 31)]]
        if self.has_video:
            media += [[[random_image(16, 24, i) for i in range(frames)]] for frames in (1, 2, 3, 5)]
            media += [[random_image(16, 16), [random_image(12, 16, i) for i in range(4)]]]
        chats, expected = [], []
        for items in media:
            parts = [{"type": "video" if isinstance(item, list) else "image", "video": item, "image": item} for item in items]
            found = segments([*user(*parts, "What?"), assistant("A dog."), *user("And?"), assistant("Two.")], target.processor)
            images, videos = ([i for i in items if isinstance(i, list) is is_video] for is_video in (False, True))
            sizes = [VideoSize(len(video), *video[0].size) for video in videos]
            rates = [1.5] * len(videos)
            chats.append(target.processor.with_media_texts(found, [image.size for image in images], sizes, rates))
            expected.append(target.processor.encode(found, images, videos, rates)["loss_mask"].tolist())
        for (pieces, omitted), counts, mask in zip(
            chats, target.processor.count_tokens([pieces for pieces, _ in chats]), expected, strict=True
        ):
            lengths = [count + more for count, more in zip(counts, omitted, strict=True)]
            assert mask == [flag for (_, flag), length in zip(pieces, lengths, strict=True) for _ in range(length)]

    # -- decoding, training, files ---------------------------------------------------------------------------------------------

    @pytest.mark.slow
    def test_prompts_decoded_together_have_the_texts_of_each_alone(self, target: sage.Target) -> None:
        prompts, draft = list(self.prompts(target).values()), sage.new_draft(target, "eagle", seed=0)
        options: dict[str, Any] = {"policy": "static", "max_new_tokens": NEW_TOKENS, "temperature": 0.9, "seed": 3}
        together = sage.generate_batch(target, draft, prompts, batch_size=3, **options)
        for answer, inputs in zip(together, prompts, strict=True):
            assert answer.tokens.tolist() == sage.generate(target, draft, inputs, **options).tokens.tolist()

    @pytest.mark.slow
    def test_the_text_is_generates(self, target: sage.Target, monkeypatch: pytest.MonkeyPatch) -> None:
        inputs = self.longest(target)
        expected = greedy_text(target, inputs, NEW_TOKENS)
        draft = sage.new_draft(target, "eagle", seed=0)
        shapes = use_cuda_layouts(monkeypatch)
        monkeypatch.setattr(generation, "new_session", lambda *_: OracleSession(expected, target.vocab_size, 1))
        out = sage.generate(target, draft, inputs, make_policy(*POLICY), max_new_tokens=NEW_TOKENS)
        assert out.tokens.tolist() == expected
        assert any(heads > 1 for _, heads, *_ in shapes)

    def test_every_kind_of_draft_is_trained(self, target: sage.Target) -> None:
        """A smaller model of the family as well, whose features are the target's where it has all its layers."""
        batch = target.processor.collate([self.example(target)] * 2)
        assert train_step(target, batch) > 0
        small = sage.new_draft(target, "model", num_layers=4).model
        assert small.num_layers == 4
        prompt = small.embed(self.longest(target))
        assert bool(small.features(prompt).last.isfinite().all())

    def example(self, target: sage.Target) -> Inputs:
        first: list[Any] = [image_part(8, 8), "What?"] if self.has_images else ["What?"]
        found = segments([*user(*first), assistant("A dog.")], target.processor)
        return in_double(target.processor.encode(found, [random_image(8, 8)] if self.has_images else []))

    @pytest.mark.slow
    def test_a_saved_target_loads_and_an_exported_draft_reloads(self, target: sage.Target, tmp_path: Path) -> None:
        """An export compares the draft read back from the engine's format with the trained one."""
        target.model.save_pretrained(tmp_path / "target")
        target.processor.save_pretrained(tmp_path / "target")
        loaded = sage.load_target(tmp_path / "target", torch.float64)
        self.prepare_float64(loaded.model)
        inputs = self.longest(target)
        again = loaded.features(loaded.embed(inputs)).last
        torch.testing.assert_close(again, target.features(target.embed(inputs)).last, **EXACT)
        assert loaded.processor.end_texts == target.processor.end_texts
        draft = random_draft(loaded, "eagle3", seed=3).float()
        draft.save_pretrained(tmp_path / "draft")
        out = export(tmp_path / "draft", tmp_path / "out", "eagle3", ExportOptions(allow_unserved=True))
        assert out is not None and sage.load_draft(tmp_path / "draft", loaded).config.target == target.fingerprint

    def test_a_plan_counts_the_parameters(self, target: sage.Target) -> None:
        planned = meta_target(self.config())
        assert count(planned.model) == count(target.model)
        active = planned.family.active_parameters(planned.model)
        assert 0 < active <= count(target.model)
        width, mlp_width, values = planned.family.vision_sizes
        assert (width > 0, mlp_width > 0, values > 0) == (self.has_images,) * 3
