"""Qwen3.5, dense and sparse, with and without images: states of linear layers at the nodes of trees."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.family_passes import TREE, Exported, paths, tree, use_cuda_layouts
from support.family_suite import EXACT, QWEN_TEMPLATE, QWEN_TOKENS, FamilySuite, qwen_images, text
from support.models import QWEN_IDS, greedy_text, in_double, token_fields
from support.pass_helpers import answer, call_again, capture_with, head, tree_pass
from support.processors import user
from support.quantized_targets import resume
from support.train_helpers import make_target
from torch import Tensor
from transformers import Qwen3_5Config, Qwen3_5MoeConfig, Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

import sage
from sage.decoding.decoder import TURN_TOKENS
from sage.decoding.generation import Chat
from sage.planning.tree import Tree
from sage.runtime.executors import describe_passes
from sage.runtime.linear_states import Window
from sage.runtime.modes import PassMode
from sage.targets.tree_passes import RecurrentTreeInputs, TreePasses

ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
ROPE |= {"partial_rotary_factor": 0.5}
VISION = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32}
VISION |= {"num_position_embeddings": 16}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}


def step_by_step(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """The gated delta rule token by token in float64; arguments and results as of transformers' own, in float32."""
    group = value.shape[2] // key.shape[2]
    query, key = (part.double().repeat_interleave(group, 2) for part in (query, key))
    query, key = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (query, key))
    query = query * query.shape[-1] ** -0.5
    state = value.new_zeros(value.shape[0], value.shape[2], key.shape[-1], value.shape[-1], dtype=torch.float64)
    state = state if initial_state is None else initial_state.double()
    out = []
    for t in range(value.shape[1]):
        state = state * g[:, t].double().exp()[..., None, None]
        update = beta[:, t, :, None] * (value[:, t] - torch.einsum("bhkv,bhk->bhv", state, key[:, t]))
        state = state + key[:, t, :, :, None] * update[:, :, None]
        out.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]))
    return torch.stack(out, 1).to(value.dtype), state


@pytest.fixture(autouse=True)
def exact_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models and prefills compute the rule step by step in float64."""
    for module in (modeling_qwen3_5, modeling_qwen3_5_moe, modeling_qwen3_next):
        for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
            monkeypatch.setattr(module, name, step_by_step)


def texts(**more: Any) -> dict[str, Any]:
    """Returns the configuration of text layers, three of which are linear."""
    types = ["full_attention" if layer in (2, *range(4, 8)) else "linear_attention" for layer in range(8)]
    return text(head_dim=16, rope_parameters=ROPE, layer_types=types, **LINEAR, **more)


class TestQwen3_5(FamilySuite):
    template, tokens, hf_processor = QWEN_TEMPLATE, QWEN_TOKENS, "Qwen3VLProcessor"

    def config(self) -> Any:
        return Qwen3_5Config(text_config=texts(), vision_config=VISION, **QWEN_IDS)

    def image_processor(self) -> Any:
        return qwen_images()

    def hugging_face_settings(self, target: sage.Target) -> dict[str, Any]:
        return {"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"}

    def prepare_float64(self, model: Any) -> None:
        model.set_experts_implementation("eager")

    @pytest.fixture
    def target(self) -> sage.Target:
        """A new one for each test: models keep the rule that they are made with."""
        return self.target_of(self.config())

    @pytest.mark.parametrize("fault", ["sibling", "window"])
    def test_negative_controls(self, target: sage.Target, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The state of a sibling, and a convolution whose window is off by one."""
        inputs = self.prompts(target)["text"]
        window = RecurrentTreeInputs.window

        def faulty(self: RecurrentTreeInputs, kernel: int) -> Window:
            found = window(self, kernel)
            if fault == "window":
                found.taps = (found.taps - 1).clamp(min=0)
                return found
            return replace(found, visible=torch.ones_like(found.visible).tril())

        monkeypatch.setattr(RecurrentTreeInputs, "window", faulty)
        wrong = (tree(target, target.embed(inputs)) - paths(target, inputs)).abs().amax(-1) > 1e-3
        assert wrong.tolist() == ([True] * 5 if fault == "window" else [False, False, True, True, True])

    def test_states_at_every_node_of_random_trees(self, target: sage.Target) -> None:
        """Each equals the state after a prompt that ends with the node's path, whose tokens are read one by one."""
        prompt, generator = target.embed(self.prompts(target)["short"]), torch.Generator().manual_seed(0)
        parents = [-1, *(int(torch.randint(node, (1,), generator=generator)) for node in range(1, 9))]
        depths = [0] * len(parents)
        for node, parent in enumerate(parents[1:], 1):
            depths[node] = depths[parent] + 1
        found = Tree(torch.randint(64, 300, (9,), generator=generator), torch.tensor(parents), torch.tensor(depths))
        start = target.new_cache(64)
        target.prefill(prompt, start)
        first = start.length
        tree_pass(target, found.tokens, prompt.next_position + found.depths, found.ancestors, start)
        for node in range(len(found)):
            ours, path = copy.deepcopy(start), found.ancestors[node].nonzero()[:, 0]
            ours.keep_path(first, path.tolist())
            ours.reserve(0)
            whole, theirs = torch.cat((prompt.input_ids[0], found.tokens[path])), target.new_cache(64)
            target.prefill(target.embed(token_fields(target, whole[None])), theirs)
            assert ours.length == theirs.length
            torch.testing.assert_close(ours.states.linear_state, theirs.states.linear_state, **EXACT)
            kept = slice(0, target.linear.kernel - 1)
            torch.testing.assert_close(ours.states.linear_inputs[:, :, kept], theirs.states.linear_inputs[:, :, kept], **EXACT)

    def test_a_tree_that_grows_pass_by_pass_is_its_paths(self, target: sage.Target) -> None:
        """As when a target is the draft: later passes see the nodes of earlier ones, which another pass then drops."""
        inputs = self.prompts(target)["text"]
        prompt, expected, cache = target.embed(inputs), paths(target, inputs), target.new_cache(200)
        target.prefill(prompt, cache)
        for _ in range(2):
            known, parts = cache.length, []
            for first, end in ((0, 1), (1, 3), (3, 4), (4, 5)):
                at = slice(first, end)
                positions, visible = prompt.next_position + TREE.depths[at], TREE.ancestors[at, :end]
                parts.append(tree_pass(target, TREE.tokens[at], positions, visible, cache).last[0])
            torch.testing.assert_close(torch.cat(parts), expected, **EXACT)
            cache.crop_to(known)
        cache.crop_to(known - 1)
        assert cache.length == 0 and not cache.states.linear_state.any()

    def test_chats(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Texts are those of whole prompts, also where a turn drops the empty thoughts of the one before; what the turns share
        is not read again but for the end of a prompt.
        """
        thoughts = "{% if add_generation_prompt %}<think></think>{% endif %}"
        target, reads = self.target_of(self.config(), self.template + thoughts), []
        read = target.read
        monkeypatch.setattr(
            target, "read", lambda prompt, *rest: reads.append(prompt.input_ids.shape[1]) or read(prompt, *rest)
        )
        chat = Chat(target, sage.new_draft(target, "eagle", seed=0), "static", max_new_tokens=6)
        for question in ("what is it that you see?", "and then?"):
            inputs = in_double(target.prepare([*chat.messages, *user(question)]))
            assert chat.ask(question).tokens.tolist() == greedy_text(target, inputs, 6)
        first, second = reads[:2], reads[2:]
        assert first[1] == TURN_TOKENS and sum(second) == inputs["input_ids"].shape[1] - first[0]

    def test_captured_passes_are_those_of_the_draft(self, target: sage.Target, monkeypatch: pytest.MonkeyPatch) -> None:
        capture_with(monkeypatch, call_again)
        use_cuda_layouts(monkeypatch)
        draft = head(target).double()
        expected = answer(target, draft, PassMode.eager, "sage")
        assert answer(target, draft, PassMode.captured, "sage") == expected
        functions = draft.pass_functions(target), target.functions.values()
        assert [any(function.kept for function in each) for each in functions] == [True, False]
        assert describe_passes(target).startswith("eager, for it has linear layers; those of the draft captured")

    def test_modules_run_in_the_models_order(self, target: sage.Target) -> None:
        """ZeRO-3 gathers weights module by module; ranks without requests run the model's own forward."""
        prompt, orders = target.embed(self.prompts(target)["short"]), []
        for name, module in target.text_model.layers.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: orders[-1].append(name))
        for cache in (None, target.new_cache(64)):
            orders.append([])
            target.read(prompt, cache)
        orders.append([])
        tree_pass(target, TREE.tokens, prompt.next_position + TREE.depths, TREE.ancestors, cache)
        assert orders[0] == orders[1] == orders[2] and len(orders[0]) > 50


