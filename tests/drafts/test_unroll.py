"""The unrolled forward of training against decoding: the chain of a session, and attention under a dense mask."""

import pytest
import torch
from support.models import EAGLE_3_1, cut, in_float64, make_inputs, random_draft
from torch import Tensor

import sage
from sage.drafts.draft import new_session
from sage.drafts.layer import GatedLayer
from sage.drafts.spans import HeadInput
from sage.drafts.unroll import Chains, attend_with_chain

STEPS = 4


@pytest.mark.parametrize(("kind", "norms"), [("eagle", {}), ("eagle3", {}), ("eagle3", EAGLE_3_1)])
def test_unroll_equals_a_drafted_chain(tiny_target: sage.Target, kind: str, norms: dict[str, bool]) -> None:
    """Row s of step i equals a session that has read up to pair s and then drafted the next i tokens of the text, and its
    logits are those of the session."""
    inputs = in_float64(tiny_target, make_inputs(tiny_target, length=14))
    draft = random_draft(tiny_target, kind, seed=3, **norms)
    prompt = tiny_target.embed(inputs)
    features = tiny_target.features(prompt, draft.levels)
    tokens = inputs["input_ids"][0]
    with torch.no_grad():
        fused = draft.fuse(features)[:, :-1]
        unrolled = draft.unroll(HeadInput(prompt.embeds[:, 1:], fused, prompt.position_ids[..., :-1]), STEPS)
    pairs = len(tokens) - 1
    assert [step.shape[1] for step in unrolled] == [pairs - i for i in range(STEPS)]
    first = int(prompt.visual_mask[0].nonzero().max()) + 1  # the first root after the image
    for root in range(first, pairs):
        session = new_session(draft, tiny_target, 64)
        known = prompt.at(torch.arange(root + 1))
        known.next_position = tiny_target.embed(cut(inputs, root + 1)).next_position
        logits = session.prefill(known, features.at(torch.arange(root + 1)), tokens[root + 1 : root + 2])
        for step in range(min(STEPS, pairs - root)):
            if step:
                logits = session.expand(torch.tensor([0]), tokens[root + 1 + step : root + 2 + step])
            torch.testing.assert_close(unrolled[step][0, root], session.hidden[0], atol=1e-11, rtol=1e-11)
            expected = draft.logits(unrolled[step][0, root], tiny_target)
            torch.testing.assert_close(logits[0], expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_only_the_last_pair_attends_where_nothing_else_is_read(tiny_qwen: sage.Target, kind: str) -> None:
    """A prompt and accepted tokens become keys and values; their attention output and MLP are computed for the last pair."""
    inputs = make_inputs(tiny_qwen, length=14)
    draft, prompt, tokens = random_draft(tiny_qwen, kind, seed=3), tiny_qwen.embed(inputs), inputs["input_ids"][0]
    features, session = tiny_qwen.features(prompt, draft.levels), new_session(draft, tiny_qwen, 64)
    rows: dict[str, list[int]] = {"o_proj": [], "outputs": []}
    for name, module in draft.named_modules():
        if (key := name.rpartition(".")[2]) in rows:
            module.register_forward_pre_hook(lambda _, states, key=key: rows[key].append(states[0].shape[1]))
    layer = next(module for module in draft.modules() if isinstance(module, GatedLayer))
    layer.register_forward_hook(lambda _, __, out: rows["outputs"].append(out.shape[1]))
    session.prefill(prompt, features, tokens[-1:])
    assert session.context == len(tokens)
    session.commit(features.at(torch.arange(3)), tokens[:3])
    assert session.context == len(tokens) + 3
    assert rows["o_proj"] == rows["outputs"] == [1, 1]


def test_sequences_shorter_than_the_steps_end_early(tiny_qwen: sage.Target) -> None:
    draft = random_draft(tiny_qwen, seed=3)
    states = torch.zeros(1, 2, 32)
    pairs = HeadInput(states, states, torch.zeros(3, 1, 2, dtype=torch.long))
    assert [out.shape[1] for out in draft.unroll(pairs, STEPS)] == [2, 1]


def naive(queries: list[Tensor], keys: list[Tensor], values: list[Tensor]) -> list[Tensor]:
    """Reference attention over the concatenated keys of all steps under a dense mask: [T, steps * T] weights."""
    batch, heads, pairs, size = queries[0].shape
    group = heads // keys[0].shape[1]
    outs = []
    for step, query in enumerate(queries):
        rows = pairs - step
        masks = [torch.ones(rows, pairs, dtype=torch.bool).tril()]
        masks += [torch.eye(rows, pairs - i, dtype=torch.bool) for i in range(1, step + 1)]
        key, value = (torch.cat(parts[: step + 1], 2).repeat_interleave(group, 1) for parts in (keys, values))
        scores = query @ key.transpose(2, 3) * size**-0.5
        outs.append(scores.masked_fill(~torch.cat(masks, 1), -torch.inf).softmax(-1) @ value)
    return outs


def chain_inputs(dtype: torch.dtype, spread: float = 1.0) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        [spread * torch.randn(2, heads, 9 - step, 16, generator=generator, dtype=torch.float64) for step in range(STEPS)]
        for heads in (6, 2, 2)
    ]


