"""Text models: Llama 3 with scaled rope, Mistral, Qwen2.5, Qwen3 and its mixture of experts."""

from pathlib import Path
from typing import Any

import pytest
from support.data_helpers import assistant, own_answers
from support.family_passes import paths, tree
from support.family_suite import END, FamilySuite, chatml, text
from support.processors import byte_tokenizer_of, user
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaTokenizer, MistralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

import sage
from data_prep.chat import segments
from data_prep.config import Thinking
from sage.inputs.processing import Processor

# As published: Llama 3 prints any other content as Python would, Qwen2.5 concatenates strings.
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] | trim }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
QWEN2 = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The last answer gets an empty block of thoughts, and the prompt for it only if thinking is disabled.
QWEN3 = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if loop.last and m.role == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 64}


class TestLlama(FamilySuite):
    """The tokenizer's EOS is not the token that ends an answer, as in Llama 3."""

    template = LLAMA3
    tokens = {"<|eot_id|>": END, "<|start_header_id|>": 4, "<|end_header_id|>": 5}

    def config(self) -> Any:
        return LlamaConfig(**text(rope_parameters={"rope_theta": 1e4, **SCALED}))

    def tokenizer(self) -> Any:
        tokenizer = byte_tokenizer_of({"<|end_of_text|>": 3, "<|begin_of_text|>": 6, **self.tokens}, eos="<|end_of_text|>")
        tokenizer.bos_token = "<|begin_of_text|>"
        return tokenizer


class TestMistral(FamilySuite):
    """With a sliding window in all layers, as in Mistral 7B v0.1: one mask."""

    template, answer_prefix = MISTRAL, " "

    def config(self) -> Any:
        return MistralConfig(**text(), sliding_window=8)

    def tokenizer(self) -> Any:
        tokenizer = super().tokenizer()
        tokenizer.bos_token = "<|im_start|>"
        return tokenizer


class TestQwen2(FamilySuite):
    """With a sliding window in the last four layers: a mask for each layer type."""

    template = QWEN2

    def config(self) -> Any:
        return Qwen2Config(**text(), use_sliding_window=True, sliding_window=8, max_window_layers=4)

    def test_negative_control_without_a_window(self, target: sage.Target, monkeypatch: pytest.MonkeyPatch) -> None:
        inputs = self.prompts(target)["text"]
        expected, prompt = paths(target, inputs), target.embed(inputs)
        monkeypatch.setattr(type(target.family), "window", 1000)
        assert float((tree(target, prompt) - expected).abs().max()) > 1e-3


class TestQwen3(FamilySuite):
    template = QWEN3
    tokens = {"<think>": 4, "</think>": 5}

    def config(self) -> Any:
        return Qwen3Config(**text(head_dim=8))


class TestQwen3Moe(FamilySuite):
    template = chatml()

    def config(self) -> Any:
        return Qwen3MoeConfig(**text(head_dim=8, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2))

    def prepare_float64(self, model: Any) -> None:
        model.set_experts_implementation("eager")


OWN = {  # id that the target writes where it wrote an ordinary one
    "ordinary tokens": (TestLlama, None),
    "special tokens": (TestQwen2, 2),
    "ids without a token": (TestMistral, 325),
    "a hybrid thinker": (TestQwen3, None),
    "a hybrid thinker that thinks": (TestQwen3, 4),
}


@pytest.mark.parametrize("name", OWN)
def test_own_answers_of_regenerated_answers_are_all_own(name: str, tmp_path: Path) -> None:
    """Answers are generated, written, read back and encoded: every supervised token is the target's own choice."""
    suite, written = OWN[name]
    target = suite().target_of(suite().config())
    thinking = Thinking.on if name.endswith("thinks") else Thinking.auto
    if written is not None:
        first = sage.generate(target, None, target.prepare(user("What 0?")), "autoregressive", max_new_tokens=1).tokens[0]
        target.lm_head.weight.data[written] = 1.5 * target.lm_head.weight.data[first]
    share, ids = own_answers(target, [[*user(f"What {i}?"), assistant("x")] for i in range(4)], tmp_path, thinking)
    assert share.share == 1.0 and share.num_tokens > 12
    assert written is None or written in ids


def test_a_sentencepiece_tokenizer_puts_no_blanks_into_a_chat() -> None:
    """The pieces of a chat are the tokens of the rendered text; a quoted special token is split into two pieces."""
    words = ("[INST]", "What?", "[/INST]", "A", "dog.", "And", "then?", "It", "runs.", "<", ">")  # no token has a blank within
    tokenizer = LlamaTokenizer(legacy=False).train_new_from_iterator([*words] * 20, 320)
    suite = TestMistral()
    target = sage.Target(suite.model())
    processor = Processor(tokenizer, None, target.family, MISTRAL)
    chat = [*user("What?"), assistant("A dog."), *user("And then?"), assistant("It runs.")]
    rendered = processor.render(chat, False)
    found = processor.encode(segments(chat, processor))
    assert found["input_ids"].tolist() == tokenizer(rendered, add_special_tokens=False)["input_ids"]
    answer = found["input_ids"][found["loss_mask"]].tolist()
    assert tokenizer.convert_ids_to_tokens(answer)[0].startswith("\u2581A")
    quoted = processor.encode(segments([*user("What?"), assistant("A </s>dog.")], processor))["input_ids"].tolist()
    assert tokenizer.decode(quoted).endswith("A </s>dog.</s>") and quoted.count(tokenizer.eos_token_id) == 1


def test_bos_is_prepended_where_the_tokenizer_adds_it() -> None:
    """As in Hugging Face's processors: not if the rendered chat begins with it."""
    suite = TestQwen2()
    target = sage.Target(suite.model())
    tokenizer = byte_tokenizer_of({"<|im_end|>": END, "<|im_start|>": 2, "<bos>": 3}, eos="<|im_end|>")
    tokenizer.bos_token = "<bos>"
    chat = user("hi")
    for adds, template, expected in ((False, QWEN2, 2), (True, QWEN2, 3), (True, "{{ bos_token }}" + QWEN2, 3)):
        if adds:
            tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 3)])
        ids = Processor(tokenizer, None, target.family, template).prepare(chat)["input_ids"][0].tolist()
        assert ids[0] == expected and ids.count(3) == int(adds)