@pytest.mark.slow
def test_an_exported_pass_is_its_paths() -> None:
    """Of trees of any size, after pending tokens or none; of a target whose layers are all linear."""
    config = Qwen3_5TextConfig(**texts() | {"num_hidden_layers": 1, "layer_types": ["linear_attention"]})
    target = sage.Target(TestQwen3_5().model_of(config))
    prompt = target.embed(token_fields(target, torch.randint(64, 300, (1, 12), generator=torch.Generator().manual_seed(0))))
    passes = TreePasses(target, (), Exported())
    for nodes in (5, 3):
        found = []
        for own in (passes, TreePasses(target, ())):
            cache = target.new_cache(64)
            target.prefill(prompt, cache)
            for path in ([0, 1], [0]):
                ancestors, first = TREE.ancestors[:nodes, :nodes], cache.length
                positions = prompt.next_position + first - 12 + TREE.depths[:nodes]
                found.append(own(TREE.tokens[:nodes], positions, ancestors, cache).logits)
                cache.keep_path(first, path)
        torch.testing.assert_close(found[:2], found[2:], atol=1e-4, rtol=0)


@pytest.mark.slow
def test_training_resumes_exactly(tmp_path: Path) -> None:
    resume(make_target(tmp_path, "qwen3_5", layers=4), tmp_path)


SPARSE = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2}
OTHERS: dict[str, Any] = {
    "text": lambda: Qwen3_5TextConfig(**texts()),
    "sparse": lambda: Qwen3_5MoeConfig(text_config=texts(**SPARSE), vision_config=VISION, **QWEN_IDS),
    "sparse text": lambda: Qwen3_5MoeTextConfig(**texts(**SPARSE)),
    "next": lambda: Qwen3NextConfig(**texts(**SPARSE)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_checkpoints(name: str) -> None:
    """A tree is its paths, in text models and mixtures of experts too; their drafts have one axis and the width of experts."""
    suite, config = TestQwen3_5(), OTHERS[name]()
    target = sage.Target(suite.model_of(config).double())
    inputs = token_fields(target, torch.randint(64, 300, (1, 12), generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(tree(target, target.embed(inputs)), paths(target, inputs), **EXACT)
    draft = sage.new_draft(target, "eagle").config
    assert (draft.mrope_section is None, draft.intermediate_size) == (name != "sparse", 48)
    assert sage.generate(target, None, inputs, "autoregressive", max_new_tokens=4).tokens.tolist() == greedy_text(
        target, inputs, 4
    )