@pytest.mark.parametrize("spread", [1.0, 6.0])
def test_attention_and_its_gradient_equal_the_dense_mask(spread: float) -> None:
    """A scale of 6 gives scores of several hundred, where exp() overflows."""
    results = []
    for attend in ("ours", "naive"):
        queries, keys, values = chain_inputs(torch.float64, spread)
        leaves = [tensor.requires_grad_() for group in (queries, keys, values) for tensor in group]
        if attend == "ours":
            chains = Chains()
            outs = [chains.attend(q, k, v) for q, k, v in zip(queries, keys, values, strict=True)]
        else:
            outs = naive(queries, keys, values)
        weights = torch.Generator().manual_seed(1)
        sum((out * torch.randn(out.shape, generator=weights, dtype=out.dtype)).sum() for out in outs).backward()
        results.append((outs, [leaf.grad for leaf in leaves]))
    for ours, expected in zip(results[0][0], results[1][0], strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-12, rtol=1e-12)
    for ours, expected in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-10, rtol=1e-10)


def test_bf16_keeps_the_share_of_the_chain() -> None:
    """Rounding inputs and weights to 8 bits costs about 1%; a share stored as a single bf16 number would cost 10%."""
    queries, keys, values = ([t.bfloat16() for t in group] for group in chain_inputs(torch.float64, 2.0))
    chains = Chains()
    ours = [chains.attend(q, k, v) for q, k, v in zip(queries, keys, values, strict=True)]
    wide = naive(*([t.double() for t in group] for group in (queries, keys, values)))
    for out, expected in zip(ours, wide, strict=True):
        assert float((out.double() - expected).abs().max()) < 0.02 * float(expected.abs().max())


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float16, 3e-3), (torch.bfloat16, 2e-2)])
def test_a_step_and_its_gradient_equal_those_in_float64(dtype: torch.dtype, bound: float) -> None:
    """On a GPU where there is one: relative errors of the result and of the gradient of each input."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows, generator = 1024 if torch.cuda.is_available() else 12, torch.Generator().manual_seed(0)
    shapes = [(1, 28, rows, 128), *[(1, 4, rows, 128)] * 2, *[(1, 4, rows, 6, 128)] * 2]
    given = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    results = []
    for tensors in (given, [tensor.double() for tensor in given]):
        leaves = [tensor.requires_grad_() for tensor in tensors]
        out = attend_with_chain(*leaves)
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
    for ours, exact in zip(*results, strict=True):
        assert float((ours.double() - exact).norm() / exact.norm()) < bound


def test_negative_control_later_keys_are_masked(tiny_qwen: sage.Target) -> None:
    """The target's feature of token t + 1 must not reach a draft that has read up to token t."""
    draft = random_draft(tiny_qwen, seed=3).double()
    embeds, features = torch.randn(2, 1, 8, 32, dtype=torch.float64)
    positions = torch.arange(8).expand(3, 1, 8)
    spoilt = features.clone()
    spoilt[:, 5] += 1
    for step, (one, other) in enumerate(
        zip(*(draft.unroll(HeadInput(embeds, f, positions), STEPS) for f in (features, spoilt)), strict=True)
    ):
        changed = (one != other).any(-1)[0].nonzero()[:, 0].tolist()
        assert changed == list(range(5, 8 - step))


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_rows_of_roots_equal_those_of_all_pairs(tiny_qwen: sage.Target, kind: str) -> None:
    """Outputs and gradients in float64, for roots that differ between sequences, some without a chain of full depth."""
    draft = random_draft(tiny_qwen, kind, seed=3).double().requires_grad_(True)
    generator = torch.Generator().manual_seed(0)
    embeds, features = torch.randn(2, 2, 11, 32, generator=generator, dtype=torch.float64)
    positions, weight = torch.arange(11).expand(3, 2, 11), torch.rand(2, 11, generator=generator, dtype=torch.float64)
    roots = torch.tensor([[0, 4, 5, 10], [2, 3, 8, 9]])
    pairs = HeadInput(embeds, features, positions, weight)
    full = draft.unroll(pairs, STEPS)
    expected = [
        states[:, : 11 - i].gather(1, roots.clamp(max=10 - i)[..., None].expand(-1, -1, 32)) for i, states in enumerate(full)
    ]
    ours = draft.unroll(pairs, STEPS, roots)
    exists = [(roots + i <= 10)[..., None] for i in range(STEPS)]
    parameters, grads = list(draft.parameters()), []
    for steps in (ours, expected):
        loss = sum((states * is_row).square().sum() for states, is_row in zip(steps, exists, strict=True))
        grads.append(torch.autograd.grad(loss, parameters, allow_unused=True))
    for mine, theirs, is_row in zip(ours, expected, exists, strict=True):
        torch.testing.assert_close(mine * is_row, theirs * is_row, atol=1e-12, rtol=1e-12)
    for mine, theirs in zip(*grads, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=1e-10)
