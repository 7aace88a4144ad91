"""EAGLE and EAGLE-3 heads: training against decoding, saving, loading, errors."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.data_helpers import save_target
from support.messages import refused
from support.models import EAGLE_3_1, in_float64, make_inputs, random_draft

import sage
from sage.commands import cli
from sage.drafts.draft import new_session, open_draft
from sage.drafts.eagle import Eagle3Draft, default_levels
from sage.drafts.model import ModelDraft


def test_tree_levels_equal_chains(tiny_target: sage.Target) -> None:
    """Each of two branches drafted in one tree equals the branch drafted alone."""
    inputs = in_float64(tiny_target, make_inputs(tiny_target))
    draft = random_draft(tiny_target, seed=3)
    prompt = tiny_target.embed(inputs)
    features = tiny_target.features(prompt)
    root = torch.tensor([7])

    def run(branches: list[list[int]]) -> torch.Tensor:
        session = new_session(draft, tiny_target, 64)
        session.prefill(prompt, features, root)
        logits = torch.empty(0)
        for level in range(len(branches[0])):
            rows = torch.zeros(len(branches), dtype=torch.long) if level == 0 else torch.arange(len(branches))
            logits = session.expand(rows, torch.tensor([branch[level] for branch in branches]))
        return logits

    together = run([[3, 4, 5], [8, 9, 10]])
    for row, branch in enumerate([[3, 4, 5], [8, 9, 10]]):
        torch.testing.assert_close(together[row], run([branch])[0], atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_round_trip_is_bit_exact_without_target_weights(tiny_target: sage.Target, kind: str, tmp_path: Path) -> None:
    """An EAGLE-3 head with a vocabulary of its own has an lm_head of its own."""
    draft = random_draft(tiny_target, kind, seed=5, vocabulary=torch.arange(0, 330, 3) if kind == "eagle3" else None)
    draft.save_pretrained(tmp_path)
    loaded = sage.load_draft(tmp_path, tiny_target)
    state = draft.state_dict()
    assert type(loaded) is type(draft) and not any("embed" in name for name in state)
    assert any("lm_head" in name for name in state) == (kind == "eagle3")
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    inputs = make_inputs(tiny_target)
    first, second = (sage.generate(tiny_target, d, inputs, "static", max_new_tokens=12).stats.accepted for d in (draft, loaded))
    assert first == second


def test_image_inputs_token_hides_the_image(tiny_qwen: sage.Target) -> None:
    prompt = tiny_qwen.embed(make_inputs(tiny_qwen))
    features = tiny_qwen.features(prompt)
    outs = []
    for choice in ("embed", "token"):
        draft = random_draft(tiny_qwen, seed=0, image_inputs=choice)
        outs.append(new_session(draft, tiny_qwen, 64).prefill(prompt, features, torch.tensor([5])))
    assert not torch.equal(*outs)


class TestEagle3:
    @pytest.fixture
    def vocabulary(self) -> torch.Tensor:
        return torch.arange(0, 330, 3)

    def draft(self, target: sage.Target, vocabulary: torch.Tensor | None = None) -> Eagle3Draft:
        return random_draft(target, "eagle3", seed=0, vocabulary=vocabulary)

    def test_drafts_only_tokens_of_the_draft_vocabulary(self, tiny_qwen: sage.Target, vocabulary: torch.Tensor) -> None:
        draft = self.draft(tiny_qwen, vocabulary)
        assert torch.equal(draft.token_map, vocabulary)
        assert draft.t2d.nonzero()[:, 0].tolist() == vocabulary.tolist()
        assert torch.equal(draft.d2t, vocabulary - torch.arange(len(vocabulary)))
        assert self.draft(tiny_qwen).token_map is None

    def test_norms_of_eagle_3_1_equal_a_naive_reference(self, tiny_llava: sage.Target) -> None:
        """In float64, pair after pair and head after head: logits of three levels, the later ones from the normed output. Our
        rope is computed in float32."""
        inputs = in_float64(tiny_llava, make_inputs(tiny_llava, length=9))
        draft = random_draft(tiny_llava, "eagle3", seed=0, **EAGLE_3_1)
        prompt, tokens = tiny_llava.embed(inputs), torch.tensor([5, 7, 9])
        features = tiny_llava.features(prompt, draft.levels)
        session = new_session(draft, tiny_llava, 64)
        ours = [session.prefill(prompt, features, tokens[:1])]
        ours += [session.expand(torch.tensor([0]), token[None]) for token in tokens[1:]]
        embeds = torch.cat((prompt.embeds[0, 1:], tiny_llava.embed_tokens(tokens)))
        expected = naive_logits(draft, torch.stack(features.levels)[:, 0], embeds)
        torch.testing.assert_close(torch.cat(ours), expected, atol=1e-6, rtol=0)

    def test_default_levels(self) -> None:
        assert default_levels(28) == [2, 14, 25]
        with refused("draft.feature_levels", "3 layers"):
            default_levels(3)

    def test_invalid_vocabularies(self, tiny_qwen: sage.Target) -> None:
        for ids in (torch.tensor([3, 2]), torch.tensor([1, 400])):
            with refused("draft.draft_vocab_size"):
                sage.new_draft(tiny_qwen, "eagle3", vocabulary=ids, feature_levels=[1, 2, 3])
        with refused("draft: eagle", "vocabulary"):
            sage.new_draft(tiny_qwen, vocabulary=torch.tensor([1, 2]))


@torch.no_grad()
def naive_logits(draft: Eagle3Draft, levels: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
    """Returns logits of a chain of EAGLE-3.1, [levels of the chain, U], from feature levels [A, T, D] and embeddings of later
    tokens.
    """
    w, config = draft.state_dict(), draft.config
    keys, values, fed, logits = [], [], None, []
    for position, embed in enumerate(embeds):
        if position < levels.shape[1]:
            fed = w["fc.weight"] @ torch.cat([rms(x, w[f"fc_norm.{i}.weight"]) for i, x in enumerate(levels[:, position])])
        layer = {name.removeprefix("midlayer."): weight for name, weight in w.items()}
        pair = torch.cat((rms(embed, layer["input_layernorm.weight"]), rms(fed, layer["hidden_norm.weight"])))
        query, key, value = ((layer[f"self_attn.{x}_proj.weight"] @ pair).view(-1, config.head_dim) for x in "qkv")
        keys.append(rotated(key, position, config.rope_theta))
        values.append(value)
        query, shared = rotated(query, position, config.rope_theta), len(query) // len(key)
        heads = []
        for head, row in enumerate(query):
            scores = torch.stack([row @ key[head // shared] for key in keys]) * config.head_dim**-0.5
            heads.append(scores.softmax(0) @ torch.stack([value[head // shared] for value in values]))
        hidden = fed + layer["self_attn.o_proj.weight"] @ torch.cat(heads)
        normed = rms(hidden, layer["post_attention_layernorm.weight"])
        gated = torch.nn.functional.silu(layer["mlp.gate_proj.weight"] @ normed) * (layer["mlp.up_proj.weight"] @ normed)
        fed = rms(hidden + layer["mlp.down_proj.weight"] @ gated, w["norm.weight"])
        logits.append(w["lm_head.weight"] @ fed)
    return torch.stack(logits[levels.shape[1] - 1 :])


def rms(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return states / (states.square().mean() + 1e-6).sqrt() * weight


def rotated(heads: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    half = heads.shape[1] // 2
    angles = position * theta ** -(torch.arange(half, dtype=heads.dtype) / half)
    first, second = heads[:, :half], heads[:, half:]
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), 1)


def cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def resize(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (config.get("text_config") or config)["intermediate_size"] = 56
    (folder / "config.json").write_text(json.dumps(config))


CORRUPTIONS: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights cut": (cut, "its weights cannot be read (Error while deserializing header"),
    "weights gone": (lambda folder: (folder / "model.safetensors").unlink(), "its weights cannot be read (Error no file named"),
    "weights no tensors": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        "its weights cannot be read (not a file of tensors)",
    ),
    "sizes": (resize, "its weights do not fit its config: "),
    "config cut": (lambda folder: (folder / "config.json").write_text('{"model_type": '), "cannot read its config.json ("),
    "config no text": (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe"), "cannot read its config.json ("),
    "config a list": (lambda folder: (folder / "config.json").write_text("[]"), "its config.json"),
}


class TestMistakes:
    def test_draft_for_another_target_names_both(self, tiny_qwen: sage.Target, tiny_llava: sage.Target, tmp_path: Path) -> None:
        sage.new_draft(tiny_llava).save_pretrained(tmp_path)
        with refused("made for llava_onevision (", "target is qwen2_5_vl ("):
            sage.load_draft(tmp_path, tiny_qwen)

    def test_missing_weights_are_named(self, tiny_qwen: sage.Target, tmp_path: Path) -> None:
        from safetensors.torch import load_file, save_file

        sage.new_draft(tiny_qwen).save_pretrained(tmp_path)
        state = load_file(tmp_path / "model.safetensors")
        del state["fc.weight"]
        save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with refused("fc.weight is missing"):
            sage.load_draft(tmp_path, tiny_qwen)

    @pytest.mark.parametrize("what", ["draft", "target"])
    @pytest.mark.parametrize("corruption", CORRUPTIONS)
    def test_a_corrupt_folder_is_named_in_one_line(self, tmp_path, what, corruption, capsys):
        """A corrupt draft, a corrupt target, and a corrupt target used as a draft."""
        target = sage.load_target(save_target("qwen2_5_vl", tmp_path / "target"))
        random_draft(target).save_pretrained(tmp_path / "draft")
        broken, (corrupt, message) = tmp_path / what, CORRUPTIONS[corruption]
        corrupt(broken)
        tries = {"draft": [lambda: sage.load_draft(broken, target)], "target": [lambda: sage.load_target(broken)]}[what]
        if what == "target" and "config" not in corruption:  # without a config it is no target
            tries.append(lambda: sage.load_draft(broken, target))
        capsys.readouterr()
        for load in tries:
            assert cli.run(lambda load=load: load() and None) == 2
            printed = capsys.readouterr().err
            error = printed[printed.index("error: ") :]  # after a progress bar
            assert error.startswith(f"error: {what}: {broken}: ") and len(error.splitlines()) == 1 and "REPORT" not in printed
            assert message in error and "again" in error.rsplit(";", 1)[1]

    def test_dtype_of_heads_and_of_smaller_models(self, tmp_path: Path) -> None:
        target = sage.load_target(save_target("qwen2_5_vl", tmp_path / "target"))
        random_draft(target).save_pretrained(tmp_path / "draft")
        with refused(f"draft: {tmp_path / 'draft'}", "torch.bfloat16", "torch.float32"):
            sage.load_draft(tmp_path / "draft", target, dtype=torch.bfloat16)
        assert open_draft(tmp_path / "draft", target, torch.bfloat16).dtype == torch.bfloat16  # as training needs it
        small = sage.load_draft(tmp_path / "target", target, dtype=torch.bfloat16)
        assert isinstance(small, ModelDraft) and small.model.dtype == torch.bfloat16
        sage.generate(target, small, target.prepare([{"role": "user", "content": "hello"}]), policy="chain", max_new_tokens=4)

    def test_unknown_kind_and_key(self, tiny_qwen: sage.Target) -> None:
        with refused("'eagel'", "eagle, eagle3"):
            sage.new_draft(tiny_qwen, "eagel")
        with refused("draft.widht"):
            sage.new_draft(tiny_qwen, widht=3)
        with refused("draft.image_inputs", "'pixels'", "embed, token"):
            sage.new_draft(tiny_qwen, image_inputs="pixels")
